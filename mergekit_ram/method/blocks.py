"""Cutting a tensor into blocks, and the scratch rows that every block goes through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from mergekit_ram.method.rule import Rows

Index = tuple[int | slice, ...]

# Scratch that stays in a CPU's last-level cache; a GPU wants fewer, larger launches.
_CPU_SCRATCH_BYTES = 10 << 20
_ACCELERATOR_SCRATCH_BYTES = 40 << 20
_BLOCK_MULTIPLE = 1024
# Rows of a block beside its deltas and what is counted, the conversions' among them.
_OTHER_ROWS = 8


def cached_elements(rows: int, dtype: torch.dtype, *, on_cpu: bool) -> int:
    """Elements of a block whose scratch stays in cache.

    Args:
        rows: of the block's length that are needed for the agents.
        dtype: of the rows.
    """
    budget = _CPU_SCRATCH_BYTES if on_cpu else _ACCELERATOR_SCRATCH_BYTES
    fitting = budget // ((_OTHER_ROWS + rows) * dtype.itemsize)
    return max(1, fitting // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE


def allocate_rows(deltas: int, elements: int, like: torch.Tensor, dtype: torch.dtype) -> Rows:
    """Scratch with so many rows of deltas, on the device of ``like``. Untouched rows cost no
    memory.
    """
    table = torch.empty(6 + deltas, elements, dtype=dtype, device=like.device)
    base, total, divisor, unique, changers, mask, *others = table
    return Rows(base, total, divisor, unique, changers, mask, others)


def first_elements(rows: Rows, elements: int) -> Rows:
    """Views of the first elements of every row."""
    if elements == rows.base.shape[0]:
        return rows
    *fixed, deltas = rows
    base, total, divisor, unique, changers, mask = (row[:elements] for row in fixed)
    others = [delta[:elements] for delta in deltas]
    return Rows(base, total, divisor, unique, changers, mask, others)


def block_indices(shape: Sequence[int], limit: int, every: int = 1) -> Iterator[Index]:
    """Indices that cut a tensor into blocks of at most ``limit`` elements, each contiguous if the
    tensor is.

    Args:
        every: of every so many blocks only the middle one.
    """
    return itertools.islice(_all_indices(shape, limit), every // 2, None, every)


def _all_indices(shape: Sequence[int], limit: int) -> Iterator[Index]:
    if 0 in shape:
        return
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield ()
        return
    step = limit // inner
    for outer in itertools.product(*map(range, shape[: axis - 1])):
        for start in range(0, shape[axis - 1], step):
            yield (*outer, slice(start, start + step))
