"""What ``inspect`` and ``compare`` find: one schema for terminal, JSON, plots and model card."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from mergekit_ram.report.frames import frame
from mergekit_ram.report.merge_report import DENSE, SCHEMA_VERSION, Report

if TYPE_CHECKING:
    import pandas

# Agents that changed no more than this part of the elements are what RAM was made for.
SPARSE = 0.5
# Two agents collide where they share more than this part of what either changed …
COLLIDING = 0.3
# … or where they pull this part of what they share in opposite directions.
CONFLICTING = 0.4
# So many of the pairs that do are named.
_MOST_NAMED = 3
# So many elements in common that a rate of conflicts means something.
_ENOUGH_SHARED = 100
# A count that moves by more than this part from one decade of epsilon to the next depends on
# epsilon.
_SENSITIVE = 0.25


class MagnitudeReport(BaseModel):
    """Histogram of abs(τ) of every agent; elements that the agent left as they were are in no bin.

    ``counts[i][k]``: elements of agent i with ``edges[k - 1]`` < abs(τ) ≤ ``edges[k]``; the first
    bin starts at 0, the last one, of which there is one more than edges, has no end. Where
    ``sampled_fraction`` is below 1 the counts are estimated from that part of all elements.
    """

    edges: list[float]
    counts: list[list[int]]
    sampled_fraction: float


class SweepPoint(BaseModel):
    """What would count as changed at another epsilon, by agent; estimated as the histogram is."""

    epsilon: float
    changed: list[int]
    unique: list[int]
    shared: list[int]


class Inspection(Report):
    """What the agents of a recipe changed, whatever its method.

    ``rho`` and ``lambda`` are those of ``ramplus`` by ``rescaling``, its r, alpha and ratio.
    ``epsilon`` is the lowest and the highest of all tensors. ``epsilon_sweep`` holds the exact
    counts at the recipe's own epsilon, if it has one.
    """

    kind: Literal["inspection"] = "inspection"
    epsilon: tuple[float, float]
    rescaling: dict[str, Any]
    magnitudes: MagnitudeReport
    epsilon_sweep: list[SweepPoint]

    def jaccard(self, i: int, j: int) -> float:
        """Elements that agents i and j both changed, of those that either changed."""
        both = self.pairwise_shared[i][j]
        either = self.agents[i].changed + self.agents[j].changed - both
        return both / either if either else 0.0

    def conflict_rate(self, i: int, j: int) -> float:
        """Of the elements that agents i and j both changed, those moved in opposite directions."""
        both = self.pairwise_shared[i][j]
        return self.pairwise_conflicts[i][j] / both if both else 0.0

    def names(self) -> list[str]:
        return short_names([agent.model for agent in self.agents])

    def verdict(self) -> list[str]:
        """What the numbers mean for a person who is about to merge, a sentence or two each."""
        sentences = self.advice()
        if any(agent.changed for agent in self.agents):
            sentences = [*self._sparsity(), *sentences, *self._collisions()]
            sentences += self._sensitivity()
        return sentences

    def _sparsity(self) -> Iterator[str]:
        parts = [agent.changed / agent.total for agent in self.agents if agent.total]
        low, high = min(parts), max(parts)
        changed = " to ".join(dict.fromkeys((percent(low), percent(high))))
        if high <= SPARSE:
            yield (
                f"sparse: the agents changed {changed} of the elements. RAM is "
                "made for this: it keeps what one agent alone changed whole, "
                "where averaging would divide it by the number of agents"
            )
        elif low > DENSE:
            yield (
                f"nearly dense: the agents changed {changed} of the elements, "
                "so almost every element is shared and RAM is close to averaging"
            )
        else:
            yield (
                f"partly dense: the agents changed {changed} of the elements. RAM keeps the "
                "unique part whole; see with mergekit-ram compare what that is worth here"
            )
        changes = sum(agent.changed for agent in self.agents)
        unique = sum(agent.unique for agent in self.agents)
        if len(self.agents) > 1:
            yield (
                f"of all updates {percent(unique / changes)} are unique to one agent and "
                f"{percent(1 - unique / changes)} fall on elements that others changed too"
            )

    def _collisions(self) -> Iterator[str]:
        names = self.names()
        colliding = [
            (i, j)
            for i, j in itertools.combinations(range(len(names)), 2)
            if self.pairwise_shared[i][j] >= _ENOUGH_SHARED
            and (self.jaccard(i, j) > COLLIDING or self.conflict_rate(i, j) > CONFLICTING)
        ]
        colliding.sort(key=lambda pair: -self.jaccard(*pair))
        for i, j in colliding[:_MOST_NAMED]:
            chance = self.agents[i].changed * self.agents[j].changed / self.total
            yield (
                f"{names[i]} and {names[j]} collide: they share {percent(self.jaccard(i, j))} "
                f"of what either changed ({self.pairwise_shared[i][j] / chance:.1f} times as "
                f"much as by chance) and move {percent(self.conflict_rate(i, j))} of the "
                "shared ones in opposite directions"
            )
        if len(colliding) > _MOST_NAMED:
            yield f"{len(colliding) - _MOST_NAMED} more pairs collide, less than these"
        if colliding:
            yield (
                "for shared elements try shared: ties, which elects a direction "
                "instead of averaging, or weight, to let one agent count for more"
            )

    def _sensitivity(self) -> Iterator[str]:
        low, high = self.epsilon
        if low != high:
            return
        at = {point.epsilon: sum(point.changed) for point in self.epsilon_sweep}
        below = max((e for e in at if e <= low / 9), default=low)
        above = min((e for e in at if e >= low * 9), default=low)
        lost = 1 - at[above] / max(at[low], 1)
        hidden = at[below] / max(at[low], 1) - 1
        if lost > _SENSITIVE:
            yield (
                f"epsilon matters here: at {power(above)} instead of {power(low)} "
                f"{percent(lost)} of the updates would no longer count"
            )
        if hidden > _SENSITIVE:
            yield (
                f"updates below epsilon: at {power(below)} instead of {power(low)} "
                f"{percent(hidden)} more would count"
            )

    def to_markdown(self) -> str:
        """A section for a model card."""
        lines = [super().to_markdown(), "Verdict:", ""]
        lines += [f"- {sentence}." for sentence in self.verdict()]
        names = self.names()
        if len(names) > 1:
            lines += [
                "",
                "Elements changed by both agents, of those that either changed (Jaccard index):",
                "",
                f"| | {' | '.join(names)} |",
                f"| --- |{' ---: |' * len(names)}",
            ]
            for i, name in enumerate(names):
                cells = ["" if i == j else percent(self.jaccard(i, j)) for j in range(len(names))]
                lines.append(f"| {name} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


class AgentComparison(BaseModel):
    """What is left of one agent in one merged model. δ = merged − base, τ the agent's task vector.

    ``unique_retention`` and ``shared_retention``: least-squares coefficient of δ on τ over the
    elements that the agent alone, or with others, changed by more than epsilon; 1 is kept whole.
    ``cosine`` of δ and τ. ``sign_agreement``: fraction of the changed elements that the merge moves
    in the agent's direction. ``norm_ratio``: norm of δ over that of τ. None where nothing is there
    to compare with.
    """

    model: str
    changed: int
    unique: int
    unique_retention: float | None
    shared_retention: float | None
    cosine: float | None
    sign_agreement: float | None
    norm_ratio: float | None


class MethodComparison(BaseModel):
    """One merge method.

    ``assumed`` are the parameters that the recipe lacks, ``changed`` the elements it moved by more
    than epsilon, ``seconds`` what its own arithmetic took.
    """

    method: str
    parameters: dict[str, Any]
    assumed: dict[str, Any]
    seconds: float
    delta_norm: float
    changed: int
    agents: list[AgentComparison]

    def mean(self, measure: str) -> float | None:
        """A field of ``AgentComparison``, averaged over the agents that have it."""
        values = [getattr(agent, measure) for agent in self.agents]
        values = [value for value in values if value is not None]
        return sum(values) / len(values) if values else None


class Comparison(BaseModel):
    """What several merge methods keep of the same agents."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["comparison"] = "comparison"
    versions: dict[str, str]
    base_model: str | None
    recipe: dict[str, Any]
    epsilon: tuple[float, float]
    seed: int
    total: int
    methods: list[MethodComparison]

    def names(self) -> list[str]:
        return short_names([agent.model for agent in self.methods[0].agents])

    def to_frame(self) -> pandas.DataFrame:
        """A row for each method and agent, with the fields of ``AgentComparison`` and ``seconds``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return frame(
            {"method": method.method, **dict(agent), "seconds": method.seconds}
            for method in self.methods
            for agent in method.agents
        )

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    def to_markdown(self) -> str:
        """A section for a model card."""
        lines = [
            "### What merge methods keep of each agent",
            "",
            "Least-squares coefficient of the merged model's change "
            "on each agent's own: 1 is kept whole, 0 is lost.",
            "",
            "| method | "
            f"{' | '.join(f'{name} unique | {name} shared' for name in self.names())} | cosine |",
            f"| --- |{' ---: | ---: |' * len(self.names())} ---: |",
        ]
        for method in self.methods:
            kept = [
                number(value)
                for agent in method.agents
                for value in (agent.unique_retention, agent.shared_retention)
            ]
            lines.append(
                f"| {method.method} | {' | '.join(kept)} | {number(method.mean('cosine'))} |"
            )
        return "\n".join(lines) + "\n"


def short_names(models: Sequence[str]) -> list[str]:
    """The last parts of the models' paths, as many as tell them apart."""
    parts = [PurePath(model).parts or (model,) for model in models]
    for depth in range(1, max(map(len, parts), default=1)):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(models)


def percent(part: float) -> str:
    """A fraction as a percentage of at least two digits; 0 % and 100 % only of what is that."""
    value = 100 * part
    if value in (0, 100):
        return f"{value:.0f}%"
    if value < 0.01:
        return "<0.01%"
    if 99.99 < value < 100:
        return ">99.99%"
    digits = 2 if value < 1 or value > 99.9 else 1 if value < 10 or value > 99 else 0
    return f"{value:.{digits}f}%"


def power(value: float) -> str:
    """A number as short as it can be: 1e-5, not 1e-05."""
    short = f"{value:.0e}".replace("e-0", "e-")
    return short if abs(value) < 0.01 and float(short) == value else f"{value:g}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
