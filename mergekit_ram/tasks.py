"""Graph tasks: the counting pass behind the model-wide ratio, and the merge that uses it.

The model-wide ratio needs every tensor before the first is merged, while mergekit's graph holds a tensor only as long
as something needs it. So one task, ``MeasureOverlap``, which every merge depends on, runs a graph of its own that loads
each group, counts it and lets it go; what the outer graph gets is a few integers. It is a leading task, so the
outer graph still falls into one island per tensor for mergekit's multi-GPU executor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Optional

import torch
from mergekit.common import ImmutableMap, ModelReference
from mergekit.graph import Executor, Task
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.multigpu_executor import MultiGPUExecutor
from mergekit.options import MergeOptions

from mergekit_ram.methods import (
    COUNTING,
    RESCALING,
    GroupOverlap,
    rescaling_by_agent,
    sum_overlaps,
)
from mergekit_ram.overlap import overlap_ratio

LOG = logging.getLogger("mergekit_ram")


class CountOverlap(Task[Optional[GroupOverlap]]):
    """Overlap of the agents in what one merge task would merge; None where it would merge nothing."""

    merge: ExecuteMergeMethodTask

    def arguments(self) -> dict[str, Task]:
        return self.merge.arguments()

    def group_label(self) -> Optional[str]:
        return self.merge.group_label()

    def uses_accelerator(self) -> bool:
        return self.merge.uses_accelerator()

    def execute(
        self, tensors: dict[ModelReference, torch.Tensor]
    ) -> Optional[GroupOverlap]:
        # The merge task itself decides what is merged, copied or skipped.
        result = _with_parameter(self.merge, COUNTING, True).execute(tensors)
        return result if isinstance(result, GroupOverlap) else None


class MeasureOverlap(Task[GroupOverlap]):
    """Overlap of every agent over the whole model: the sum of what the given tasks would merge."""

    merges: tuple[ExecuteMergeMethodTask, ...]
    options: MergeOptions

    # Compared thousands of times while a graph is built, and every plan has its own.
    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> bool:
        return self is other

    def arguments(self) -> dict[str, Task]:
        return {}

    def main_thread_only(self) -> bool:
        return True

    def execute(self) -> GroupOverlap:
        counting = [CountOverlap(merge=merge) for merge in self.merges]
        results = self._run(counting)
        overlap = sum_overlaps(found for found in results if found is not None)
        _log(overlap, self.merges)
        return overlap

    def _run(self, counting: Sequence[CountOverlap]) -> list[Optional[GroupOverlap]]:
        options = self.options
        if options.multi_gpu:
            executor = MultiGPUExecutor(
                counting, storage_device=None if options.low_cpu_memory else "cpu"
            )
            return [found for _, found in executor.run(quiet=options.quiet)]
        executor = Executor(
            counting,
            math_device=options.device,
            storage_device=options.device if options.low_cpu_memory else "cpu",
        )
        run = executor.run(quiet=options.quiet, desc="Measuring overlap")
        return [found for _, found in run]


class MergeByModelRatio(ExecuteMergeMethodTask):
    """A merge whose rescaling comes from the overlap of the whole model."""

    overlap: MeasureOverlap

    def arguments(self) -> dict[str, Task]:
        return {**super().arguments(), "overlap": self.overlap}

    def execute(
        self, tensors: dict[ModelReference, torch.Tensor], overlap: GroupOverlap
    ) -> Optional[torch.Tensor]:
        rescaling = rescaling_by_agent(overlap, self.parameters)
        task = _with_parameter(self, RESCALING, rescaling)
        return ExecuteMergeMethodTask.execute(task, tensors)


def merge_by_model_ratio(
    merges: Sequence[ExecuteMergeMethodTask], options: MergeOptions
) -> list[MergeByModelRatio]:
    """The same merges, rescaled by the ratio over all of them."""
    overlap = MeasureOverlap(merges=tuple(merges), options=options)
    return [
        MergeByModelRatio.model_construct(**dict(merge), overlap=overlap)
        for merge in merges
    ]


def _with_parameter(
    task: ExecuteMergeMethodTask, name: str, value: Any
) -> ExecuteMergeMethodTask:
    parameters = {**dict(task.parameters.items()), name: value}
    return task.model_copy(update={"parameters": ImmutableMap(parameters)})


def _log(overlap: GroupOverlap, merges: Sequence[ExecuteMergeMethodTask]) -> None:
    settings = {
        tuple(merge.parameters[name] for name in ("r", "alpha", "ratio"))
        for merge in merges
    }
    counts = overlap.counts
    for i, agent in enumerate(overlap.agents):
        shared, unique = counts.shared[i], counts.unique[i]
        LOG.info(
            "%s changed %d of %d elements: %d unique, %d shared",
            agent,
            counts.changed[i],
            counts.total,
            unique,
            shared,
        )
        for r, alpha, kind in sorted(settings):
            rho = overlap_ratio(shared, unique, alpha=alpha, kind=kind)
            LOG.info(
                "%s: overlap-unique ratio %.6g, rescaling %.6g (r=%g, alpha=%g, ratio=%s)",
                agent,
                rho,
                1 + r * min(rho, alpha),
                r,
                alpha,
                kind,
            )
