"""How the updates of several agents overlap: counts, ratios and rescaling factors.

Pure Python integers and floats; nothing here knows of tensors or of mergekit. Counts are additive,
so those of a model are the sum of those of its tensors, in any order and any split.

Terms and formulas: Yuan et al., 2026, "Reinforced Agent Merging", arXiv 2601.13572.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from mergekit_ram.method.arguments import (
    require,
    require_choice,
    require_count,
    require_number,
)

RatioKind = Literal["unique", "changed"]
Table = tuple[tuple[int, ...], ...]
Rescaling = Mapping[Hashable, float]  # λ by agent


@dataclass(frozen=True)
class OverlapCounts:
    """Overlap of ``n`` agents over ``total`` elements.

    Attributes:
        total: elements looked at, changed or not.
        histogram: ``[n][n]``; ``histogram[i][k]`` is how many elements agent ``i`` and exactly
            ``k`` other agents changed, so that row ``i`` sums to what agent ``i`` changed.
        pairwise: ``[n][n]``, symmetric; elements that both agents changed. The diagonal is what
            each changed.
        pairwise_conflicts: ``[n][n]``, symmetric; elements that the two agents moved in opposite
            directions.
        sign_conflicts: elements that any two agents moved in opposite directions, each counted
            once.

    Raises:
        ValueError: a negative count, or tables that are not all ``[n][n]``.
    """

    total: int
    histogram: Table
    pairwise: Table
    pairwise_conflicts: Table
    sign_conflicts: int

    def __post_init__(self) -> None:
        require_count("total", self.total)
        require_count("sign_conflicts", self.sign_conflicts)
        wanted = f"a table of {self.agents} × {self.agents} counts, 0 or greater"
        for name in ("histogram", "pairwise", "pairwise_conflicts"):
            table = getattr(self, name)
            square = len(table) == self.agents and all(
                len(row) == self.agents and min(row) >= 0 for row in table
            )
            require(square, name, table, wanted)

    @classmethod
    def zero(cls, agents: int) -> OverlapCounts:
        """Counts of no elements at all, the neutral element of addition."""
        empty = ((0,) * agents,) * agents
        return cls(0, empty, empty, empty, 0)

    @property
    def agents(self) -> int:
        return len(self.histogram)

    @property
    def changed(self) -> tuple[int, ...]:
        """Elements each agent changed."""
        return tuple(sum(row) for row in self.histogram)

    @property
    def unique(self) -> tuple[int, ...]:
        """Elements each agent alone changed, Uᵢ."""
        return tuple(row[0] for row in self.histogram)

    @property
    def shared(self) -> tuple[int, ...]:
        """Elements each agent changed together with at least one other, Sᵢ."""
        return tuple(sum(row[1:]) for row in self.histogram)

    def __add__(self, other: OverlapCounts) -> OverlapCounts:
        if not isinstance(other, OverlapCounts):
            return NotImplemented
        if self.agents != other.agents:
            raise ValueError(
                f"cannot add overlap counts of {self.agents} and of {other.agents} agents"
            )
        return OverlapCounts(
            total=self.total + other.total,
            histogram=_add_tables(self.histogram, other.histogram),
            pairwise=_add_tables(self.pairwise, other.pairwise),
            pairwise_conflicts=_add_tables(self.pairwise_conflicts, other.pairwise_conflicts),
            sign_conflicts=self.sign_conflicts + other.sign_conflicts,
        )

    def spread(self, places: Sequence[int], agents: int) -> OverlapCounts:
        """The same counts among ``agents`` agents, agent ``i`` standing at ``places[i]``.

        For a tensor that only some agents have: the others changed nothing there.
        """
        # Row i of the histogram counts other agents, so only its row moves.
        histogram = [(0,) * agents] * agents
        for i, place in enumerate(places):
            histogram[place] = self.histogram[i] + (0,) * (agents - self.agents)

        def spread(table: Table) -> Table:
            wide = [[0] * agents for _ in range(agents)]
            for i, row in zip(places, table):
                for j, value in zip(places, row):
                    wide[i][j] = value
            return tuple(map(tuple, wide))

        return OverlapCounts(
            total=self.total,
            histogram=tuple(histogram),
            pairwise=spread(self.pairwise),
            pairwise_conflicts=spread(self.pairwise_conflicts),
            sign_conflicts=self.sign_conflicts,
        )


def total_counts(counts: Iterable[OverlapCounts], agents: int) -> OverlapCounts:
    """Sum of any number of counts, none included."""
    return sum(counts, OverlapCounts.zero(agents))


@dataclass(frozen=True)
class GroupOverlap:
    """Overlap of named agents, ``counts`` in the order of ``agents``."""

    agents: tuple[Hashable, ...]
    counts: OverlapCounts


def sum_overlaps(overlaps: Iterable[GroupOverlap], agents: Iterable[Hashable] = ()) -> GroupOverlap:
    """Overlap over all groups.

    Args:
        agents: come first in the result, found in a group or not; others follow as they appear. An
            agent absent from a group changed nothing there.
    """
    alike: dict[tuple[Hashable, ...], list[OverlapCounts]] = {}
    for overlap in overlaps:
        alike.setdefault(overlap.agents, []).append(overlap.counts)
    found = (agent for group in alike for agent in group)
    everyone = tuple(dict.fromkeys([*agents, *found]))
    place = {agent: i for i, agent in enumerate(everyone)}
    counts = total_counts(
        (
            total_counts(counts, len(group)).spread(
                [place[agent] for agent in group], len(everyone)
            )
            for group, counts in alike.items()
        ),
        len(everyone),
    )
    return GroupOverlap(everyone, counts)


def overlap_ratio(shared: int, unique: int, *, alpha: float, kind: RatioKind = "unique") -> float:
    """Overlap-unique ratio ρ of one agent, not clipped.

    Args:
        shared: Sᵢ, elements the agent changed together with others.
        unique: Uᵢ, elements it alone changed.
        alpha: ρ of an agent that has shared elements but no unique ones, where S/U has no value.
        kind: ``unique`` for S/U (the paper), ``changed`` for S/(S+U).

    Raises:
        ValueError: names the argument and its value.
    """
    require_count("shared", shared)
    require_count("unique", unique)
    require_number("alpha", alpha, least=0)
    require_choice("kind", kind, get_args(RatioKind))
    if shared == 0:
        return 0.0
    if unique == 0:
        return alpha
    return shared / (unique if kind == "unique" else shared + unique)


def rescaling_factor(rho: float, *, r: float, alpha: float) -> float:
    """λ = 1 + r · clip(ρ, 0, alpha), the factor on an agent's unique updates.

    Raises:
        ValueError: names the argument and its value.
    """
    require(isinstance(rho, Real) and not math.isnan(rho), "rho", rho, "a number")
    require_number("r", r, least=0)
    require_number("alpha", alpha, least=0)
    return 1.0 + r * min(max(rho, 0.0), alpha)


@dataclass(frozen=True)
class RescalingRule:
    """How λ follows from counts. Its fields are the parameters of a recipe, by their names there.

    Attributes:
        r: strength of the rescaling.
        alpha: clip of ρ.
        ratio: what ρ is.
    """

    r: float
    alpha: float
    ratio: RatioKind = "unique"

    def factors(self, counts: OverlapCounts) -> tuple[float, ...]:
        """λ of every agent, in the order of ``counts``."""
        return tuple(map(self.factor, counts.shared, counts.unique))

    def factor(self, shared: int, unique: int) -> float:
        """λ of an agent with so many shared and unique elements."""
        rho = overlap_ratio(shared, unique, alpha=self.alpha, kind=self.ratio)
        return rescaling_factor(rho, r=self.r, alpha=self.alpha)


def rescaling_factors(
    counts: OverlapCounts, *, r: float, alpha: float, kind: RatioKind = "unique"
) -> tuple[float, ...]:
    """λ of every agent, in the order of ``counts``."""
    return RescalingRule(r, alpha, kind).factors(counts)


def _add_tables(left: Table, right: Table) -> Table:
    return tuple(tuple(a + b for a, b in zip(one, other)) for one, other in zip(left, right))
