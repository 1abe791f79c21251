"""The merge methods as mergekit sees them: names, parameters and their limits, and what they ask of the kernel.

Only public names of mergekit are used here; ``planning`` registers the methods and runs them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

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

from mergekit_ram import _autoload, kernel
from mergekit_ram.errors import (
    NonFiniteError,
    NonFiniteWeightsError,
    OutputOverflowError,
    OverflowedWeightsError,
    ParameterError,
)
from mergekit_ram.overlap import (
    GroupOverlap,
    OverlapCounts,
    RatioKind,
    Rescaling,
    rescaling_factors,
)

REFERENCE_URL = "https://arxiv.org/abs/2601.13572"

# What a graph task binds besides the recipe's parameters: what to call instead of merging; λ by input ID; the record of
# what merging finds out.
MEASURE = "measure"
RESCALING = "rescaling"
RECORD = "record"

# Subsets of weights are searched for a vanishing sum up to this many agents.
_MOST_SIGNED_WEIGHTS = 16


class Refusals:
    """What is wrong with the parameters of the tensors of a merge, found while they are bound.

    While one collects, a refused value is noted and its parameter's default bound in its place, so that binding
    goes on and every refusal is found.

    Attributes:
        tensor: the one whose parameters are being bound.
    """

    _collecting: ContextVar[Refusals | None] = ContextVar("refusals", default=None)

    def __init__(self) -> None:
        self.tensor = "an unnamed tensor"
        self._tensors: dict[str, list[str]] = {}

    @classmethod
    def current(cls) -> Refusals | None:
        """The one that collects in this thread."""
        return cls._collecting.get()

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        token = self._collecting.set(self)
        try:
            yield
        finally:
            self._collecting.reset(token)

    def note(self, refusal: str) -> None:
        tensors = self._tensors.setdefault(refusal, [])
        if self.tensor not in tensors[-1:]:
            tensors.append(self.tensor)

    def __iter__(self) -> Iterator[str]:
        for refusal, tensors in self._tensors.items():
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            yield f"{refusal} (in {tensors[0]}{more})"


class Parameter(ParameterSpec):
    """A parameter whose refusals name it, and can be collected."""

    def validate(self, value: Any) -> Any:
        try:
            return super().validate(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].replace("Input should", "should")
        refusal = f"{self.name}: {value!r} {reason}"
        refusals = Refusals.current()
        if refusals is None:
            raise ParameterError(refusal)
        refusals.note(refusal)
        return self.default


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
    Parameter("non_finite", Literal["error", "ignore"], _SHARED, default="error"),
)
RESCALING_PARAMETERS = (
    Parameter("r", NonNegative, _SHARED, default=0.1),
    Parameter("alpha", NonNegative, _SHARED, default=0.2),
    Parameter("ratio", Literal["unique", "changed"], _SHARED, default="unique"),
)


# Takes a tensor's name and how many elements.
Overflowed = Callable[[str, int], None]


class Record(Protocol):
    """Keeps what merging one tensor after the other finds out."""

    def add(self, tensor: str, overlap: GroupOverlap, rescaling: Rescaling) -> None:
        """Overlap and λ of a tensor."""


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
        rescaling: Rescaling | None = None,
        overflowed: Overflowed,
        record: Record | None = None,
    ) -> torch.Tensor:
        """Merge one group.

        Args:
            parameters: bound values, per-agent ones keyed by input ID.
            rescaling: λ by input ID. None takes 1, or the tensor's own ratio where that is the method.
            overflowed: called if elements are not finite though all inputs are, where the recipe ignores that.
            record: takes the group's overlap and its λ, where merging finds them out.

        Raises:
            NonFiniteWeightsError: NaN or infinity in an input, unless the recipe ignores it.
            OverflowedWeightsError: finite inputs merge to what the output dtype cannot hold, likewise.
        """
        overlap = None
        if self.ratio_scope == "tensor" and rescaling is None:
            overlap = self.count_group(group, parameters, input_dtype=input_dtype)
            rescaling = rescaling_by_agent(overlap, parameters)
        arguments = (
            group.base.tensor,
            _agents(group, parameters, rescaling or {}),
            _rule(parameters),
        )
        dtypes = {"input_dtype": input_dtype, "out_dtype": out_dtype}
        with _naming_inputs(group):
            counting = record is not None and self.ratio_scope == "none"
            merged = kernel.merge_in_full(*arguments, counting=counting, **dtypes)
        name = group.metadata.name or "an unnamed tensor"
        if merged.counts is not None:
            overlap = _group_overlap(group, merged.counts)
        if record is not None and overlap is not None:
            record.add(name, overlap, rescaling or {})
        if merged.overflowed:
            overflowed(name, merged.overflowed)
        return merged.tensor

    def count_group(
        self,
        group: TensorGroup,
        parameters: Mapping[str, Any],
        *,
        input_dtype: torch.dtype | None,
    ) -> GroupOverlap:
        """Count how the agents of one group overlap, by the masks that ``merge_group`` merges by."""
        with _naming_inputs(group):
            counts = kernel.count(
                *self.kernel_inputs(group, parameters), input_dtype=input_dtype
            )
        return _group_overlap(group, counts)

    def kernel_inputs(
        self, group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, list[kernel.Agent], kernel.Rule]:
        """Base, agents and rule of one group, as the kernel takes them; not rescaled."""
        return group.base.tensor, _agents(group, parameters, {}), _rule(parameters)


def _group_overlap(group: TensorGroup, counts: OverlapCounts) -> GroupOverlap:
    return GroupOverlap(tuple(entry.id for entry in group.non_base), counts)


@contextlib.contextmanager
def _naming_inputs(group: TensorGroup) -> Iterator[None]:
    """Say which model and tensor the kernel refused."""
    try:
        yield
    except NonFiniteError as error:
        entries = (group.base, *group.non_base)
        raise NonFiniteWeightsError(
            group.metadata.name,
            {entry.id: count for entry, count in zip(entries, error.counts) if count},
        ) from None
    except OutputOverflowError as error:
        raise OverflowedWeightsError(
            group.metadata.name, error.count, error.dtype
        ) from None


def rescaling_by_agent(
    overlap: GroupOverlap, parameters: Mapping[str, Any]
) -> Rescaling:
    """λ by input ID, for counts of any scope and the ``r``, ``alpha`` and ``ratio`` of one tensor."""
    kind: RatioKind = parameters["ratio"]
    factors = rescaling_factors(
        overlap.counts, r=parameters["r"], alpha=parameters["alpha"], kind=kind
    )
    return dict(zip(overlap.agents, factors))


def weights_refusal(
    weights: tuple[float, ...], *, normalize: bool, shared: kernel.SharedMode
) -> str | None:
    """Why the weights cannot be used, if they can leave Σw of Σwτ/Σw at zero.

    Shared updates are divided by the weights of the agents that made them, which may be any two or more. Agents
    of weight 0 among others are fine: they add nothing, and an element that only they changed keeps the base.
    """
    if not normalize or shared == "drop" or len(weights) < 2:
        return None
    return _vanishing_sum(weights)


@functools.lru_cache(maxsize=256)
def _vanishing_sum(weights: tuple[float, ...]) -> str | None:
    listed = ", ".join(f"{weight:g}" for weight in weights)
    remedy = "use normalize: false, or weights that do not cancel"
    signed = [weight for weight in weights if weight != 0]
    if not signed:
        return f"weight: all are 0 ({listed}), so there is nothing to normalize by; {remedy}"
    if min(signed) > 0 or max(signed) < 0:
        return None
    if len(signed) > _MOST_SIGNED_WEIGHTS:
        return f"weight: {len(signed)} weights of both signs cannot be normalized; {remedy}"
    tolerance = 1e-6 * max(map(abs, signed))
    sums = [0.0]
    for weight in signed:
        longer = [total + weight for total in sums]
        if any(abs(total) <= tolerance for total in longer):
            return f"weight: some of {listed} sum to 0, which shared elements divide by; {remedy}"
        sums += longer
    return None


def _rule(parameters: Mapping[str, Any]) -> kernel.Rule:
    return kernel.Rule(
        epsilon=parameters["epsilon"],
        normalize=parameters["normalize"],
        scale=parameters["lambda"],
        shared=parameters["shared"],
        finite=parameters["non_finite"] == "error",
    )


def _agents(
    group: TensorGroup,
    parameters: Mapping[str, Any],
    rescaling: Rescaling,
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

# mergekit may have been imported for this module, before there was anything to register.
_autoload.install()
