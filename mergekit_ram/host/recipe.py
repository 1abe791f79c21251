"""Recipes as they are written, for any of mergekit's commands: read once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from mergekit.config import MergeConfiguration
from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig
from pydantic import ValidationError

from mergekit_ram.errors import MalformedRecipeError, MergeError
from mergekit_ram.host.known_methods import parameter_names, parameters_set, require_method
from mergekit_ram.host.malformed import Fault, schema_faults, validation_faults, yaml_fault
from mergekit_ram.host.methods import METHODS

_PARAMETERS = "parameters"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Recipe:
    """A recipe as plain YAML content.

    Attributes:
        content: what the file holds, without a name.
        source: the text of the file.
        warnings: what the file says that a merge pays no heed to.
        tensor_union, tensor_intersection: how ``mergekit-pytorch`` takes state dicts of different
            tensors.
    """

    content: Mapping[str, Any]
    source: str = ""
    warnings: tuple[str, ...] = ()
    tensor_union: bool = False
    tensor_intersection: bool = False

    @classmethod
    def read(cls, path: str, **settings: bool) -> Recipe:
        """Read a file of one recipe.

        Raises:
            MergeError: the file holds no recipe, several, or one of an unknown method.
        """
        recipes = read_recipes(path, **settings)
        if len(recipes) > 1:
            raise MergeError(
                f"{path} holds {len(recipes)} recipes: merge "
                "them with mergekit-multi, or name a file of one"
            )
        (recipe,) = recipes.values()
        require_method(recipe.method)
        return recipe

    @property
    def method(self) -> str:
        return self.content["merge_method"]

    @property
    def of_state_dicts(self) -> bool:
        """Whether it is for ``mergekit-pytorch``, which takes files instead of models."""
        return _merges_files(self.content)

    def configuration(self) -> MergeConfiguration | RawPyTorchMergeConfig:
        """What mergekit makes of it; a new one every time, since planning rewrites it."""
        return _schema(self.content).model_validate(self.content)

    def parameters(self) -> set[str]:
        """Names of the parameters that it sets anywhere."""
        return parameters_set(self.content)

    def by_method(self, method: str, parameters: Mapping[str, Any] | None = None) -> Recipe:
        """The same models merged by another method.

        Parameters that it does not take are left out, and ``epsilon`` where it would change its
        meaning, as between RAM and DELLA.

        Args:
            parameters: take the place of the recipe's own, wherever it sets them.
        """
        overridden = set(parameters or {})
        if (self.method in METHODS) != (method in METHODS):
            overridden.add("epsilon")
        taken = set(parameter_names(method)) - overridden

        def kept(settings: Mapping[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in settings.items() if k in taken}

        content = _map_parameters(self.content, kept)
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


def read_recipes(path: str, **settings: bool) -> dict[str | None, Recipe]:
    """The recipes of a file by name, None for one without.

    Only a file of ``mergekit-multi`` has several.

    Args:
        settings: ``tensor_union`` and ``tensor_intersection`` of ``Recipe``.

    Raises:
        MergeError: says where in the file something else was expected.
    """
    source = _text(path)
    try:
        documents = list(yaml.safe_load_all(source))
        nodes = list(yaml.compose_all(source, yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise MalformedRecipeError(path, [yaml_fault(error)]) from None
    if not documents:
        raise MalformedRecipeError(path, ["it is empty"])
    return _recipes(documents, nodes, path, source, **settings)


def recipe_of(content: Mapping[str, Any], **settings: bool) -> Recipe:
    """The recipe that plain data holds, as a file of YAML would.

    Raises:
        MergeError: says where something else was expected.
    """
    name = "the recipe"
    source = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
    (recipe,) = _recipes([content], [None], name, source, **settings).values()
    require_method(recipe.method)
    return recipe


def _recipes(
    documents: Sequence[Any],
    nodes: Sequence[yaml.Node | None],
    path: str,
    source: str,
    **settings: bool,
) -> dict[str | None, Recipe]:
    recipes: dict[str | None, Recipe] = {}
    faults: list[str] = []
    for content, node in zip(documents, nodes):
        found = list(_faults(content))
        faults += [fault.text(node) for fault in found if not fault.warned]
        if isinstance(content, Mapping):
            name = content.get("name")
            if name in recipes:
                faults.append(f"two recipes are {f'named {name}' if name else 'without name'}")
            recipes[name] = Recipe(
                {key: value for key, value in content.items() if key != "name"},
                source,
                tuple(f"{path}: {fault.text(node)}" for fault in found if fault.warned),
                **settings,
            )
    if faults:
        raise MalformedRecipeError(path, faults)
    return recipes


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise MergeError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MalformedRecipeError(path, [f"byte {error.start} is not of UTF-8 text"]) from None


def _faults(content: Any) -> Iterator[Fault]:
    if not isinstance(content, Mapping):
        yield Fault((), "expected `merge_method:`, `base_model:` and `models:`")
        return
    schema = _schema(content)
    found = list(schema_faults(content, schema, also=("name",)))
    yield from found
    try:
        schema.model_validate(content)
    except ValidationError as error:
        yield from validation_faults(error, content)
    except RuntimeError as error:  # mergekit's own, which tell no place
        if all(fault.warned for fault in found):
            yield Fault((), str(error))


def _schema(content: Mapping[str, Any]) -> Any:
    return RawPyTorchMergeConfig if _merges_files(content) else MergeConfiguration


def _merges_files(content: Mapping[str, Any]) -> bool:
    models = content.get("models")
    models = models if isinstance(models, list) else []
    sources = [content.get("base_model"), *models]
    paths = [s.get("model") if isinstance(s, Mapping) else s for s in sources]
    return any(
        isinstance(path, str)
        and not os.path.isdir(path)
        and (os.path.isfile(path) or path.lower().endswith(_WEIGHT_FILES))
        for path in paths
    )


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
    """A parameter's setting, the default taken for tensors that none of its filters matches."""
    if setting is None:
        return default
    conditions = setting if isinstance(setting, list) else [setting]
    if not all(isinstance(condition, Mapping) for condition in conditions):
        return setting
    return [*conditions, {"value": default}]
