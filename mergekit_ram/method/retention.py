"""What a merged tensor keeps of each agent's task vector. Pure torch, streamed, sums in float64
that add over tensors.

With δ = merged − base, agent i's retention over some elements is the least-squares coefficient of δ
on τᵢ there, Σδτᵢ / Στᵢ²: 1 where its updates were kept whole, 0 where nothing is left of them,
negative where they were reversed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from mergekit_ram.method.rounding import round_down
from mergekit_ram.method.rule import Agent
from mergekit_ram.method.vectors import task_vectors

_BLOCK_ELEMENTS = 1 << 15


@dataclass(frozen=True)
class AgentRetention:
    """Sums over elements, of one agent and one merged model; they add over tensors.

    Attributes:
        dot, square: Σδτ and Στ² over all elements.
        changed_dot, changed_square: over those the agent changed, abs(τ) > epsilon.
        unique_dot, unique_square: over those that it alone changed.
        changed, unique: how many elements that are.
        agreeing: how many of the changed ones the merge moves in the agent's direction.
    """

    dot: float = 0.0
    square: float = 0.0
    changed_dot: float = 0.0
    changed_square: float = 0.0
    unique_dot: float = 0.0
    unique_square: float = 0.0
    changed: float = 0.0
    unique: float = 0.0
    agreeing: float = 0.0

    def __add__(self, other: AgentRetention) -> AgentRetention:
        return AgentRetention(*map(sum, zip(astuple(self), astuple(other))))

    @property
    def shared_retention(self) -> float | None:
        """Over the elements that other agents changed too. None without such elements."""
        if self.changed == self.unique:
            return None
        square = self.changed_square - self.unique_square
        return _ratio(self.changed_dot - self.unique_dot, square)

    @property
    def unique_retention(self) -> float | None:
        """Over the elements that no other agent changed. None without such elements."""
        return _ratio(self.unique_dot, self.unique_square)

    @property
    def sign_agreement(self) -> float | None:
        """Fraction of the changed elements that the merge moves in the agent's direction."""
        return _ratio(self.agreeing, self.changed)

    def cosine(self, delta_square: float) -> float | None:
        """Cosine of δ, of squared norm ``delta_square``, and τ."""
        return _ratio(self.dot, math.sqrt(delta_square * self.square))

    def norm_ratio(self, delta_square: float) -> float | None:
        """Norm of δ over that of τ."""
        return _ratio(math.sqrt(delta_square), math.sqrt(self.square))


@dataclass(frozen=True)
class Retention:
    """What one merged tensor keeps of its agents.

    Attributes:
        agents: in the order they were given.
        delta_square: Σδ².
        changed: elements that the merge moved by more than epsilon.
    """

    agents: tuple[AgentRetention, ...]
    delta_square: float
    changed: int


def retained(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    merged: Sequence[torch.Tensor],
    epsilon: float,
    *,
    block_elements: int = _BLOCK_ELEMENTS,
) -> tuple[Retention, ...]:
    """Compare merged tensors with the agents they were merged from, all of the base's shape and
    device.

    Differences are taken in float32, in float64 if an input is float64. Memory is a constant.

    Returns:
        One for each of ``merged``.
    """
    everyone = [Agent(tensor) for tensor in (*agents, *merged)]
    fields = len(AgentRetention.__dataclass_fields__)
    sums = torch.zeros(fields, len(agents), len(merged), dtype=torch.float64)
    own = torch.zeros(2, len(merged), dtype=torch.float64)
    for vectors in task_vectors(base, everyone, block_elements=block_elements):
        threshold = round_down(epsilon, vectors.dtype)
        taus, deltas = vectors[: len(agents)], vectors[len(agents) :]
        own += _own_sums(deltas, threshold)
        sums += _sums(taus, deltas, threshold)
    return tuple(
        Retention(
            tuple(AgentRetention(*agent) for agent in sums[:, :, i].T.tolist()),
            delta_square=own[0, i].item(),
            changed=int(own[1, i]),
        )
        for i in range(len(merged))
    )


def _sums(taus: torch.Tensor, deltas: torch.Tensor, threshold: float) -> torch.Tensor:
    """Fields of ``AgentRetention`` over a block, of ``[agents, elements]`` and ``[merged,
    elements]``.

    Returns:
        float64 ``[fields, agents, merged]``.
    """
    changes = torch.hardshrink(taus, threshold)
    signs = changes.sign()
    mask = signs.abs()
    changers = mask.sum(0)
    alone = torch.eq(changers, 1, out=changers)
    rows = torch.cat([taus, changes, changes * alone])
    dots = (rows @ deltas.T).view(3, len(taus), len(deltas))
    squares = rows.square_().sum(1).view(3, len(taus))
    # Of the signs' products, a sum says agreeing − opposed and that of the absolute values agreeing
    # + opposed.
    directions = deltas.sign_()
    difference = signs @ directions.T
    agreeing = (difference + mask @ directions.abs_().T) / 2
    counts = torch.stack([mask.sum(1), mask @ alone])
    sums = (
        *(dots[0], squares[0]),
        *(dots[1], squares[1]),
        *(dots[2], squares[2]),
        *counts,
        agreeing,
    )
    table = [row if row.ndim == 2 else row[:, None].expand_as(agreeing) for row in sums]
    return torch.stack(table).to("cpu", torch.float64)


def _own_sums(deltas: torch.Tensor, threshold: float) -> torch.Tensor:
    """Σδ² and the number of changed elements over a block of ``[merged, elements]``: float64 ``[2,
    merged]``.
    """
    changes = torch.hardshrink(deltas, threshold)
    changed = torch.ne(changes, 0, out=changes).sum(1)
    return torch.stack([deltas.square().sum(1), changed]).to("cpu", torch.float64)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
