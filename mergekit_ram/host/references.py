"""Models as a recipe names them: written to be read back as the same, and replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from pydantic import BaseModel


def plain(value: Any) -> Any:
    """A recipe, or a part of one, as YAML and JSON have it, without what is left to its default.

    mergekit's own dump fails on a path with a space, and writes one with ``+`` or ``@`` as if that
    were an adapter or a revision.
    """
    if isinstance(value, ModelReference) and _read_back(str(value)) == value:
        return str(value)
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {n: plain(v) for n, v in value if v != fields[n].default}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def to_yaml(config: MergeConfiguration) -> str:
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True).rstrip()


def _read_back(text: str) -> ModelReference | None:
    try:
        return ModelReference.parse(text)
    except RuntimeError:  # mergekit's, of text with more separators than parts
        return None


def replaced(
    config: MergeConfiguration, function: Callable[[ModelReference], ModelReference]
) -> MergeConfiguration:
    """A copy of a recipe with every model replaced by the function's value for it."""

    def of(value: Any) -> Any:
        if isinstance(value, ModelReference):
            return function(value)
        if isinstance(value, BaseModel):
            return value.model_copy(update={n: of(v) for n, v in value})
        if isinstance(value, Mapping):
            return {key: of(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(of, value))
        return value

    return of(config)


def separator_hint(text: str) -> str:
    """How to name a path that holds what separates adapters and revisions."""
    return (
        "`+` separates a model from its adapter and `@` from its revision; "
        f'a path that holds one is written {{model: {{path: "{text}"}}}}'
    )


def misread(model: ModelReference) -> bool:
    """Whether what a recipe names is a path that mergekit takes apart at a separator."""
    apart = bool(model.lora or model.model.revision)
    parts = [model.model.path, *([model.lora.path] if model.lora else [])]
    return apart and os.path.exists(str(model)) and not all(map(os.path.exists, parts))


def dumpable(model: ModelReference) -> bool:
    """Whether mergekit's own dump of a recipe can hold the model."""
    return model.override_architecture is not None or not set(str(model)) & set(' "')
