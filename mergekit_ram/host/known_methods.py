"""The merge methods that mergekit knows, ours among them, and their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergekit import merge_methods
from mergekit.merge_methods.base import ParameterScope

from mergekit_ram.errors import MergeError
from mergekit_ram.host.malformed import nearest
from mergekit_ram.host.methods import METHODS

_PARAMETERS = "parameters"
# Whose parameters a recipe may keep when only its merge_method becomes one of ours.
_TOLERATED_OF = ("task_arithmetic", "ties", "dare_ties", "dare_linear", "della", "della_linear")


def require_method(name: str) -> None:
    """Refuse the name of a merge method that mergekit does not know.

    Raises:
        MergeError: lists the known ones.
    """
    known = sorted(method.spec.name for method in merge_methods.registered_methods())
    if name not in known:
        meant = nearest(name, known)
        hint = f"; did you mean {meant}?" if meant else ""
        raise MergeError(f"no merge method {name}; known are {', '.join(known)}{hint}")


def required_parameters(method: str) -> tuple[str, ...]:
    """Names of the parameters without a default."""
    spec = merge_methods.get(method).spec
    return tuple(parameter.name for parameter in spec.parameters if parameter.required)


def parameter_names(method: str, *, by_model: bool | None = None) -> tuple[str, ...]:
    """Names of the parameters; of those only that have one value, or one a model, unless None."""
    spec = merge_methods.get(method).spec
    return tuple(
        parameter.name
        for parameter in spec.parameters
        if by_model in (None, parameter.scope != ParameterScope.SHARED)
    )


def parameters_set(content: Any) -> set[str]:
    """Names of the parameters that a recipe's content sets anywhere."""
    return {name for names in values_of(content, _PARAMETERS) for name in names}


def parameter_warnings(method: str, content: Any) -> list[str]:
    """Which parameters of a recipe its method pays no heed to.

    Those of methods that ours stand in for are tolerated.
    """
    taken = set(parameter_names(method))
    if method in METHODS:
        taken |= {name for other in _TOLERATED_OF for name in parameter_names(other)}
    warnings = []
    for name in sorted(parameters_set(content) - taken):
        meant = nearest(name, sorted(taken))
        others = [m.spec.name for m in merge_methods.registered_methods()]
        others = [other for other in others if name in parameter_names(other)]
        hint = f"did you mean {meant}?" if meant else ""
        if not meant and others:
            hint = f"it is one of {', '.join(others)}"
        warnings.append(
            f"{method} has no parameter {name}, so it is ignored{'; ' if hint else ''}{hint}"
        )
    return warnings


def values_of(content: Any, key: str) -> Iterator[Any]:
    """What stands under a key, at any depth."""
    if isinstance(content, Mapping):
        if content.get(key):
            yield content[key]
        for name, inner in content.items():
            if name != key:
                yield from values_of(inner, key)
    elif isinstance(content, list):
        for inner in content:
            yield from values_of(inner, key)
