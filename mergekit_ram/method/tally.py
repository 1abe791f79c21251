"""Tallies which agents moved an element, and which way, over any number of blocks of elements.
Exact for any number of agents.

Of few agents every element has a pattern: one base-3 digit an agent, 0 moved down, 1 unchanged, 2
moved up. The histogram of the patterns holds every count of ``overlap.OverlapCounts``, and takes
one pass whatever the number of counts. Of many agents there are too many patterns; their counts are
products of the matrix of their directions with itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mergekit_ram.method.overlap import OverlapCounts

# Histograms up to this size stay in cache, and float32 holds their patterns exactly.
_DENSE_BINS = 1 << 16
# Columns that are multiplied at a time: their sums of 0 and ±1 are exact in float32.
_COLUMNS = 1 << 14


def has_patterns(agents: int) -> bool:
    """Whether so few agents are counted by their patterns."""
    return bool(3**agents <= _DENSE_BINS)


def begin_patterns(patterns: torch.Tensor, agents: int) -> None:
    """Patterns of elements that none of the agents changed."""
    patterns.fill_((3**agents - 1) // 2)


def add_to_patterns(
    patterns: torch.Tensor, agent: int, delta: torch.Tensor, *, nan: bool, scratch: torch.Tensor
) -> None:
    """Note which way an agent moved the elements ``[elements]``."""
    patterns.add_(directions(delta, nan=nan, out=scratch), alpha=3**agent)


def directions(delta: torch.Tensor, *, nan: bool, out: torch.Tensor) -> torch.Tensor:
    """−1, 0 or 1 of each delta; 1 of NaN, if that is expected."""
    if nan:
        delta = torch.nan_to_num(delta, nan=1.0, out=out)
    return torch.sign(delta, out=out)


class Tally:
    """Counts of the blocks seen so far.

    A block starts with ``begin``, takes each agent's deltas with ``add`` and is closed by ``end``.

    Args:
        agents: how many agents there are.
        elements: length of the longest block.
        dtype: float32 or float64, of the deltas.
        device: of the deltas.
        nan: whether NaN is expected among the deltas. It counts as a positive delta.
    """

    def __init__(
        self,
        agents: int,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        nan: bool = False,
    ):
        self._nan = nan
        self._signs = torch.empty(elements, dtype=dtype, device=device)
        kind = _Patterns if has_patterns(agents) else _Directions
        self._blocks: _Patterns | _Directions = kind(agents, elements, dtype, device)

    @staticmethod
    def rows(agents: int) -> int:
        """Rows of scratch, of a block's length, that grow with the number of agents."""
        return 0 if has_patterns(agents) else agents

    def begin(self, elements: int) -> None:
        """Start a block of so many elements, unchanged by every agent."""
        self._blocks.begin(elements)

    def patterns(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Start a block whose patterns the caller fills in, instead of adding agents. Only of few
        agents.

        Args:
            dtype: what the caller would like to fill in; it gets that if it holds every pattern
                exactly.
        """
        assert isinstance(self._blocks, _Patterns)
        return self._blocks.uninitialized(elements, dtype)

    def add(self, agent: int, delta: torch.Tensor) -> None:
        """Take the block's deltas ``[elements]`` of an agent: negative, zero or positive."""
        self._blocks.add(agent, delta, nan=self._nan, scratch=self._signs[: delta.shape[0]])

    def end(self) -> None:
        """Count the block."""
        self._blocks.end()

    def counts(self) -> OverlapCounts:
        """Counts of all blocks ended so far."""
        return self._blocks.counts()


class _Patterns:
    """Blocks of few agents."""

    def __init__(self, agents: int, elements: int, dtype: torch.dtype, device: torch.device):
        self.agents = agents
        self.bins = 3**agents
        self._patterns = torch.empty(elements, dtype=dtype, device=device)
        shape = (self.bins,) * _folds(self.bins, elements)
        self._single = torch.zeros(self.bins, dtype=torch.int64, device=device)
        self._folded = torch.zeros(shape, dtype=torch.int64, device=device)
        self._block = self._patterns

    def begin(self, elements: int) -> None:
        self._block = self._patterns[:elements]
        begin_patterns(self._block, self.agents)

    def uninitialized(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        exact = self.bins <= 2 / torch.finfo(dtype).eps
        self._block = (self._patterns.view(dtype) if exact else self._patterns)[:elements]
        return self._block

    def add(self, agent: int, delta: torch.Tensor, *, nan: bool, scratch: torch.Tensor) -> None:
        add_to_patterns(self._block, agent, delta, nan=nan, scratch=scratch)

    def end(self) -> None:
        """Count the patterns of the block in the tables.

        Counting is one dependent memory access a value. Folding the block in two or three, so that
        one access counts two or three values, saves as much while the table stays in cache.
        """
        values, folds = self._block, self._folded.dim()
        length = values.numel() // folds
        code, *others = values[: length * folds].view(folds, length)
        code = code.to(self._patterns.dtype)
        for other in others:
            code = torch.add(other, code, alpha=self.bins)
        narrow = torch.int16 if self._folded.numel() <= 1 << 15 else torch.int32
        counted = torch.bincount(code.to(narrow), minlength=self._folded.numel())
        self._folded += counted.view(self._folded.shape)
        rest = values[length * folds :]
        if rest.numel():
            self._single += torch.bincount(rest.to(narrow), minlength=self.bins)

    def counts(self) -> OverlapCounts:
        times = self._single.clone()
        for axis in range(self._folded.dim()):
            times += self._folded.movedim(axis, 0).reshape(self.bins, -1).sum(1)
        (patterns,) = torch.nonzero(times, as_tuple=True)
        times = times[patterns].cpu()
        digits = 3 ** torch.arange(self.agents)
        signs = patterns.cpu()[:, None] // digits % 3 - 1
        return _Tables.of(signs.T, times).counts()


class _Directions:
    """Blocks of many agents: ``[agents, elements]``, −1, 0 or 1."""

    def __init__(self, agents: int, elements: int, dtype: torch.dtype, device: torch.device):
        self.agents = agents
        self._signs = torch.empty(agents, elements, dtype=dtype, device=device)
        self._block = self._signs
        self._counted = _Tables.zero(agents, device)

    def begin(self, elements: int) -> None:
        self._block = self._signs[:, :elements].zero_()

    def add(self, agent: int, delta: torch.Tensor, *, nan: bool, scratch: torch.Tensor) -> None:
        directions(delta, nan=nan, out=self._block[agent])

    def end(self) -> None:
        for columns in torch.split(self._block, _COLUMNS, dim=1):
            self._counted.add(_Tables.of(columns))

    def counts(self) -> OverlapCounts:
        return self._counted.counts()


def _folds(bins: int, elements: int) -> int:
    """In how many a block is folded: its table is much smaller than the block
    and stays in cache.
    """
    most = min(_DENSE_BINS, elements // 8)
    return max(folds for folds in (1, 2, 3) if folds == 1 or bins**folds <= most)


@dataclass(frozen=True)
class _Tables:
    """``OverlapCounts`` as int64 tensors, to be added to in place."""

    total: torch.Tensor
    histogram: torch.Tensor
    pairwise: torch.Tensor
    pairwise_conflicts: torch.Tensor
    sign_conflicts: torch.Tensor

    @classmethod
    def zero(cls, agents: int, device: torch.device) -> _Tables:
        shapes = ((), *[(agents, agents)] * 3, ())
        return cls(*(torch.zeros(s, dtype=torch.int64, device=device) for s in shapes))

    @classmethod
    def of(cls, signs: torch.Tensor, times: torch.Tensor | None = None) -> _Tables:
        """Counts of columns of signs.

        Args:
            signs: ``[agents, columns]``.
            times: ``[columns]``, of the same dtype, how often each column was met; None for once.
        """
        agents = signs.shape[0]
        changed = signs.abs()
        changers = changed.sum(0)
        conflicting = (signs.sum(0).abs() != changers).to(signs.dtype)
        weighted, weighted_signs, total = changed, signs, torch.tensor(signs.shape[1])
        if times is not None:
            weighted, weighted_signs, total = changed * times, signs * times, times.sum()
            conflicting *= times
        # What nobody changed stands in the first row.
        histogram = signs.new_zeros(agents + 1, agents)
        histogram.index_add_(0, changers.long(), weighted.T)
        pairwise = weighted @ changed.T
        agreement = weighted_signs @ signs.T
        found = (
            total,
            histogram[1:].T,
            pairwise,
            (pairwise - agreement).long() // 2,
            conflicting.sum(),
        )
        return cls(*(counts.long() for counts in found))

    def add(self, other: _Tables) -> None:
        for mine, others in zip(vars(self).values(), vars(other).values()):
            mine.add_(others)

    def counts(self) -> OverlapCounts:
        return OverlapCounts(
            total=int(self.total),
            histogram=_rows(self.histogram),
            pairwise=_rows(self.pairwise),
            pairwise_conflicts=_rows(self.pairwise_conflicts),
            sign_conflicts=int(self.sign_conflicts),
        )


def _rows(table: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, table.tolist()))
