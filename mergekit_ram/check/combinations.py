"""Which models a recipe merges with each other, and what is wrong with the choice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration

from mergekit_ram.check.problems import NO_DTYPES, RECIPE
from mergekit_ram.errors import Problem


@dataclass(frozen=True)
class Combination:
    """Models that a recipe merges with each other, and the layers it takes of each."""

    place: str
    base: ModelReference | None
    models: tuple[ModelReference, ...]
    layers: tuple[tuple[int, int] | None, ...]

    @property
    def agents(self) -> list[ModelReference]:
        return [model for model in self.models if model != self.base]


def combinations(config: MergeConfiguration) -> Iterator[Combination]:
    modules = config.modules or {"": config}
    for name, module in modules.items():
        prefix = f"modules.{name}." if name else ""
        if module.models:
            models = tuple(source.model for source in module.models)
            yield Combination(f"{prefix}models", config.base_model, models, (None,) * len(models))
        for i, merged in enumerate(module.slices or ()):
            yield Combination(
                f"{prefix}slices[{i}]",
                merged.base_model or config.base_model,
                tuple(source.model for source in merged.sources),
                tuple(tuple(source.layer_range) for source in merged.sources),
            )


def without(config: MergeConfiguration, unplanned: set[ModelReference]) -> MergeConfiguration:
    """A copy of a recipe that can be planned.

    It lacks some of its models, the second mention of any, and dtypes, which may be unusable.
    """
    config = config.model_copy(update=NO_DTYPES, deep=True)
    if config.base_model in unplanned:
        config.base_model = None

    def kept(sources: list[Any]) -> list[Any]:
        first = {source.model: source for source in reversed(sources)}
        return [s for s in sources if first[s.model] is s and s.model not in unplanned]

    for module in (config.modules or {"": config}).values():
        if module.models:
            module.models = kept(module.models)
        for merged in module.slices or ():
            merged.sources = kept(merged.sources)
    return config


def combination_problems(config: MergeConfiguration) -> Iterator[Problem]:
    found = list(combinations(config))
    for combination in found:
        yield from agent_problems(combination)
    # Where other parts have agents, the base's weights go through.
    if not any(combination.agents for combination in found):
        yield from map(no_agent, found)


def agent_problems(combination: Combination) -> Iterator[Problem]:
    place, base = combination.place, combination.base
    if base is None:
        yield Problem(
            RECIPE,
            f"{place}: no base_model",
            "add `base_model:`, the model that all agents were trained from",
        )
    elif None not in combination.layers and base not in combination.models:
        yield Problem(
            RECIPE,
            f"{place}: the base {base} is not among the sources",
            "list it as a source, with the layers it contributes",
        )
    seen: dict[str, ModelReference] = {} if base is None else {_place(base): base}
    for agent in combination.agents:
        twin = seen.setdefault(_place(agent), agent)
        if twin is not agent:
            role = "the base" if twin == base else "listed before"
            yield Problem(
                RECIPE,
                f"{place}: {agent} is the same model as {twin}, {role}",
                "list every agent once, and the base only as `base_model:`",
            )


def no_agent(combination: Combination) -> Problem:
    return Problem(
        RECIPE,
        f"{combination.place}: no agent besides the base",
        "list the models to merge under `models:`",
    )


def _place(model: ModelReference) -> str:
    """Where a model really is, so that two spellings of one directory are one model."""
    path = model.model.path
    if not os.path.exists(path):
        return str(model)
    lora = model.lora and (
        os.path.realpath(model.lora.path) if os.path.exists(model.lora.path) else str(model.lora)
    )
    return f"{os.path.realpath(path)}+{lora}"
