"""Tallies which agents moved an element, and which way, over any number of blocks of elements.

Every element has a pattern: one base-3 digit an agent, 0 moved down, 1 unchanged, 2 moved up. The histogram of the
patterns holds every count of ``overlap.OverlapCounts``, and takes one pass whatever the number of counts.
"""

from __future__ import annotations

import torch

from mergekit_ram.overlap import OverlapCounts

# Histograms up to this size stay in cache (3¹⁰ bins: ten agents); beyond, patterns are sorted instead.
_DENSE_BINS = 1 << 16
# float64 holds every pattern of so many agents exactly.
_MOST_AGENTS = 33


class Tally:
    """Counts of the blocks seen so far.

    A block starts with ``begin``, takes each agent's deltas with ``add`` and is closed by ``end``.

    Args:
        agents: how many agents there are.
        elements: length of the longest block.
        dtype: float32 or float64, of the deltas.
        device: of the deltas.
    """

    def __init__(
        self, agents: int, elements: int, dtype: torch.dtype, device: torch.device
    ):
        if agents > _MOST_AGENTS:
            raise ValueError(
                f"cannot count the overlap of {agents} agents, at most {_MOST_AGENTS}"
            )
        self.agents = agents
        self.bins = 3**agents
        # float32 holds integers up to 2²⁴.
        exact = dtype if self.bins <= 1 << 24 else torch.float64
        self._patterns = torch.empty(elements, dtype=exact, device=device)
        self._signs = torch.empty(elements, dtype=dtype, device=device)
        # Both None where the patterns are too many.
        self._single = self._folded = None
        if self.bins <= _DENSE_BINS:
            shape = (self.bins,) * _folds(self.bins, elements)
            self._single = torch.zeros(self.bins, dtype=torch.int64, device=device)
            self._folded = torch.zeros(shape, dtype=torch.int64, device=device)
        self._sparse = OverlapCounts.zero(agents)
        self._block = self._patterns

    def begin(self, elements: int) -> None:
        """Start a block of so many elements, unchanged by every agent."""
        self._block = self._patterns[:elements].fill_((self.bins - 1) // 2)

    def patterns(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Start a block whose patterns the caller fills in, instead of adding agents.

        Args:
            dtype: what the caller would like to fill in; it gets that if it holds every pattern exactly.
        """
        exact = self.bins <= 2 / torch.finfo(dtype).eps
        patterns = self._patterns.view(dtype) if exact else self._patterns
        self._block = patterns[:elements]
        return self._block

    def add(self, agent: int, delta: torch.Tensor) -> None:
        """Take the block's deltas ``[elements]`` of an agent: negative, zero or positive."""
        signs = torch.sign(delta, out=self._signs[: delta.shape[0]])
        self._block.add_(signs, alpha=3**agent)

    def end(self) -> None:
        """Count the block."""
        if self._folded is not None:
            self._count_dense(self._block)
        else:
            patterns, times = self._block.to(torch.int64).unique(return_counts=True)
            self._sparse += _decode(patterns, times, self.agents)

    def _count_dense(self, values: torch.Tensor) -> None:
        """Count the values of a block in the tables.

        Counting is one dependent memory access a value. Folding the block in two or three, so that one access
        counts two or three values, saves as much while the table stays in cache.
        """
        folds = self._folded.dim()
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
        """Counts of all blocks ended so far."""
        if self._folded is None:
            return self._sparse
        times = self._single.clone()
        for axis in range(self._folded.dim()):
            times += self._folded.movedim(axis, 0).reshape(self.bins, -1).sum(1)
        (patterns,) = torch.nonzero(times, as_tuple=True)
        return _decode(patterns, times[patterns], self.agents)


def _folds(bins: int, elements: int) -> int:
    """In how many a block is folded: its table is much smaller than the block and stays in cache."""
    most = min(_DENSE_BINS, elements // 8)
    return max(folds for folds in (1, 2, 3) if folds == 1 or bins**folds <= most)


def _decode(patterns: torch.Tensor, times: torch.Tensor, agents: int) -> OverlapCounts:
    """Counts of ``times[p]`` elements of ``patterns[p]``, both int64 ``[patterns]``."""
    patterns, times = patterns.cpu(), times.cpu()
    digits = 3 ** torch.arange(agents)
    signs = patterns[:, None] // digits % 3 - 1
    changed = signs.abs()
    changers = changed.sum(1)
    others = torch.nn.functional.one_hot((changers - 1).clamp(min=0), max(agents, 1))
    weighted = (changed * times[:, None]).T
    pairwise = weighted @ changed
    agreement = (signs * times[:, None]).T @ signs
    conflicting = signs.sum(1).abs() != changers
    return OverlapCounts(
        total=int(times.sum()),
        histogram=_table(weighted @ others[:, :agents]),
        pairwise=_table(pairwise),
        pairwise_conflicts=_table((pairwise - agreement) // 2),
        sign_conflicts=int(times[conflicting].sum()),
    )


def _table(values: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, values.tolist()))
