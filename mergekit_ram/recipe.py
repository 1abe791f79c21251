"""Recipes as they are written, and their plans: for any merge method, without merging anything.

mergekit plans a recipe for ``mergekit-yaml`` and one for ``mergekit-pytorch`` in different ways. Both end in a list of
``SaveTensor`` tasks, one an output tensor, each of the merge that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml
from mergekit import merge_methods
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.graph import TaskUniverse
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.merge_methods.base import ParameterScope
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.scripts import merge_raw_pytorch

from mergekit_ram.check.files import merges_files
from mergekit_ram.check.recipes import require_mergeable
from mergekit_ram.errors import MergeError
from mergekit_ram.methods import METHODS

_OURS = frozenset(method.spec.name for method in METHODS)
_PARAMETERS = "parameters"
# What reading something else than a recipe runs into.
_MALFORMED = (ValueError, TypeError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Recipe:
    """A recipe as plain YAML content.

    Attributes:
        content: what the file holds.
        tensor_union, tensor_intersection: how ``mergekit-pytorch`` takes state dicts of different tensors.
    """

    content: Mapping[str, Any]
    tensor_union: bool = False
    tensor_intersection: bool = False

    @classmethod
    def read(cls, path: str, **settings: bool) -> Recipe:
        """Read a recipe of ``mergekit-yaml`` or of ``mergekit-pytorch``.

        Raises:
            MergeError: the file holds no recipe, one of an unknown method, or one without a base model.
        """
        with open(path, encoding="utf-8") as file:
            try:
                recipe = cls(yaml.safe_load(file), **settings)
                recipe._configuration()
            except (yaml.YAMLError, *_MALFORMED) as error:
                raise MergeError(f"{path} is not a recipe: {error}") from None
        require_method(recipe.method)
        if not any(_values(recipe.content, "base_model")):
            raise MergeError(
                f"{path} names no base_model, and what an agent changed is its difference from the base: add "
                "base_model, the model that all agents were trained from"
            )
        return recipe

    @property
    def method(self) -> str:
        return self.content["merge_method"]

    @property
    def of_state_dicts(self) -> bool:
        """Whether it is for ``mergekit-pytorch``, which takes files where ``mergekit-yaml`` takes models."""
        return merges_files(self.content)

    def parameters(self) -> set[str]:
        """Names of the parameters that it sets anywhere."""
        return {name for names in _values(self.content, _PARAMETERS) for name in names}

    def by_method(
        self, method: str, parameters: Mapping[str, Any] | None = None
    ) -> Recipe:
        """The same models merged by another method.

        ``epsilon`` is left out where it would change its meaning, as between RAM and DELLA.

        Args:
            parameters: take the place of the recipe's own, wherever it sets them.
        """
        foreign = (self.method in _OURS) != (method in _OURS)
        overridden = {*(parameters or {}), *(["epsilon"] if foreign else [])}

        def without(settings: Mapping[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in settings.items() if k not in overridden}

        content = _map_parameters(self.content, without)
        content[_PARAMETERS] = {
            **(content.get(_PARAMETERS) or {}),
            **(parameters or {}),
        }
        return replace(self, content={**content, "merge_method": method})

    def with_defaults(self, parameters: Mapping[str, Any]) -> Recipe:
        """The same recipe, with values for the tensors and models that it sets none for."""
        settings = dict(self.content.get(_PARAMETERS) or {})
        for name, default in parameters.items():
            settings[name] = _with_default(settings.get(name), default)
        return replace(self, content={**self.content, _PARAMETERS: settings})

    def plan(self, options: MergeOptions) -> list[SaveTensor]:
        """Every output tensor and how it is made. For our own methods all problems of the recipe are found first.

        Raises:
            MergeError: it cannot be merged.
        """
        try:
            targets = self._plan(options)
        except MergeError:
            raise
        except (RuntimeError, ValueError, OSError) as error:
            raise MergeError(f"{self.method} cannot merge this recipe: {error}") from error  # fmt: skip
        planned = TaskUniverse(targets).tasks
        saves = [task for task in planned if isinstance(task, SaveTensor)]
        if not saves:
            raise MergeError("the recipe merges no tensor")
        return saves

    def _plan(self, options: MergeOptions) -> list[Any]:
        config = self._configuration()
        if self.of_state_dicts:
            return merge_raw_pytorch.plan_flat_merge(
                config, "", self.tensor_union, self.tensor_intersection, options
            )
        if self.method in _OURS:
            require_mergeable(config, options, None)
        LoaderCache().setup(options)
        architecture = get_architecture_info(config, options)
        first = config.base_model or config.referenced_models()[0]
        model_config = first.config(options.trust_remote_code)
        return MergePlanner(config, architecture, options, model_config).plan_to_disk("")  # fmt: skip

    def _configuration(self) -> Any:
        if self.of_state_dicts:
            return merge_raw_pytorch.RawPyTorchMergeConfig.model_validate(self.content)
        return MergeConfiguration.model_validate(self.content)


def require_method(name: str) -> None:
    """Refuse the name of a merge method that mergekit does not know.

    Raises:
        MergeError: lists the known ones.
    """
    known = sorted(method.spec.name for method in merge_methods.registered_methods())
    if name not in known:
        raise MergeError(f"no merge method {name}; known are {', '.join(known)}")


def required_parameters(method: str) -> tuple[str, ...]:
    """Names of the parameters without a default."""
    spec = merge_methods.get(method).spec
    return tuple(parameter.name for parameter in spec.parameters if parameter.required)


def parameter_names(method: str, *, by_model: bool) -> tuple[str, ...]:
    """Names of the parameters that have one value, or one a model."""
    spec = merge_methods.get(method).spec
    return tuple(
        parameter.name
        for parameter in spec.parameters
        if (parameter.scope != ParameterScope.SHARED) == by_model
    )


def _values(content: Any, key: str) -> Iterator[Any]:
    """What stands under a key, at any depth."""
    if isinstance(content, Mapping):
        if content.get(key):
            yield content[key]
        for name, inner in content.items():
            if name != key:
                yield from _values(inner, key)
    elif isinstance(content, list):
        for inner in content:
            yield from _values(inner, key)


def _map_parameters(content: Any, function: Callable[[Mapping], dict]) -> Any:
    """The content with every ``parameters`` mapping replaced by the function's value for it."""
    if isinstance(content, Mapping):
        return {
            key: function(value)
            if key == _PARAMETERS and isinstance(value, Mapping)
            else _map_parameters(value, function)
            for key, value in content.items()
        }
    if isinstance(content, list):
        return [_map_parameters(inner, function) for inner in content]
    return content


def _with_default(setting: Any, default: Any) -> Any:
    """A parameter's setting, taking the default for the tensors that none of its filters matches."""
    if setting is None:
        return default
    conditions = setting if isinstance(setting, list) else [setting]
    if not all(isinstance(condition, Mapping) for condition in conditions):
        return setting
    return [*conditions, {"value": default}]
