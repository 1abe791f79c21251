"""RAM and RAM+ by ``torch.compile``, where ``MERGEKIT_RAM_COMPILE=1`` asks for it: every element is
read and written once.

RAM and the counts are the very bits of the kernel's own steps, RAM+ differs by a rounding of λᵢτᵢ
to float32. Those steps stay the default: they need no C++ compiler and no half a minute to compile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence

import torch

# Of kinds of tensors, which differ in their dtypes and the number of agents. By default torch
# compiles for eight of them.
_MOST_KINDS = 1 << 16
_limits_lifted = threading.Lock()


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
    numbers: torch.Tensor,
    exact_products: bool,
    out: torch.Tensor | None,
    patterns: torch.Tensor | None,
    deltas: torch.Tensor | None,
    *,
    nan: bool = False,
) -> None:
    """Merge and tally a block.

    Args:
        base: ``[elements]``, the agents' too.
        numbers: of the compute dtype, the threshold (what is not greater is unchanged), then λᵢ − 1
            of every agent, or nothing where all are 0.
        exact_products: as in the kernel.
        out: takes the merged weights, not finite where an input is not.
        patterns: takes the patterns of ``tally``, of any dtype that holds them.
        deltas: takes the sums of the deltas, not finite where an input is not.
        nan: whether NaN is expected; its patterns are those of elements that moved down.
    """
    # Older versions of torch have one configuration for all threads.
    with _limits_lifted, _without_limits():
        _compiled()(base, agents, numbers, exact_products, out, patterns, deltas, nan=nan)


def _without_limits() -> contextlib.AbstractContextManager[None]:
    """Let torch compile for any number of kinds of tensors, and leave its
    configuration as it was.
    """
    # A second of start-up, for those who compile.
    from torch._dynamo import config

    # What it is called now and what it was called.
    kind = "recompile" if hasattr(config, "recompile_limit") else "cache_size"
    names = (f"{kind}_limit", f"accumulated_{kind}_limit")
    lifted = {name: _MOST_KINDS for name in names if hasattr(config, name)}
    return config.patch(lifted)


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_take_block, dynamic=True, fullgraph=True)


def _take_block(base, agents, numbers, exact_products, out, patterns, deltas, *, nan):
    # No sum over the block: with one it takes three times as long.
    threshold, *gains = numbers
    base = base.to(numbers.dtype)
    total = changers = unique = torch.zeros_like(base)
    if patterns is not None:
        pattern = torch.full_like(base, (3 ** len(agents) - 1) // 2)
    for i, agent in enumerate(agents):
        delta = base - agent.to(numbers.dtype)
        # A NaN is not below the threshold and stays.
        delta = torch.where(delta.abs() <= threshold, 0, delta)
        total = total + delta
        changers = changers + (delta != 0).to(base.dtype)
        if patterns is not None:
            direction = torch.where(delta.isnan(), 1, delta) if nan else delta
            pattern = pattern + torch.sign(direction) * 3**i
        if gains:
            unique = unique + delta * gains[i]
    if patterns is not None:
        patterns.copy_(pattern)
    if deltas is not None:
        deltas.copy_(total)
    if out is not None:
        divisor = changers.clamp(min=1)
        if gains:
            merged = base - total / divisor - unique * (changers < 2)
        elif exact_products:
            merged = (base * divisor - total) / divisor
        else:
            merged = base - total / divisor
        out.copy_(merged)
