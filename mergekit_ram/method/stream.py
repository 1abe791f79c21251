"""Reinforced Agent Merging of one tensor: tensors in, a tensor out.

The rule is ``rule.py``'s. Here a tensor is streamed through it in blocks that stay in cache, in
scratch rows allocated once: memory beyond the output is a few MB whatever the size. The exception
is ``shared="ties"`` with a density below 1, which has to rank the shared elements and holds one
float per shared element and agent meanwhile.

Arithmetic is float32, float64 where an input or the output is float64, rounded once to the output
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mergekit_ram.errors import NonFiniteError, OutputOverflowError
from mergekit_ram.method import compiled
from mergekit_ram.method.blocks import (
    Index,
    allocate_rows,
    block_indices,
    cached_elements,
    first_elements,
)
from mergekit_ram.method.guards import Watch, non_finite, overflowed
from mergekit_ram.method.inputs import Inputs, check_rule
from mergekit_ram.method.overlap import OverlapCounts
from mergekit_ram.method.rounding import round_down
from mergekit_ram.method.rule import (
    PLAIN,
    Agent,
    GeneralUpdate,
    PlainUpdate,
    Rows,
    Rule,
    Update,
    gains_of,
    is_plain,
    keep_changes,
)
from mergekit_ram.method.tally import Tally
from mergekit_ram.method.ties import TiesUpdate, cutoffs

RowOf = Callable[[Rows, int, bool], torch.Tensor]


@dataclass(frozen=True)
class Merged:
    """A merged tensor and what was found out on the way.

    Attributes:
        tensor: contiguous, of the base's shape.
        counts: overlap of the agents, None where that was not asked for.
        overflowed: elements that are not finite although every input is. 0 unless ``rule.finite``
            is False.
    """

    tensor: torch.Tensor
    counts: OverlapCounts | None
    overflowed: int


def merge(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule = PLAIN,
    *,
    input_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    block_elements: int | None = None,
) -> torch.Tensor:
    """Merge the agents into the base.

    Args:
        base: θ₀, any floating dtype, shape and strides. Borrowed, never modified.
        agents: of the base's shape and device; dtypes may differ.
        input_dtype: round every input to this dtype first. None takes them as they are.
        out_dtype: dtype of the result. None promotes the inputs' dtypes.
        block_elements: elements a block, for tests; the result does not depend on it.

    Returns:
        A new contiguous tensor of the base's shape, on its device. It carries no autograd graph.

    Raises:
        ValueError: shapes, devices or dtypes that cannot be merged.
        NonFiniteError: NaN or infinity in an input, unless ``rule.finite`` is False.
        OutputOverflowError: the inputs are finite and the result is not, likewise.
    """
    stream = _Stream(
        *(base, agents, rule),
        counting=False,
        input_dtype=input_dtype,
        out_dtype=out_dtype,
        block_elements=block_elements,
    )
    return stream.merge().tensor


def merge_and_count(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule = PLAIN,
    *,
    input_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    block_elements: int | None = None,
) -> tuple[torch.Tensor, OverlapCounts]:
    """``merge``, and the overlap counts of the very masks it merged by."""
    stream = _Stream(
        *(base, agents, rule),
        counting=True,
        input_dtype=input_dtype,
        out_dtype=out_dtype,
        block_elements=block_elements,
    )
    merged = stream.merge()
    assert merged.counts is not None
    return merged.tensor, merged.counts


def merge_in_full(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule,
    *,
    counting: bool,
    input_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Merged:
    """``merge`` with everything that it finds out. Arguments as there.

    Args:
        counting: count the overlap too.
    """
    stream = _Stream(
        *(base, agents, rule), counting=counting, input_dtype=input_dtype, out_dtype=out_dtype
    )
    return stream.merge()


def count(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule = PLAIN,
    *,
    input_dtype: torch.dtype | None = None,
    block_elements: int | None = None,
) -> OverlapCounts:
    """Overlap counts of the agents' updates, in the order of ``agents``. Arguments as for
    ``merge``.
    """
    stream = _Stream(
        *(base, agents, rule),
        counting=True,
        input_dtype=input_dtype,
        block_elements=block_elements,
    )
    return stream.count()


class _Stream:
    """One merge, and the scratch that its blocks go through."""

    def __init__(
        self,
        base: torch.Tensor,
        agents: Sequence[Agent],
        rule: Rule,
        *,
        counting: bool,
        input_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        block_elements: int | None = None,
    ):
        check_rule(rule, block_elements)
        self.inputs = inputs = Inputs(base, agents, input_dtype, out_dtype)
        self.shape = base.shape
        self.agents = agents
        self.rule = rule
        self.counting = counting
        self.threshold = round_down(rule.epsilon, inputs.dtype)
        self.compiled = compiled.takes(inputs, agents, rule, counting=counting)
        self.skipping = _may_skip(inputs, rule)
        deltas = len(agents) if rule.shared == "ties" else 1
        counted = Tally.rows(len(agents)) if counting else 0
        cached = cached_elements(deltas + counted, inputs.dtype, on_cpu=inputs.on_cpu)
        self.limit = block_elements or (compiled.BLOCK_ELEMENTS if self.compiled else cached)
        elements = min(self.limit, base.numel())
        self.scratch = allocate_rows(deltas, elements, base, inputs.dtype)
        self.watch = Watch(inputs.dtype, base.device)

    def merge(self) -> Merged:
        inputs, update = self.inputs, self._update()
        tally = self._tally() if self.counting else None
        merged = torch.empty(inputs.base.shape, dtype=inputs.out_dtype, device=inputs.base.device)
        for index in self._indices():
            target = merged[index]
            if self.compiled:
                self._take_compiled(index, target, tally)
            else:
                self._merge_block(index, target, update, tally)
            self.watch.see(target)
        lost = 0
        if self.watch.suspects():
            self._require_finite_inputs()
            lost = overflowed(inputs, merged, self.limit)
            if lost and self.rule.finite:
                raise OutputOverflowError(lost, inputs.out_dtype)
        return Merged(merged.view(self.shape), tally.counts() if tally else None, lost)

    def count(self) -> OverlapCounts:
        tally = self._tally()
        for index in self._indices():
            if self.compiled:
                self.watch.see(self._take_compiled(index, None, tally))
                continue
            rows = self._rows(index)
            tally.begin(rows.base.shape[0])
            for i, delta in self._changes(index, rows, _shared_row):
                self.watch.see(delta)
                tally.add(i, delta)
            tally.end()
        if self.watch.suspects():
            self._require_finite_inputs()
        return tally.counts()

    def _merge_block(
        self, index: Index, target: torch.Tensor, update: Update, tally: Tally | None
    ) -> None:
        """Merge a block into the target and count it, if that is asked for."""
        rows = self._rows(index)
        if tally:
            tally.begin(rows.base.shape[0])
        first = True
        for i, delta in self._changes(index, rows, update.row):
            update.add(rows, i, delta, first)
            first = False
            if update.hides(i):
                self.watch.see(delta)
            if tally:
                tally.add(i, delta)
        if not first:
            update.apply(rows)
        if tally:
            tally.end()
        target.copy_(rows.base.view(target.shape))

    def _take_compiled(
        self, index: Index, target: torch.Tensor | None, tally: Tally | None
    ) -> torch.Tensor:
        """The same, or only counted without a target; returns what must be finite."""
        return compiled.take_block(
            *(self.inputs, index, self.threshold, gains_of(self.agents, self.scratch.base)),
            out=target,
            tally=tally,
            spare=self.scratch.total,
            nan=not self.rule.finite,
        )

    def _changes(
        self, index: Index, rows: Rows, row_of: RowOf
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each agent's place and δ, in its row. An agent that has the base's very weights here may
        be left out.
        """
        inputs, first = self.inputs, True
        block = inputs.base[index]
        inputs.load(inputs.base, index, rows.base)
        for i, (agent, tensor) in enumerate(zip(self.agents, inputs.agents)):
            if self.skipping and torch.equal(block, tensor[index]):
                continue
            row = inputs.load(tensor, index, row_of(rows, i, first))
            first = False
            weight = 1.0 if self.rule.normalize else agent.weight
            yield i, keep_changes(rows.base, row, self.threshold, weight)
        if first:
            # Otherwise a base that is not finite shows in the deltas.
            self.watch.see(rows.base)

    def _update(self) -> Update:
        """What the rule makes of this tensor's blocks."""
        agents, rule = self.agents, self.rule
        if is_plain(rule, agents):
            return PlainUpdate(gains_of(agents, self.scratch.base), self.inputs.exact_products)
        if rule.shared == "ties":
            return TiesUpdate(rule, agents, cutoffs(agents, self._all_changes()))
        return GeneralUpdate(rule, agents)

    def _all_changes(self) -> Iterator[Rows]:
        """Rows of every block, with the δ of all agents side by side."""
        for index in self._indices():
            rows = self._rows(index)
            for _ in self._changes(index, rows, _own_row):
                pass
            yield rows

    def _indices(self) -> Iterator[Index]:
        return block_indices(self.inputs.base.shape, self.limit)

    def _rows(self, index: Index) -> Rows:
        return first_elements(self.scratch, self.inputs.base[index].numel())

    def _tally(self) -> Tally:
        base, nan = self.scratch.base, not self.rule.finite
        return Tally(len(self.agents), base.shape[0], self.inputs.dtype, base.device, nan=nan)

    def _require_finite_inputs(self) -> None:
        counts = non_finite(self.inputs, self.limit) if self.rule.finite else []
        if any(counts):
            raise NonFiniteError(counts)


def _may_skip(inputs: Inputs, rule: Rule) -> bool:
    """Whether an agent is left out of blocks where it equals the base.

    Comparing ends at the first difference, so it is nearly free where an agent moved. ``ties``
    needs all. Infinity equals infinity and their difference is NaN, so what may be infinite is not
    skipped.
    """
    return inputs.on_cpu and inputs.alike and rule.shared != "ties" and rule.finite


def _shared_row(rows: Rows, agent: int, first: bool) -> torch.Tensor:
    return rows.deltas[0]


def _own_row(rows: Rows, agent: int, first: bool) -> torch.Tensor:
    return rows.deltas[agent]
