"""What the agents of a recipe changed, and how their changes overlap: one pass through mergekit's
graph, nothing written.

Whatever method the recipe names, its agents are counted as ``ramplus`` would count them for its
model-wide ratio.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from mergekit_ram.errors import MergeError, RecipeError
from mergekit_ram.host.recipe import Recipe
from mergekit_ram.host.tasks import (
    CountModel,
    CountTensor,
    bound_group,
    record_measured,
    run,
)
from mergekit_ram.method import magnitude
from mergekit_ram.method.magnitude import Magnitudes
from mergekit_ram.method.overlap import GroupOverlap
from mergekit_ram.report.findings import Inspection, MagnitudeReport, SweepPoint
from mergekit_ram.tools import plans
from mergekit_ram.tools.progress import progress

# Magnitudes are measured on one of so many blocks of a tensor; all of them take several times as
# long as counting.
SAMPLE_EVERY = 128


@dataclass(frozen=True)
class Inspected:
    """What one tensor turned out to be.

    Attributes:
        seconds: what that took, without loading.
    """

    overlap: GroupOverlap
    magnitudes: Magnitudes | None
    seconds: float


class InspectTensor(CountTensor):
    """Overlap of the agents in what one merge task would merge, and how large their updates are.

    Attributes:
        sample_every: as for ``magnitude.magnitudes``; 0 measures no magnitudes.
    """

    sample_every: int = 0

    def execute(self, tensors: dict[ModelReference, torch.Tensor]) -> Inspected | None:
        group = bound_group(self.merge, tensors)
        if group is None:
            return None
        start = time.perf_counter()
        overlap = group.count()
        magnitudes = None  # of agents, of which slices of the base alone have none
        if self.sample_every and group.group.non_base:
            magnitudes = magnitude.magnitudes(
                *group.kernel_inputs(), input_dtype=group.input_dtype, every=self.sample_every
            )
        return Inspected(overlap, magnitudes, time.perf_counter() - start)


def plan_inspection(
    recipe: Recipe, options: MergeOptions, parameters: Mapping[str, Any]
) -> CountModel:
    """The counting pass that ``ramplus`` would begin this recipe with.

    Args:
        parameters: of ``ramplus``, in place of the recipe's own.

    Raises:
        MergeError: the recipe cannot be merged. It names the recipe's own method.
    """
    try:
        saves = plans.plan(recipe.by_method("ramplus", parameters), options)
    except RecipeError as error:
        raise type(error)(recipe.method, error.problems) from error
    return saves[0].tensor_task.overlap


def count(planned: CountModel, *, sample_every: int, description: str) -> Iterator[Inspected]:
    """Run the pass, note every tensor in the plan's record and yield what it was found to be.

    Raises:
        MergeError: there was nothing to count.
    """
    targets = [InspectTensor(merge=merge, sample_every=sample_every) for merge in planned.merges]
    options = planned.options
    found = [
        (task.merge, inspected)
        for task, inspected in progress(
            run(targets, options, quiet=True),
            len(targets),
            description,
            quiet=options.quiet,
        )
        if inspected is not None
    ]
    if not found:
        raise MergeError("the recipe merges no tensor of numbers")
    record_measured(planned.record, [(merge, i.overlap) for merge, i in found])
    return (inspected for _, inspected in found)


def inspect(
    recipe: Recipe,
    options: MergeOptions,
    *,
    parameters: Mapping[str, Any] | None = None,
    exact: bool = False,
) -> Inspection:
    """Inspect the agents of a recipe.

    Args:
        parameters: ``epsilon``, ``r``, ``alpha`` or ``ratio``, in place of the recipe's own.
        exact: measure the magnitudes of all elements; otherwise of one in 128 in large tensors.

    Raises:
        MergeError: the recipe cannot be merged.
    """
    prepared = plans.prepared(recipe, options)
    planned = plan_inspection(prepared, options, parameters or {})
    found = list(
        count(
            planned,
            sample_every=1 if exact else SAMPLE_EVERY,
            description="Inspecting agents",
        )
    )
    report = planned.record.report()
    epsilons = sorted({merge.parameters["epsilon"] for merge in planned.merges})
    magnitudes, sweep = _magnitudes(found, planned.record.agents)
    if len(epsilons) == 1:
        sweep[epsilons[0]] = SweepPoint(
            epsilon=epsilons[0],
            changed=[agent.changed for agent in report.agents],
            unique=[agent.unique for agent in report.agents],
            shared=[agent.shared for agent in report.agents],
        )
    rescaling = {n: planned.merges[0].parameters[n] for n in ("r", "alpha", "ratio")}
    content = {
        **dict(report),
        "method": recipe.method,
        "recipe": recipe.content,
        "warnings": report.advice(),
    }
    return Inspection(
        **content,
        epsilon=(epsilons[0], epsilons[-1]),
        rescaling=rescaling,
        magnitudes=magnitudes,
        epsilon_sweep=[sweep[epsilon] for epsilon in sorted(sweep)],
    )


def _magnitudes(
    found: Sequence[Inspected], agents: Sequence[ModelReference]
) -> tuple[MagnitudeReport, dict[float, SweepPoint]]:
    """Sum the magnitudes of all tensors; an agent absent from a tensor has none there."""
    place = {agent: i for i, agent in enumerate(agents)}
    above = torch.zeros(len(agents), 1 + len(magnitude.EDGES), dtype=torch.float64)
    shared = torch.zeros(len(agents), len(magnitude.SWEEP), dtype=torch.float64)
    measured = [inspected for inspected in found if inspected.magnitudes is not None]
    for inspected in measured:
        places = [place[agent] for agent in inspected.overlap.agents]
        above[places] += inspected.magnitudes.changed
        shared[places] += inspected.magnitudes.shared
    above, shared = above.round().long(), shared.round().long()
    first = 1 + magnitude.EDGES.index(magnitude.SWEEP[0])
    changed = above[:, first : first + len(magnitude.SWEEP)]
    sweep = {
        epsilon: SweepPoint(
            epsilon=epsilon,
            changed=changed[:, i].tolist(),
            unique=(changed - shared)[:, i].tolist(),
            shared=shared[:, i].tolist(),
        )
        for i, epsilon in enumerate(magnitude.SWEEP)
    }
    total = sum(inspected.magnitudes.total for inspected in measured)
    sampled = sum(inspected.magnitudes.sampled for inspected in measured)
    counts = above - torch.nn.functional.pad(above[:, 1:], (0, 1))
    report = MagnitudeReport(
        edges=list(magnitude.EDGES),
        counts=counts.tolist(),
        sampled_fraction=sampled / total if total else 1.0,
    )
    return report, sweep
