"""What the plugin relies on in mergekit is checked before it is used."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from mergekit_ram.errors import IncompatibleMergekitError
from mergekit_ram.host import compatibility


def extend(name: str, module) -> None:
    importlib.import_module(f"mergekit_ram.plugin.{name}").extend(module)


@pytest.mark.parametrize("version", ["0.1.4", "0.0.6", "0.2", "0.2.0rc1", "1.0.0"])
def test_other_versions_are_refused(version, monkeypatch):
    monkeypatch.setattr(compatibility, "installed_version", lambda: version)
    with pytest.raises(IncompatibleMergekitError, match="0.1.5,<0.2") as error:
        extend("registry", SimpleNamespace())
    assert version in str(error.value)


@pytest.mark.parametrize("version", ["0.1.5", "0.1.5.post1", "0.1.17", None])
def test_supported_and_unknown_versions_are_taken(version, monkeypatch):
    monkeypatch.setattr(compatibility, "installed_version", lambda: version)
    methods = {}
    module = SimpleNamespace(registry=SimpleNamespace(_METHODS=methods))
    extend("registry", module)
    assert sorted(methods) == ["ram", "ramplus", "ramplus_tl"]


def planner_without(name: str) -> type:
    """A class that stands for mergekit's planner, all that the plugin relies on in place but for
    one name.
    """

    class MergePlanner:
        _tensors: list

        def _plan(self): ...
        def plan_tensor(self, weight, weights_in, models): ...
        def plan_to_disk(self, out_path): ...

    if name == "_tensors":
        MergePlanner.__annotations__ = {}
    elif name:
        delattr(MergePlanner, name)
    return MergePlanner


def module_without(name: str) -> SimpleNamespace:
    """A module that stands for one of mergekit's, all that the plugin relies on in place but for
    one name.
    """
    names = {
        "MergePlanner": planner_without(""),
        "run_merge": lambda merge_config, out_path, options, config_source: None,
        "plan_flat_merge": lambda config, options: None,
        "construct_param_dicts": lambda config, tensor_name: None,
        "main": SimpleNamespace(callback=lambda config_path, out_path: None),
        "make_tasks": lambda merge_configs, merge_options, intermediate_dir, lazy: None,
        "METHOD_PARAM_MAPS": {},
        "registry": SimpleNamespace(_METHODS={}),
    }
    owner, _, attribute = name.rpartition(".")
    if owner == "MergePlanner":
        names[owner] = planner_without(attribute)
    elif owner == "registry":
        names[owner] = SimpleNamespace()
    elif name:
        names[name] = None
    return SimpleNamespace(**names, __name__="mergekit")


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("registry", "registry._METHODS"),
        ("planner", "MergePlanner._plan"),
        ("planner", "MergePlanner._tensors"),
        ("planner", "MergePlanner.plan_tensor"),
        ("planner", "MergePlanner.plan_to_disk"),
        ("merging", "run_merge"),
        ("state_dicts", "plan_flat_merge"),
        ("state_dicts", "construct_param_dicts"),
        ("state_dicts", "main"),
        ("multimerge", "make_tasks"),
        ("genome", "METHOD_PARAM_MAPS"),
    ],
)
def test_changed_internals_are_a_clear_error(name, gone):
    extend(name, module_without(""))
    with pytest.raises(IncompatibleMergekitError, match="0.1.5,<0.2") as error:
        extend(name, module_without(gone))
    assert gone.rpartition(".")[2] in str(error.value)


@pytest.mark.parametrize("gone", ["_execute", "_execute_resolved", "_bind_group_parameters"])
def test_changed_merge_methods_are_a_clear_error(gone, monkeypatch):
    from mergekit_ram.plugin import registry

    monkeypatch.delattr(registry.MergeMethod, gone)
    with pytest.raises(IncompatibleMergekitError, match=gone):
        extend("registry", module_without(""))


def test_model_wide_method_run_outside_a_plan_never_takes_the_tensor_local_ratio():
    """A planner that went another way than the extended one would run the
    method without a ratio.
    """
    from mergekit.merge_methods.base import BatchOptions

    from mergekit_ram.host.methods import METHODS
    from mergekit_ram.plugin import registry

    method = registry.RegisteredMethod(METHODS["ramplus"])
    with pytest.raises(IncompatibleMergekitError, match="planned merge"):
        method._execute([None], [{}], BatchOptions(), input_dtypes=[None])
