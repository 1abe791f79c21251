"""What a merge found out about its agents, collected while merging."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from mergekit_ram._version import __version__
from mergekit_ram.method.overlap import (
    GroupOverlap,
    RatioKind,
    Rescaling,
    overlap_ratio,
    sum_overlaps,
)
from mergekit_ram.report.merge_report import AgentReport, PartReport, Report
from mergekit_ram.report.parts import layer_of, module_type_of, natural_order

LOG = logging.getLogger(__name__)

_TELLING = ContextVar("telling", default=True)


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Log no warning of records, for a plan that is made again."""
    token = _TELLING.set(False)
    try:
        yield
    finally:
        _TELLING.reset(token)


class MergeRecord:
    """What the tensors of one merge turned out to be. Safe to add to from several threads.

    Args:
        method: name of the merge method.
        base_model: as the recipe names it.
        recipe: the recipe, as plain data.
        agents: every agent of the recipe, in its order; one without a merged tensor changed
            nothing.
        ratio: how ρ is taken.
        alpha: ρ of an agent with shared but no unique elements.

    Attributes:
        reported: whether a report is made of it; what it would say at the end is logged at once
            otherwise.
        overflows: by tensor, elements that are not finite though all inputs are.
    """

    def __init__(
        self,
        *,
        method: str,
        base_model: str | None,
        recipe: Mapping[str, Any],
        agents: Iterable[Hashable],
        ratio: RatioKind = "unique",
        alpha: float = 0.2,
    ):
        self.method = method
        self.base_model = base_model
        self.recipe = dict(recipe)
        self.agents = tuple(agents)
        self.ratio = ratio
        self.alpha = alpha
        self.warnings: list[str] = []
        self.reported = False
        self.overflows: dict[str, int] = {}
        self._tensors: dict[str, tuple[GroupOverlap, Rescaling]] = {}
        self._lock = threading.Lock()

    def warn(self, *warnings: str) -> None:
        """Log warnings once, and keep them for the report."""
        new = [w for w in dict.fromkeys(warnings) if w not in self.warnings]
        for warning in new if _TELLING.get() else ():
            LOG.warning(warning)
        self.warnings += new

    def add(self, tensor: str, overlap: GroupOverlap, rescaling: Rescaling) -> None:
        with self._lock:
            self._tensors[tensor] = overlap, rescaling

    def add_overflow(self, tensor: str, count: int) -> None:
        """Keep how many elements are not finite though all inputs are, or log the first such."""
        with self._lock:
            first = not self.overflows
            self.overflows[tensor] = count
        if first and not self.reported:
            LOG.warning(*overflow_warnings({tensor: count}))

    def tensors(self) -> dict[str, tuple[GroupOverlap, Rescaling]]:
        """Overlap and λ of every tensor added so far."""
        return dict(self._tensors)

    def overlap(self) -> GroupOverlap:
        """Overlap over all tensors added so far."""
        return self._sum(self._tensors)

    def _sum(self, names: Iterable[str]) -> GroupOverlap:
        return sum_overlaps((self._tensors[name][0] for name in names), self.agents)

    def report(self) -> Report:
        """The report of what was added so far."""
        counts = self.overlap().counts
        agents = []
        for i, agent in enumerate(self.agents):
            present = [
                (overlap.counts.total, rescaling.get(agent, 1.0))
                for overlap, rescaling in self._tensors.values()
                if agent in overlap.agents
            ]
            lowest = min((factor for _, factor in present), default=1.0)
            highest = max((factor for _, factor in present), default=1.0)
            agents.append(
                AgentReport(
                    model=str(agent),
                    total=sum(total for total, _ in present),
                    changed=counts.changed[i],
                    unique=counts.unique[i],
                    shared=counts.shared[i],
                    overlap_histogram=list(counts.histogram[i]),
                    rho=overlap_ratio(
                        counts.shared[i],
                        counts.unique[i],
                        alpha=self.alpha,
                        kind=self.ratio,
                    ),
                    lambda_=lowest if lowest == highest else None,
                    lambda_range=(lowest, highest),
                )
            )
        return Report(
            versions=versions(),
            method=self.method,
            base_model=self.base_model,
            recipe=self.recipe,
            total=counts.total,
            agents=agents,
            pairwise_shared=[list(row) for row in counts.pairwise],
            pairwise_conflicts=[list(row) for row in counts.pairwise_conflicts],
            sign_conflicts=counts.sign_conflicts,
            layers=self._parts(layer_of),
            module_types=self._parts(module_type_of),
            warnings=self.warnings,
        )

    def _parts(self, name_of: Callable[[str], str]) -> list[PartReport]:
        parts: dict[str, list[str]] = {}
        for tensor in self._tensors:
            parts.setdefault(name_of(tensor), []).append(tensor)
        reports = []
        for name in sorted(parts, key=natural_order):
            counts = self._sum(parts[name]).counts
            reports.append(
                PartReport(
                    name=name,
                    total=counts.total,
                    changed=list(counts.changed),
                    unique=list(counts.unique),
                    shared=list(counts.shared),
                    sign_conflicts=counts.sign_conflicts,
                )
            )
        return reports


def overflow_warnings(overflows: Mapping[str, int]) -> list[str]:
    """Say which tensors merged to infinity or NaN though their inputs are finite.

    Args:
        overflows: how many elements, by tensor.
    """
    if not overflows:
        return []
    first, *others = sorted(overflows)
    more = f" and {len(others)} more" if others else ""
    return [
        f"{sum(overflows.values())} elements of {first}{more} are not finite "
        "in the merged model, though all inputs are: they overflow its dtype. "
        "Use dtype or out_dtype bfloat16 or float32, or a smaller lambda or r"
    ]


def versions() -> dict[str, str]:
    """Of the packages that a result depends on."""
    found = {"mergekit-ram": __version__}
    for package in ("mergekit", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found
