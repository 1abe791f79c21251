"""Reinforced Agent Merging of tensors. torch only, nothing of mergekit.

Read in this order:

1. ``reference``: the rule as the paper states it, in ten lines.
2. ``rule``: the parameters of a merge, and the same rule over rows of a block, whose memory it
   reuses. The one place that says what becomes of an element, beside ``ties``.
3. ``overlap``: counts of unique and shared elements, and the λ that follow from them; ``tally``
   counts.
4. ``stream``: takes a tensor through the rule in blocks (``inputs``, ``blocks``, ``guards``), or
   has ``compiled`` take it.
5. ``magnitude``, ``retention``: what else is measured, over the task vectors of ``vectors``.
"""

from mergekit_ram.method.overlap import (
    OverlapCounts,
    overlap_ratio,
    rescaling_factor,
    rescaling_factors,
    total_counts,
)
from mergekit_ram.method.rule import Agent, Rule
from mergekit_ram.method.stream import count, merge, merge_and_count

__all__ = [
    "Agent",
    "OverlapCounts",
    "Rule",
    "count",
    "merge",
    "merge_and_count",
    "overlap_ratio",
    "rescaling_factor",
    "rescaling_factors",
    "total_counts",
]
