"""The rule as the paper states it: whole tensors, float64, nothing rounded.

Yuan et al., 2026, "Reinforced Agent Merging", arXiv 2601.13572, with the parameters of ``Agent``
and ``Rule``. All but ``shared="ties"``, which ``ties`` has, and what is not finite. ``stream``
gives the same in blocks, in place and rounded to a dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mergekit_ram.method.rule import PLAIN, Agent, Rule


def merge_exactly(base: torch.Tensor, agents: Sequence[Agent], rule: Rule = PLAIN) -> torch.Tensor:
    """Merge at least one agent into the base. float64, of the base's shape."""
    if rule.shared == "ties":
        raise ValueError("the reference knows nothing of shared='ties'")
    per_agent = torch.tensor(
        [(a.weight, a.rescaling * a.keep_unique) for a in agents], dtype=torch.float64
    )
    weight, factor = per_agent.T.reshape(2, -1, *[1] * base.dim())

    tau = torch.stack([agent.tensor.double() for agent in agents]) - base.double()
    tau = tau if rule.normalize else weight * tau
    changed = tau.abs() > rule.epsilon
    changers = changed.sum(0)
    unique = (factor * tau * changed).sum(0)
    share = weight * changed if rule.normalize else changed.double()
    mean = ((share * tau).sum(0) / share.sum(0)).nan_to_num(0)  # of no weight at all: 0 / 0
    shared = mean if rule.shared == "mean" else torch.zeros_like(mean)
    update = torch.where(changers >= 2, shared, unique)
    return torch.where(changers == 0, base.double(), base.double() + rule.scale * update)
