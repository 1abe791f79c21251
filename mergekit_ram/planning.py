"""Every touch of what mergekit keeps private: registering the methods, running them, extending the planner.

Each function first checks what it relies on and, where that has changed, says which versions of mergekit work.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import yaml
from mergekit.common import dtype_from_name
from mergekit.merge_methods.base import BatchOptions, MergeMethod, TensorGroup
from safetensors import SafetensorError

from mergekit_ram import _autoload, garbage
from mergekit_ram._autoload import SUPPORTED
from mergekit_ram.errors import (
    IncompatibleMergekitError,
    MergeError,
    ParameterError,
    RecipeError,
    UnplannableError,
)
from mergekit_ram.methods import (
    MEASURE,
    METHODS,
    RECORD,
    RESCALING,
    RamMethod,
    Refusals,
    rescaling_by_agent,
    weights_refusal,
)
from mergekit_ram.overlap import GroupOverlap, sum_overlaps
from mergekit_ram.report import LOG, MergeRecord, overflow_warnings

_FIRST, _BEYOND = (0, 1, 5), (0, 2, 0)

_BY_NAME = {method.spec.name: method for method in METHODS}


_MARK = "_extended_by_mergekit_ram"


def _once(extend: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Extend a module only once, until it is reloaded, whatever others put in the place of its functions meanwhile."""

    @functools.wraps(extend)
    def extend_once(module: ModuleType) -> None:
        if not getattr(module, _MARK, False):
            extend(module)
            setattr(module, _MARK, True)

    return extend_once


def register_methods(module: ModuleType) -> None:
    """Put the methods into mergekit's registry, in place of its own of the same names.

    Args:
        module: ``mergekit.merge_methods``.
    """
    _require_version()
    _require_parameters(
        MergeMethod, "_execute", ["groups", "parameters", "options", "input_dtypes"]
    )
    _require_parameters(MergeMethod, "_execute_resolved", ["groups", "parameters"])
    _require_parameters(MergeMethod, "_bind_group_parameters", ["group", "supplied"])
    registry = getattr(module.registry, "_METHODS", None)
    _require(isinstance(registry, dict), "registry._METHODS is not a dictionary")
    for method in METHODS:
        if not isinstance(registry.get(method.spec.name), RegisteredMethod):
            registry[method.spec.name] = RegisteredMethod(method)


class RegisteredMethod(MergeMethod):
    """Runs a method on the groups that mergekit hands over.

    mergekit's own group methods convert whole tensors to one dtype before, and to the output dtype after. Here both
    happen inside the kernel, block by block and with one rounding.
    """

    def __init__(self, method: RamMethod):
        self.method = method
        self.spec = method.spec

    def _bind_group_parameters(
        self, group: TensorGroup, *supplied: Any
    ) -> dict[str, Any]:
        """Bind for a direct call, whose groups are all there is: a model-wide ratio is over them."""
        refusals = Refusals()
        refusals.tensor = group.metadata.name or refusals.tensor
        with refusals.collect():
            values = super()._bind_group_parameters(group, *supplied)
        _note_weights(refusals, values, values["weight"].values())
        found = list(refusals)
        if found:
            raise ParameterError(f"merge method {self.spec.name}: {'; '.join(found)}")
        if self.method.ratio_scope == "model":
            values[RESCALING] = None
        return values

    def _execute(
        self,
        groups: Sequence[TensorGroup],
        parameters: list[dict[str, Any]],
        options: BatchOptions,
        *,
        input_dtypes: Sequence[torch.dtype | None],
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Any, ...]:
        work = list(zip(groups, parameters, input_dtypes))
        if any(MEASURE in values for values in parameters):
            return tuple(
                values[MEASURE](self.method, group, values, input_dtype=input_dtype)
                for group, values, input_dtype in work
            )
        if self.method.ratio_scope == "model":
            _require(
                all(RESCALING in values for values in parameters),
                f"{self.spec.name} was run outside a planned merge",
            )
            if any(values[RESCALING] is None for values in parameters):
                overlap = sum_overlaps(self._count(*item) for item in work)
                for values in parameters:
                    values[RESCALING] = rescaling_by_agent(overlap, values)
        overflows: dict[str, int] = {}
        merged = []
        for group, values, input_dtype in work:
            record = values.get(RECORD)
            merged.append(
                self.method.merge_group(
                    group,
                    values,
                    input_dtype=input_dtype,
                    out_dtype=out_dtype,
                    rescaling=values.get(RESCALING),
                    record=record,
                    overflowed=record.add_overflow if record else overflows.__setitem__,
                )
            )
        for warning in overflow_warnings(overflows):
            LOG.warning(warning)
        return tuple(merged)

    def _count(
        self,
        group: TensorGroup,
        values: Mapping[str, Any],
        input_dtype: torch.dtype | None,
    ) -> GroupOverlap:
        return self.method.count_group(group, values, input_dtype=input_dtype)


@_once
def extend_planner(module: ModuleType) -> None:
    """Have the planner check parameters, round once and measure a model-wide ratio, for the methods of ours.

    Args:
        module: ``mergekit.plan``.
    """
    planner = module.MergePlanner
    if hasattr(planner, "mergekit_ram_record"):
        return
    _extend_writer()
    _require_parameters(planner, "_plan", [])
    _require_parameters(planner, "plan_tensor", ["weight", "weights_in", "models"])
    _require("_tensors" in planner.__annotations__, "MergePlanner._tensors is gone")
    _require_parameters(planner, "plan_to_disk", ["out_path"])
    plan, plan_tensor = planner._plan, planner.plan_tensor
    plan_to_disk = planner.plan_to_disk

    @functools.wraps(plan)
    def extended_plan(self) -> None:
        method = _BY_NAME.get(self.config.merge_method)
        if method is None:
            return plan(self)
        from mergekit_ram.check.problems import unplannable
        from mergekit_ram.references import plain

        # Planning rewrites the configuration, so take the recipe before.
        recipe = plain(self.config)
        refusals = Refusals()
        with refusals.collect():
            try:
                plan(self)
            except MergeError:
                raise
            except Exception as error:
                raise UnplannableError(
                    method.spec.name, [unplannable(error)]
                ) from error
        weights = [weight for weight, _ in self._tensors]
        merges = [
            _round_once(task, weight.force_dtype or self.config.out_dtype)
            for weight, task in self._tensors
        ]
        record = _record(method, merges, self.config.base_model, recipe)
        _require_mergeable(merges, refusals, record, self.config.dtype)
        self.mergekit_ram_record = record
        if not _on_cluster(self.options):
            merges = _extended_merges(method, merges, record, self.options)
        self._tensors = list(zip(weights, merges))

    @functools.wraps(plan_to_disk)
    def extended_plan_to_disk(self, out_path: str) -> list[Any]:
        targets = plan_to_disk(self, out_path)
        record = self.mergekit_ram_record
        if _on_cluster(self.options):
            targets = _distributed(targets, record, self.options)
        elif record is not None:
            _stream(task for _, task in self._tensors)
        return _with_report(targets, out_path, record)

    @functools.wraps(plan_tensor)
    def extended_plan_tensor(self, weight, weights_in, models, *args, **kwargs) -> None:
        _name_tensor(weight.name)
        if self.config.merge_method in _BY_NAME and len(weights_in) < len(models):
            # mergekit counts the first slice's sources for what comes after the last one, all by one name.
            weights_in = [weight] * len(models)
        plan_tensor(self, weight, weights_in, models, *args, **kwargs)

    planner.mergekit_ram_record = None
    planner._plan, planner.plan_tensor = extended_plan, extended_plan_tensor
    planner.plan_to_disk = extended_plan_to_disk


@_once
def extend_merge(module: ModuleType) -> None:
    """Check a recipe first, let the output appear only when it is whole, and describe the agents in its card.

    Args:
        module: ``mergekit.merge``.
    """
    expected = ["merge_config", "out_path", "options", "config_source"]
    _require_parameters(module, "run_merge", expected)
    run_merge = module.run_merge
    if _is_extended(run_merge):
        return

    @functools.wraps(run_merge)
    def extended_run_merge(
        merge_config, out_path, options, config_source=None, **kwargs
    ) -> None:
        if merge_config.merge_method not in _BY_NAME:
            return run_merge(merge_config, out_path, options, config_source, **kwargs)
        from mergekit_ram import architectures, cluster, output, references
        from mergekit_ram.check import recipes

        garbage.spare_imports()
        source = config_source or references.to_yaml(merge_config)
        plain = cluster.of_merge(options)
        merge_config = architectures.unwrap(merge_config, plain)
        recipes.require_mergeable(merge_config, plain, out_path)
        try:
            with (
                cluster.finished_parts_kept(options),
                output.staged_output(out_path) as staging,
            ):
                run_merge(merge_config, staging, options, source, **kwargs)
                output.drop_quantization(staging)
                output.add_card_section(staging)
        except MergeError:
            raise
        except Exception:
            # Did something happen to a checkpoint meanwhile? That says more than where it was met.
            recipes.require_mergeable(merge_config, plain, out_path)
            raise

    _replace_everywhere("run_merge", run_merge, _marked(extended_run_merge))


def _is_extended(function: Any) -> bool:
    """Whether a function is one of ours, or another plugin's that wraps one of ours with ``functools.wraps``."""
    return getattr(function, _MARK, False)


def _marked(function: Any) -> Any:
    setattr(function, _MARK, True)
    return function


def _replace_everywhere(name: str, function: Any, extended: Any) -> None:
    """Replace a function also in the modules that took it by its name before this one was imported."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is function:
            setattr(module, name, extended)


def output_config(config: Any, architecture: Any, options: Any) -> Any:
    """The transformers config that mergekit is going to save with a merged model."""
    from mergekit import merge

    _require_parameters(merge, "_model_out_config", ["config", "arch_info"])
    return merge._model_out_config(
        config, architecture, trust_remote_code=options.trust_remote_code
    )


def _extend_writer() -> None:
    """Name the file that cannot be written, when that is one of a model that is merged by our methods."""
    from mergekit.io import tensor_writer

    writer = tensor_writer.TensorWriter
    _require_parameters(
        writer, "_write_shard_task", ["shard_data", "shard_index", "shard_path"]
    )
    write = writer._write_shard_task
    if _is_extended(write):
        return

    @functools.wraps(write)
    def extended_write(self, shard_data, shard_index, shard_path) -> None:
        from mergekit_ram import output

        try:
            write(self, shard_data, shard_index, shard_path)
        except (OSError, SafetensorError, RuntimeError) as error:
            directory = output.published_at(self.out_path)
            if directory == self.out_path:
                raise
            reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
            file = os.path.join(directory, os.path.basename(shard_path))
            raise output.unwritable(file, reason) from error

    writer._write_shard_task = _marked(extended_write)


@_once
def extend_multimerge(module: ModuleType) -> None:
    """Check every recipe of ``mergekit-multi`` before the first is merged.

    Args:
        module: ``mergekit.scripts.multimerge``.
    """
    expected = ["merge_configs", "merge_options", "intermediate_dir", "lazy"]
    _require_parameters(module, "make_tasks", expected)
    make_tasks = module.make_tasks
    if _is_extended(make_tasks):
        return
    signature = inspect.signature(make_tasks)

    @functools.wraps(make_tasks)
    def extended_make_tasks(*args, **kwargs):
        from mergekit_ram.check.recipes import check_steps

        given = signature.bind(*args, **kwargs).arguments
        steps = {
            name: config
            for name, config in given["merge_configs"].items()
            if config.merge_method in _BY_NAME
        }
        pending = [
            os.path.join(given["intermediate_dir"], name)
            for name in filter(None, given["merge_configs"])
        ]
        problems = check_steps(steps, given["merge_options"], pending=pending)
        if problems:
            methods = dict.fromkeys(config.merge_method for config in steps.values())
            raise RecipeError(", ".join(methods), problems)
        return make_tasks(*args, **kwargs)

    _replace_everywhere("make_tasks", make_tasks, _marked(extended_make_tasks))


@_once
def extend_raw_pytorch(module: ModuleType) -> None:
    """The same for ``mergekit-pytorch``, which plans by itself.

    Args:
        module: ``mergekit.scripts.merge_raw_pytorch``.
    """
    plan, bind = module.plan_flat_merge, module.construct_param_dicts
    if _is_extended(plan):
        return
    _extend_writer()
    _require_parameters(module, "plan_flat_merge", ["config", "options"])
    _require_parameters(module, "construct_param_dicts", ["config", "tensor_name"])
    run = getattr(module.main, "callback", None)
    _require(callable(run), "merge_raw_pytorch.main is not a command")

    @functools.wraps(plan)
    def extended_plan(config, out_path, tensor_union, tensor_intersection, options):
        arguments = (config, out_path, tensor_union, tensor_intersection, options)
        method = _BY_NAME.get(config.merge_method)
        if method is None:
            return plan(*arguments)
        from mergekit_ram import output
        from mergekit_ram.check.state_dicts import plannable_raw, raw_problems

        problems = raw_problems(
            config,
            tensor_union=tensor_union,
            tensor_intersection=tensor_intersection,
            out_path=output.published_at(out_path) if out_path else None,
            lazy=options.lazy_unpickle,
        )
        if not problems:
            return planned(method, *arguments)
        with contextlib.suppress(Exception):  # of what is known to be wrong already
            plannable = plannable_raw(config)
            try:
                planned(method, plannable, out_path, True, False, options)
            except RecipeError as error:
                problems += error.problems
        raise RecipeError(config.merge_method, problems)

    def planned(method, config, out_path, tensor_union, tensor_intersection, options):
        from mergekit_ram.references import plain

        refusals = Refusals()
        with refusals.collect():
            targets = plan(config, out_path, tensor_union, tensor_intersection, options)
        *saves, finalize = targets
        merges = [_by_number(save.tensor_task) for save in saves]
        recipe = plain(config)
        record = _record(method, merges, config.base_model, recipe)
        _require_mergeable(merges, refusals, record, config.dtype)
        if not _on_cluster(options):
            merges = _extended_merges(method, merges, record, options)
        saves = [
            save.model_copy(update={"tensor_task": merge})
            for save, merge in zip(saves, merges)
        ]
        finalize = finalize.model_copy(update={"tensor_save_tasks": tuple(saves)})
        targets = [*saves, finalize]
        if _on_cluster(options):
            targets = _distributed(targets, record, options)
        return _with_report(targets, out_path, record)

    @functools.wraps(bind)
    def extended_bind(config, merge_method, tensor_name):
        _name_tensor(tensor_name)
        return bind(config, merge_method, tensor_name)

    @functools.wraps(run)
    def extended_run(*args, config_path, out_path, **kwargs):
        if _recipe_method(config_path) not in _BY_NAME:
            return run(*args, config_path=config_path, out_path=out_path, **kwargs)
        from mergekit_ram import output
        from mergekit_ram.check.state_dicts import require_readable

        try:
            with output.staged_output(out_path) as staging:
                run(*args, config_path=config_path, out_path=staging, **kwargs)
        except MergeError:
            raise
        except Exception:
            require_readable(config_path)
            raise

    _replace_everywhere("plan_flat_merge", plan, _marked(extended_plan))
    module.construct_param_dicts = extended_bind
    module.main.callback = extended_run


def _recipe_method(path: str) -> str | None:
    """The merge method that a recipe file names; None, for mergekit to say why, if it is no recipe."""
    try:
        with open(path, encoding="utf-8") as file:
            recipe = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    method = recipe.get("merge_method") if isinstance(recipe, dict) else None
    return method if isinstance(method, str) else None


def extend_genome(module: ModuleType) -> None:
    """Let ``mergekit-evolve`` search the agents' weights.

    Args:
        module: ``mergekit.evo.genome``.
    """
    maps = getattr(module, "METHOD_PARAM_MAPS", None)
    _require(isinstance(maps, dict), "evo.genome.METHOD_PARAM_MAPS is not a dictionary")
    for name in _BY_NAME:
        maps[name] = ["weight"]


def _record(
    method: RamMethod, merges: Sequence[Any], base_model: Any, recipe: dict[str, Any]
) -> MergeRecord:
    agents = (
        model
        for merge in merges
        for model in merge.model_order
        if model != merge.base_model
    )
    settings = {}
    if merges and method.ratio_scope != "none":
        settings = {name: merges[0].parameters[name] for name in ("ratio", "alpha")}
    return MergeRecord(
        method=method.spec.name,
        base_model=str(base_model) if base_model else None,
        recipe=recipe,
        agents=dict.fromkeys(agents),
        **settings,
    )


def _extended_merges(
    method: RamMethod, merges: Sequence[Any], record: MergeRecord, options: Any
) -> list[Any]:
    from mergekit_ram import tasks

    if method.ratio_scope == "model":
        return tasks.merges_by_model_ratio(merges, record, options)
    return tasks.recorded_merges(merges, record)


def _on_cluster(options: Any) -> bool:
    from mergekit_ram.cluster import ClusterOptions

    return isinstance(options, ClusterOptions)


def _distributed(
    targets: list[Any], record: MergeRecord | None, options: Any
) -> list[Any]:
    from mergekit_ram import cluster

    if record is None:
        raise MergeError(f"a cluster merges {', '.join(_BY_NAME)}, no other method")
    model_wide = _BY_NAME[record.method].ratio_scope == "model"
    return cluster.distributed(targets, record, options, model_wide=model_wide)


def _stream(merges: Iterable[Any]) -> None:
    from mergekit_ram import loading

    loading.stream(merges)


def _with_report(
    targets: list[Any], out_path: str, record: MergeRecord | None
) -> list[Any]:
    """The targets of a plan, and the report once its model is written."""
    from mergekit_ram import tasks

    if record is None:
        return targets
    record.reported = True
    finalize = [task for task in targets if isinstance(task, tasks.FinalizeModel)]
    _require(len(finalize) == 1, "a plan does not end in one FinalizeModel")
    saves = tasks.batched_saves(finalize[0].tensor_save_tasks)
    finalized = finalize[0].model_copy(update={"tensor_save_tasks": saves})
    report = tasks.WriteReport(out_path=out_path, finalize=finalized, record=record)
    # The report needs everything that is saved. mergekit compares each task with all targets, so 20 000 take hours.
    implied = (tasks.SaveTensor, tasks.FinalizeModel)
    return [*(task for task in targets if not isinstance(task, implied)), report]


def _by_number(task: Any) -> Any:
    """The same merge, its inputs not passed by their paths, which mergekit takes apart at spaces, ``+`` and ``@``."""
    from mergekit_ram import tasks

    tensors = tasks.NumberedTensors(tensors=task.gather_tensors.tensors)
    return task.model_copy(update={"gather_tensors": tensors})


def _round_once(task: Any, name: str | None) -> Any:
    """The same merge, writing the dtype that is saved, so that saving does not round again."""
    dtype = dtype_from_name(name)
    if dtype is None or not dtype.is_floating_point:
        return task
    return task.model_copy(update={"out_dtype": name})


def _require_mergeable(
    merges: Sequence[Any], refusals: Refusals, record: MergeRecord, dtype: str | None
) -> None:
    """Refuse what planning can show to be wrong, all at once, before a weight is read."""
    from mergekit_ram.check import tensors
    from mergekit_ram.check.problems import parameter_problem
    from mergekit_ram.recipe import parameter_warnings

    for merge in merges:
        refusals.tensor = merge.output_weight.name
        agents = [model for model in merge.model_order if model != merge.base_model]
        weights = [merge.input_parameters[agent]["weight"] for agent in agents]
        _note_weights(refusals, merge.parameters, weights)
    problems = [parameter_problem(refusal) for refusal in refusals]
    checkpoints = tensors.PlannedCheckpoints()
    problems += tensors.tensor_problems(merges, checkpoints)
    if problems:
        raise RecipeError(record.method, problems)
    record.warn(*parameter_warnings(record.method, record.recipe))
    record.warn(*tensors.rounding_warnings(record.agents, checkpoints, dtype))
    record.warn(*checkpoints.quantization_warnings())


def _note_weights(
    refusals: Refusals, parameters: Mapping[str, Any], weights: Iterable[float]
) -> None:
    refusal = weights_refusal(
        tuple(weights), normalize=parameters["normalize"], shared=parameters["shared"]
    )
    if refusal:
        refusals.note(refusal)


def _name_tensor(name: str) -> None:
    refusals = Refusals.current()
    if refusals is not None:
        refusals.tensor = name


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise IncompatibleMergekitError(
            f"this version of mergekit-ram works with mergekit {SUPPORTED}, and mergekit "
            f"{_installed_version() or 'of unknown version'} differs: {what}"
        )


def _require_version() -> None:
    version = _installed_version()
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    if found:
        numbers = tuple(int(part or 0) for part in found.groups())
        _require(_FIRST <= numbers < _BEYOND, "its version is outside that range")


def _require_parameters(owner: Any, name: str, expected: Sequence[str]) -> None:
    function = getattr(owner, name, None)
    _require(callable(function), f"{owner.__name__}.{name} is gone")
    parameters = inspect.signature(function).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return  # another plugin's, which hands on what it is given
    missing = [parameter for parameter in expected if parameter not in parameters]
    _require(not missing, f"{owner.__name__}.{name} takes no {', '.join(missing)}")


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("mergekit")
    except importlib.metadata.PackageNotFoundError:
        return None


# mergekit may have been imported for this module, before there was anything to register.
_autoload.install()
