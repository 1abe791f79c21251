"""Numbers rounded down to a dtype, so that comparisons in it decide as in real numbers."""

from __future__ import annotations

import functools
import math

import torch


@functools.lru_cache(maxsize=256)
def round_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of dtype not above value, so that x > value decides alike for every x of
    dtype.
    """
    rounded = torch.tensor(value, dtype=dtype).item()
    return rounded if rounded <= value else next_below(rounded, dtype)


def next_below(value: float, dtype: torch.dtype) -> float:
    """The next number of dtype towards minus infinity from one of its numbers."""
    below = torch.tensor(-math.inf, dtype=dtype)
    return torch.nextafter(torch.tensor(value, dtype=dtype), below).item()
