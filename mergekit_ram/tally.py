"""Tallies which agents moved an element, and which way, over any number of blocks of elements.

Every element has a pattern: one base-3 digit an agent, 0 moved down, 1 unchanged, 2 moved up. The histogram of the
patterns holds every count of ``overlap.OverlapCounts``, and takes one pass whatever the number of counts.
"""

from __future__ import annotations

import math

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
        self._dense = (
            torch.zeros(self.bins, dtype=torch.int64, device=device)
            if self.bins <= _DENSE_BINS
            else None
        )
        self._sparse = OverlapCounts.zero(agents)
        self._block = self._patterns

    def begin(self, elements: int) -> None:
        """Start a block of so many elements, unchanged by every agent."""
        self._block = self._patterns[:elements].fill_((self.bins - 1) // 2)

    def add(self, agent: int, delta: torch.Tensor) -> None:
        """Take the block's deltas ``[elements]`` of an agent: negative, zero or positive."""
        signs = torch.sign(delta, out=self._signs[: delta.shape[0]])
        self._block.add_(signs, alpha=3**agent)

    def end(self) -> None:
        """Count the block."""
        if self._dense is not None:
            self._dense += _histogram(self._block, self.bins)
        else:
            patterns, times = self._block.to(torch.int64).unique(return_counts=True)
            self._sparse += _decode(patterns, times, self.agents)

    def counts(self) -> OverlapCounts:
        """Counts of all blocks ended so far."""
        if self._dense is None:
            return self._sparse
        (patterns,) = torch.nonzero(self._dense, as_tuple=True)
        return _decode(patterns, self._dense[patterns], self.agents)


def _histogram(values: torch.Tensor, bins: int) -> torch.Tensor:
    """Occurrences of the whole numbers 0 … bins − 1 in a float vector.

    Counting is one dependent memory access a value. Folding the vector in two, so that one access counts two
    values, halves that while the squared number of bins stays in cache.
    """
    folded = bins
    while folded > 1 and folded**2 <= _DENSE_BINS and values.numel() % 2 == 0:
        first, second = values.chunk(2)
        values = torch.add(second, first, alpha=folded)
        folded **= 2
    histogram = torch.bincount(values.to(torch.int32), minlength=folded)
    while folded > bins:
        folded = math.isqrt(folded)
        square = histogram.view(folded, folded)
        histogram = square.sum(0) + square.sum(1)
    return histogram


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
