"""The parameters of the RAM methods as mergekit binds them: names, limits, defaults, and how
refusals are collected.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, Literal

from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import Field, ValidationError

from mergekit_ram.errors import ParameterError
from mergekit_ram.method.rule import SharedMode

# Subsets of weights are searched for a vanishing sum up to this many agents.
_MOST_SIGNED_WEIGHTS = 16


class Refusals:
    """What is wrong with the parameters of the tensors of a merge, found while they are bound.

    While one collects, a refused value is noted and its parameter's default bound in its place, so
    that binding goes on and every refusal is found.

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

    @classmethod
    def name_tensor(cls, name: str) -> None:
        """Tell the one that collects whose parameters are bound next."""
        refusals = cls.current()
        if refusals is not None:
            refusals.tensor = name

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


def note_weights(
    refusals: Refusals, parameters: Mapping[str, Any], weights: Iterable[float]
) -> None:
    """Note weights that cannot be used with the other parameters."""
    refusal = weights_refusal(
        tuple(weights), normalize=parameters["normalize"], shared=parameters["shared"]
    )
    if refusal:
        refusals.note(refusal)


def weights_refusal(
    weights: tuple[float, ...], *, normalize: bool, shared: SharedMode
) -> str | None:
    """Why the weights cannot be used, if they can leave Σw of Σwτ/Σw at zero.

    Shared updates are divided by the weights of the agents that made them, which may be any two or
    more. Agents of weight 0 among others are fine: they add nothing, and an element that only they
    changed keeps the base.
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
