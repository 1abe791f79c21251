"""The rule by ``torch.compile``, where ``MERGEKIT_RAM_COMPILE=1`` asks for it: RAM and RAM+ as the
paper has them, every element read and written once.

RAM and the counts are the very bits of the eager steps, RAM+ differs by a rounding of λᵢτᵢ to
float32. Those steps stay the default: they need no C++ compiler and no half a minute to compile.
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

from mergekit_ram.method.blocks import Index
from mergekit_ram.method.inputs import Inputs
from mergekit_ram.method.rule import Agent, PlainUpdate, Rows, Rule, is_plain, keep_changes
from mergekit_ram.method.tally import Tally, add_to_patterns, begin_patterns, has_patterns

# Compiled steps keep nothing between each other but one pattern an element: fewer, larger calls.
BLOCK_ELEMENTS = 1 << 20

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


def takes(inputs: Inputs, agents: Sequence[Agent], rule: Rule, *, counting: bool) -> bool:
    """Whether this is asked for and made for such a merge."""
    return (
        inputs.on_cpu
        and inputs.flat
        and len(agents) > 0
        and is_plain(rule, agents)
        and (rule.normalize or all(agent.weight == 1 for agent in agents))
        and (not counting or has_patterns(len(agents)))
        and enabled()
    )


def take_block(
    inputs: Inputs,
    index: Index,
    threshold: float,
    gains: torch.Tensor | None,
    *,
    out: torch.Tensor | None,
    tally: Tally | None,
    spare: torch.Tensor,
    nan: bool,
) -> torch.Tensor:
    """Merge a block, count it, or both.

    Args:
        threshold: epsilon, rounded down to the compute dtype.
        gains: as ``PlainUpdate`` takes them.
        out: takes the merged block, None to count only.
        tally: counts the block, None to merge only.
        spare: scratch of the block's length.
        nan: whether NaN is expected; it is counted as the tally counts it.

    Returns:
        What is not finite somewhere if an input is not.
    """
    base, *agents = (inputs.block(tensor, index) for tensor in inputs.tensors)
    patterns = tally.patterns(base.numel(), base.dtype) if tally else None
    deltas = spare.view(base.dtype)[: base.numel()]
    # Older versions of torch have one configuration for all threads.
    with _limits_lifted, _without_limits():
        _compiled()(
            *(base, agents, inputs.dtype, threshold, gains, inputs.exact_products),
            *(out, patterns, deltas if out is None else None, nan),
        )
    if tally:
        tally.end()
    return deltas if out is None else out


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
    patch: contextlib.AbstractContextManager[None] = config.patch(lifted)
    return patch


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_take_block, dynamic=True, fullgraph=True)


def _take_block(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    dtype: torch.dtype,
    threshold: float,
    gains: torch.Tensor | None,
    exact_products: bool,
    out: torch.Tensor | None,
    patterns: torch.Tensor | None,
    deltas: torch.Tensor | None,
    nan: bool,
) -> None:
    """Fill ``out`` with the merged weights, ``patterns`` with those of ``tally`` and ``deltas``
    with Σδᵢ, those that are not None.
    """
    # No sum over the block: with one it takes three times as long.
    total, divisor, unique, changers, mask, delta, signs, pattern = (
        torch.empty_like(base, dtype=dtype) for _ in range(8)
    )
    rows = Rows(base.to(dtype, copy=True), total, divisor, unique, changers, mask, [delta])
    begin_patterns(pattern, len(agents))
    update = PlainUpdate(gains, exact_products)
    for i, agent in enumerate(agents):
        row = update.row(rows, i, i == 0)
        row.copy_(agent)
        keep_changes(rows.base, row, threshold)
        update.add(rows, i, row, i == 0)
        if patterns is not None:
            add_to_patterns(pattern, i, row, nan=nan, scratch=signs)
    if patterns is not None:
        patterns.copy_(pattern)
    if deltas is not None:
        deltas.copy_(rows.total)
    if out is not None:
        update.apply(rows)
        out.copy_(rows.base)
