"""The merge methods as mergekit sees them: names, parameters and their limits, and what they ask of the kernel.

Only public names of mergekit are used here; ``planning`` registers the methods and runs them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    InputContract,
    MergeMethodSpec,
    ParameterScope,
    ParameterSpec,
    TensorGroup,
)
from pydantic import Field, ValidationError

from mergekit_ram import kernel
from mergekit_ram.overlap import (
    OverlapCounts,
    RatioKind,
    rescaling_factors,
    total_counts,
)

REFERENCE_URL = "https://arxiv.org/abs/2601.13572"

# Parameters that a graph task binds besides the recipe's: count instead of merging, and λ by input ID.
COUNTING = "counting"
RESCALING = "rescaling"

# Subsets of weights are searched for a vanishing sum up to this many agents.
_MOST_SIGNED_WEIGHTS = 16


class ParameterError(ValueError):
    """A recipe's parameter that no merge can use. The message names parameter, value and, once known, tensor."""


class Parameter(ParameterSpec):
    """A parameter whose refusals name it."""

    def validate(self, value: Any) -> Any:
        try:
            return super().validate(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].replace("Input should", "should")
            raise ParameterError(f"{self.name}: {value!r} {reason}") from None


Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]

_SHARED = ParameterScope.SHARED
_PER_AGENT = ParameterScope.NON_BASE

COMMON_PARAMETERS = (
    Parameter("epsilon", NonNegative, _SHARED, default=1e-5),
    Parameter("weight", Finite, _PER_AGENT, default=1.0),
    Parameter("normalize", bool, _SHARED, default=True),
    Parameter("lambda", Finite, _SHARED, default=1.0),
    Parameter("shared", Literal["mean", "ties", "drop"], _SHARED, default="mean"),
    Parameter("density", Fraction, _PER_AGENT, default=1.0),
    Parameter("keep_unique", bool, _PER_AGENT, default=True),
)
RESCALING_PARAMETERS = (
    Parameter("r", NonNegative, _SHARED, default=0.1),
    Parameter("alpha", NonNegative, _SHARED, default=0.2),
    Parameter("ratio", Literal["unique", "changed"], _SHARED, default="unique"),
)


@dataclass(frozen=True)
class GroupOverlap:
    """Overlap of the agents of one tensor group, ``counts`` in the order of ``agents``."""

    agents: tuple[Hashable, ...]
    counts: OverlapCounts


def sum_overlaps(overlaps: Iterable[GroupOverlap]) -> GroupOverlap:
    """Overlap over all groups; the agents in order of first appearance, absent ones having changed nothing."""
    overlaps = list(overlaps)
    agents = tuple(dict.fromkeys(agent for o in overlaps for agent in o.agents))
    place = {agent: i for i, agent in enumerate(agents)}
    counts = total_counts(
        (o.counts.spread([place[a] for a in o.agents], len(agents)) for o in overlaps),
        len(agents),
    )
    return GroupOverlap(agents, counts)


@dataclass(frozen=True)
class RamMethod:
    """One of the RAM methods.

    Attributes:
        spec: what mergekit needs to know of it.
        ratio_scope: what the overlap-unique ratio is taken over. ``none`` for plain RAM, which has no ratio.
    """

    spec: MergeMethodSpec
    ratio_scope: Literal["none", "tensor", "model"]

    def merge_group(
        self,
        group: TensorGroup,
        parameters: Mapping[str, Any],
        *,
        input_dtype: torch.dtype | None,
        out_dtype: torch.dtype | None,
        rescaling: Mapping[Hashable, float] | None = None,
    ) -> torch.Tensor:
        """Merge one group.

        Args:
            parameters: bound values, per-agent ones keyed by input ID.
            rescaling: λ by input ID. None takes 1, or the tensor's own ratio where that is the method.
        """
        if rescaling is None and self.ratio_scope == "tensor":
            overlap = self.count_group(group, parameters, input_dtype=input_dtype)
            rescaling = rescaling_by_agent(overlap, parameters)
        return kernel.merge(
            group.base.tensor,
            _agents(group, parameters, rescaling or {}),
            _rule(parameters),
            input_dtype=input_dtype,
            out_dtype=out_dtype,
        )

    def count_group(
        self,
        group: TensorGroup,
        parameters: Mapping[str, Any],
        *,
        input_dtype: torch.dtype | None,
    ) -> GroupOverlap:
        """Count how the agents of one group overlap, by the masks that ``merge_group`` merges by."""
        counts = kernel.count(
            group.base.tensor,
            _agents(group, parameters, {}),
            _rule(parameters),
            input_dtype=input_dtype,
        )
        return GroupOverlap(tuple(entry.id for entry in group.non_base), counts)


def rescaling_by_agent(
    overlap: GroupOverlap, parameters: Mapping[str, Any]
) -> dict[Hashable, float]:
    """λ by input ID, for counts of any scope and the ``r``, ``alpha`` and ``ratio`` of one tensor."""
    kind: RatioKind = parameters["ratio"]
    factors = rescaling_factors(
        overlap.counts, r=parameters["r"], alpha=parameters["alpha"], kind=kind
    )
    return dict(zip(overlap.agents, factors))


def check_weights(
    weights: Sequence[float], *, normalize: bool, shared: kernel.SharedMode
) -> None:
    """Refuse weights that can leave Σw of Σwτ/Σw at zero.

    Shared updates are divided by the weights of the agents that made them, which may be any two or more. Agents
    of weight 0 among others are fine: they add nothing, and an element that only they changed keeps the base.

    Raises:
        ParameterError: all weights, or some that are not all 0, sum to zero.
    """
    if not normalize or shared == "drop" or len(weights) < 2:
        return
    listed = ", ".join(f"{weight:g}" for weight in weights)
    remedy = "use normalize: false, or weights that do not cancel"
    if not any(weights):
        raise ParameterError(
            f"weight: all are 0 ({listed}), so there is nothing to normalize by; {remedy}"
        )
    signed = [weight for weight in weights if weight != 0]
    if min(signed) > 0 or max(signed) < 0:
        return
    if len(signed) > _MOST_SIGNED_WEIGHTS:
        raise ParameterError(
            f"weight: {len(signed)} weights of both signs cannot be normalized; {remedy}"
        )
    tolerance = 1e-6 * max(map(abs, signed))
    sums = [0.0]
    for weight in signed:
        longer = [total + weight for total in sums]
        if any(abs(total) <= tolerance for total in longer):
            raise ParameterError(
                f"weight: some of {listed} sum to 0, which shared elements divide by; {remedy}"
            )
        sums += longer


def _rule(parameters: Mapping[str, Any]) -> kernel.Rule:
    return kernel.Rule(
        epsilon=parameters["epsilon"],
        normalize=parameters["normalize"],
        scale=parameters["lambda"],
        shared=parameters["shared"],
    )


def _agents(
    group: TensorGroup,
    parameters: Mapping[str, Any],
    rescaling: Mapping[Hashable, float],
) -> list[kernel.Agent]:
    return [
        kernel.Agent(
            tensor=entry.tensor,
            weight=parameters["weight"][entry.id],
            density=parameters["density"][entry.id],
            keep_unique=parameters["keep_unique"][entry.id],
            rescaling=rescaling.get(entry.id, 1.0),
        )
        for entry in group.non_base
    ]


def _method(
    name: str, pretty_name: str, ratio_scope: Literal["none", "tensor", "model"]
) -> RamMethod:
    rescaling = () if ratio_scope == "none" else RESCALING_PARAMETERS
    return RamMethod(
        spec=MergeMethodSpec(
            name=name,
            parameters=COMMON_PARAMETERS + rescaling,
            contract=InputContract(base=BasePolicy.REQUIRED),
            pretty_name=pretty_name,
            reference_url=REFERENCE_URL,
        ),
        ratio_scope=ratio_scope,
    )


METHODS = (
    _method("ram", "Reinforced Agent Merging", "none"),
    _method("ramplus", "Reinforced Agent Merging Plus", "model"),
    _method("ramplus_tl", "Reinforced Agent Merging Plus (Tensor-Local)", "tensor"),
)
