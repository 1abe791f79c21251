"""Plain RAM by ``torch.compile``, where ``MERGEKIT_RAM_COMPILE=1`` asks for it: every element is read and written once.

It gives the very bits of the kernel's own steps, which stay the default: they need no C++ compiler and no half a
minute to compile.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable, Sequence

import torch


@functools.cache
def enabled() -> bool:
    """Whether the environment asks for it and it can be had."""
    if os.environ.get("MERGEKIT_RAM_COMPILE", "0") in ("", "0"):
        return False
    compilers = (os.environ.get("CXX") or "g++", "clang++")
    if any(map(shutil.which, compilers)):
        return True
    warnings.warn(
        "MERGEKIT_RAM_COMPILE needs a C++ compiler and there is none: merging without",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def take_block(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    threshold: torch.Tensor,
    exact_products: bool,
    out: torch.Tensor | None,
    patterns: torch.Tensor | None,
) -> torch.Tensor:
    """Merge and tally a block.

    Args:
        base: ``[elements]``, the agents' too.
        threshold: of the compute dtype, no dimensions; what is not greater is unchanged.
        exact_products: as in the kernel.
        out: takes the merged weights.
        patterns: takes the patterns of ``tally``.

    Returns:
        Sum of the deltas, not finite where an input is not.
    """
    return _compiled()(base, agents, threshold, exact_products, out, patterns)


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(_take_block, dynamic=True, fullgraph=True)


def _take_block(base, agents, threshold, exact_products, out, patterns):
    base = base.to(threshold.dtype)
    total = changers = torch.zeros_like(base)
    pattern = torch.full_like(base, (3 ** len(agents) - 1) // 2)
    for i, agent in enumerate(agents):
        delta = base - agent.to(threshold.dtype)
        # A NaN is not below the threshold and stays.
        delta = torch.where(delta.abs() <= threshold, 0, delta)
        total = total + delta
        changers = changers + (delta != 0).to(base.dtype)
        pattern = pattern + torch.sign(delta) * 3**i
    if patterns is not None:
        patterns.copy_(pattern)
    if out is not None:
        divisor = changers.clamp(min=1)
        if exact_products:
            out.copy_((base * divisor - total) / divisor)
        else:
            out.copy_(base - total / divisor)
    return total.sum()
