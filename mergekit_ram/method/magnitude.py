"""How large the agents' updates are, and how the counts of overlap move with epsilon. Pure torch.

Agent i counts as having changed an element where abs(τᵢ) > epsilon, and shares it where another
agent changed it too: where the smaller of abs(τᵢ) and the largest of the others is above epsilon.
So one number an element and agent answers for every epsilon at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mergekit_ram.method.rounding import round_down
from mergekit_ram.method.rule import Agent, Rule
from mergekit_ram.method.vectors import task_vectors

# What the counts are given for, two to a decade.
SWEEP = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
# Bounds of the histogram: those, with a decade below and some above.
EDGES = (1e-8, 3e-8, *SWEEP, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
_THRESHOLDS = (0.0, *EDGES)
_SWEPT = slice(_THRESHOLDS.index(SWEEP[0]), _THRESHOLDS.index(SWEEP[-1]) + 1)

# A sample is of many small blocks; the rows of a larger one still stay in the second-level cache.
_SAMPLED_BLOCK, _BLOCK = 1 << 12, 1 << 15
# At least so many blocks of a tensor are measured, all if there are no more.
_LEAST_BLOCKS = 4


@dataclass(frozen=True)
class Magnitudes:
    """Magnitudes of some agents' task vectors in one tensor.

    Attributes:
        total: elements of the tensor.
        sampled: elements that were looked at, evenly spaced.
        changed: ``[agents, 1 + len(EDGES)]``, float64; elements above 0 and above each of
            ``EDGES``.
        shared: ``[agents, len(SWEEP)]``, float64; elements that the agent shares with another at
            each of ``SWEEP``.

    Counts are of the whole tensor, estimated from the sample where it is not all of it.
    """

    total: int
    sampled: int
    changed: torch.Tensor
    shared: torch.Tensor


def magnitudes(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule,
    *,
    input_dtype: torch.dtype | None = None,
    every: int = 1,
    block_elements: int | None = None,
) -> Magnitudes:
    """Measure the task vectors of one tensor. Arguments as for ``stream.count``; ``rule.epsilon``
    has no influence.

    Args:
        every: look at one of so many blocks, but at four of a tensor at least.
    """
    block_elements = block_elements or (_SAMPLED_BLOCK if every > 1 else _BLOCK)
    blocks = base.numel() // block_elements
    every = max(1, min(every, blocks // _LEAST_BLOCKS))
    changed = torch.zeros(len(_THRESHOLDS), len(agents), dtype=torch.float64)
    shared = torch.zeros(len(SWEEP), len(agents), dtype=torch.float64)
    sampled = 0
    for vectors in task_vectors(
        base,
        agents,
        rule,
        input_dtype=input_dtype,
        block_elements=block_elements,
        every=every,
    ):
        sizes = vectors.abs_()
        if not rule.finite:
            # As large as can be: it counts as changed, as in a merge.
            sizes.nan_to_num_(nan=math.inf, posinf=math.inf)
        rounded = [round_down(threshold, sizes.dtype) for threshold in _THRESHOLDS]
        second = _second(sizes)
        changed += _above(sizes, rounded, sizes.max().item())
        sizes = torch.minimum(sizes, second)
        shared += _above(sizes, rounded[_SWEPT], second.max().item())
        sampled += sizes.shape[1]
    scale = base.numel() / sampled if sampled else 1.0
    return Magnitudes(base.numel(), sampled, changed.T * scale, shared.T * scale)


def _second(sizes: torch.Tensor) -> torch.Tensor:
    """The second largest of each column of ``[agents, elements]``, 0 where there is one agent.

    Of the agent with the largest number it is the largest of the others, and no other agent's
    number exceeds it.
    """
    first = sizes.new_zeros(sizes.shape[1])
    second = torch.zeros_like(first)
    for row in sizes:
        second = torch.maximum(second, torch.minimum(first, row))
        first = torch.maximum(first, row)
    return second


def _above(sizes: torch.Tensor, thresholds: Sequence[float], largest: float) -> torch.Tensor:
    """Elements of each row ``[agents, elements]`` that are strictly above each threshold:
    ``[thresholds, agents]``.

    Args:
        thresholds: ascending, rounded down to the dtype.
        largest: no element is above it.
    """
    counts = sizes.new_zeros(len(thresholds), sizes.shape[0])
    mask = torch.empty_like(sizes)
    for count, threshold in zip(counts, thresholds):
        if threshold >= largest:
            break
        torch.sum(torch.gt(sizes, threshold, out=mask), 1, out=count)
    return counts.to("cpu", torch.float64)
