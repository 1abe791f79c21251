"""One tensor of every model, bound to a method and its parameters: what is counted and what is
merged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from mergekit.merge_methods.base import TensorGroup

from mergekit_ram.errors import (
    MergeError,
    NonFiniteError,
    NonFiniteWeightsError,
    OutputOverflowError,
    OverflowedWeightsError,
)
from mergekit_ram.host.methods import RamMethod
from mergekit_ram.method import stream
from mergekit_ram.method.overlap import (
    GroupOverlap,
    OverlapCounts,
    Rescaling,
    RescalingRule,
)
from mergekit_ram.method.rule import Agent, Rule


@dataclass(frozen=True)
class MergedGroup:
    """A merged tensor and what merging found out.

    Attributes:
        overlap: of the agents, None where that was not asked for.
        rescaling: λ by input ID, of those whose λ is not 1.
        overflowed: elements that are not finite though all inputs are.
    """

    tensor: torch.Tensor
    overlap: GroupOverlap | None
    rescaling: Rescaling
    overflowed: int


@dataclass(frozen=True)
class BoundGroup:
    """What a merge of one tensor takes.

    Attributes:
        parameters: bound values, per-agent ones keyed by input ID.
        input_dtype: inputs are rounded to it first; None takes them as they are.
        out_dtype: of the result; None promotes the inputs' dtypes.
    """

    method: RamMethod
    group: TensorGroup
    parameters: Mapping[str, Any]
    input_dtype: torch.dtype | None
    out_dtype: torch.dtype | None

    @property
    def name(self) -> str:
        return self.group.metadata.name or "an unnamed tensor"

    def merge(self, rescaling: Rescaling | None = None, *, counting: bool = False) -> MergedGroup:
        """Merge the tensor.

        Args:
            rescaling: λ by input ID. None takes 1, or the tensor's own ratio where that is the
                method.
            counting: count the overlap of plain RAM, which needs no count, in the same pass. A
                tensor's own ratio needs one anyway; that of a model-wide ratio is known already.

        Raises:
            NonFiniteWeightsError: NaN or infinity in an input, unless the recipe ignores it.
            OverflowedWeightsError: finite inputs merge to what the output dtype cannot hold,
                likewise.
            MergeError: tensors that cannot be merged with each other.
        """
        scope, overlap = self.method.ratio_scope, None
        if scope == "tensor" and rescaling is None:
            overlap = self.count()
            rescaling = rescaling_by_agent(overlap, self.parameters)
        with self._named():
            merged = stream.merge_in_full(
                *self.kernel_inputs(rescaling),
                counting=counting and scope == "none",
                input_dtype=self.input_dtype,
                out_dtype=self.out_dtype,
            )
        if merged.counts is not None:
            overlap = self._overlap(merged.counts)
        return MergedGroup(merged.tensor, overlap, rescaling or {}, merged.overflowed)

    def count(self) -> GroupOverlap:
        """Count how the agents overlap, by the masks that ``merge`` merges by. Raises what it
        raises.
        """
        with self._named():
            counts = stream.count(*self.kernel_inputs(), input_dtype=self.input_dtype)
        return self._overlap(counts)

    def kernel_inputs(
        self, rescaling: Rescaling | None = None
    ) -> tuple[torch.Tensor, list[Agent], Rule]:
        """Base, agents and rule, as the functions of ``method`` take them."""
        values, factors = self.parameters, rescaling or {}
        agents = [
            Agent(
                tensor=entry.tensor,
                weight=values["weight"][entry.id],
                density=values["density"][entry.id],
                keep_unique=values["keep_unique"][entry.id],
                rescaling=factors.get(entry.id, 1.0),
            )
            for entry in self.group.non_base
        ]
        rule = Rule(
            epsilon=values["epsilon"],
            normalize=values["normalize"],
            scale=values["lambda"],
            shared=values["shared"],
            finite=values["non_finite"] == "error",
        )
        return self.group.base.tensor, agents, rule

    def _overlap(self, counts: OverlapCounts) -> GroupOverlap:
        return GroupOverlap(tuple(entry.id for entry in self.group.non_base), counts)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say which model and tensor was refused."""
        try:
            yield
        except NonFiniteError as error:
            entries = (self.group.base, *self.group.non_base)
            raise NonFiniteWeightsError(
                self.group.metadata.name,
                {entry.id: count for entry, count in zip(entries, error.counts) if count},
            ) from None
        except OutputOverflowError as error:
            raise OverflowedWeightsError(
                self.group.metadata.name, error.count, error.dtype
            ) from None
        except ValueError as error:
            raise MergeError(f"cannot merge {self.name}: {error}") from error


def rescaling_by_agent(overlap: GroupOverlap, parameters: Mapping[str, Any]) -> Rescaling:
    """λ by input ID, for counts of any scope and the parameters of one tensor."""
    rule = RescalingRule(**{field.name: parameters[field.name] for field in fields(RescalingRule)})
    return dict(zip(overlap.agents, rule.factors(overlap.counts)))
