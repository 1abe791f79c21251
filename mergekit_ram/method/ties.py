"""``shared: ties``: shared elements take the mean of the largest changes that agree in sign."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mergekit_ram.method.rounding import next_below
from mergekit_ram.method.rule import Agent, GeneralUpdate, Rows, Rule, keep_divisible


class TiesUpdate(GeneralUpdate):
    """The update whose sums are over the agents that TIES elects.

    Args:
        cutoffs: of every agent, the magnitude below which its shared changes are pruned.
    """

    def __init__(self, rule: Rule, agents: Sequence[Agent], cutoffs: Sequence[float]):
        super().__init__(rule, agents)
        self.cutoffs = cutoffs

    def row(self, rows: Rows, agent: int, first: bool) -> torch.Tensor:
        """The agent's own row: all are needed once the signs of all are known."""
        return rows.deltas[agent]

    def apply(self, rows: Rows) -> None:
        """Turn the base row into the merged one; every agent's δ stands in ``rows.deltas``."""
        self._elect(rows)
        keep_divisible(rows)
        self.subtract(rows)

    def _elect(self, rows: Rows) -> None:
        """Prune, elect the sign with the greater mass, and total the updates that agree with it."""
        elected = rows.mask.zero_()
        for delta, weight, cutoff in zip(rows.deltas, self.weights, self.cutoffs):
            if cutoff > 0:
                torch.hardshrink(delta, next_below(cutoff, delta.dtype), out=delta)
            if self.weighted:
                delta.mul_(weight)
            elected.add_(delta)
        elected.sign_()
        for delta, weight in zip(rows.deltas, self.weights):
            delta.mul_(elected).clamp_(min=0)
            rows.total.add_(delta)
            rows.divisor.add_(delta.ne_(0), alpha=weight)
        rows.total.mul_(elected)


def cutoffs(agents: Sequence[Agent], blocks: Iterable[Rows]) -> list[float]:
    """Per agent, the magnitude below which its shared updates are pruned.

    With d shared elements in the tensor that is the k-th smallest of the agent's d magnitudes
    there, k = int((1 − density) · d); 0, which prunes nothing, where k = 0.

    Args:
        blocks: of the whole tensor, every agent's δ in ``deltas``. Taken only if an agent prunes.
    """
    pruning = [i for i, agent in enumerate(agents) if agent.density < 1]
    magnitudes: dict[int, list[torch.Tensor]] = {i: [] for i in pruning}
    for rows in blocks if pruning else ():
        rows.changers.zero_()
        for delta in rows.deltas:
            rows.changers.add_(torch.ne(delta, 0, out=rows.mask))
        (shared,) = torch.nonzero(rows.changers >= 2, as_tuple=True)
        for i in pruning:
            magnitudes[i].append(rows.deltas[i][shared].abs_())
    found = [0.0] * len(agents)
    for i in pruning:
        blockwise = magnitudes.pop(i)
        ranked = torch.cat(blockwise) if blockwise else torch.empty(0)
        k = int((1 - agents[i].density) * ranked.numel())
        if k > 0:
            found[i] = ranked.kthvalue(k).values.item()
    return found
