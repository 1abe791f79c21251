"""Graph tasks: merging with a record of it, the counting pass behind the model-wide ratio, the
report at the end.

The model-wide ratio needs every tensor before the first is merged, while mergekit's graph holds a
tensor only as long as something needs it. So one task, ``CountModel``, which every merge depends
on, runs a graph of its own that loads each group, counts it and lets it go; what the outer graph
gets is a few integers. It is a leading task, so the outer graph still falls into one island per
tensor for mergekit's multi-GPU executor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Optional, Union

import torch
from mergekit.common import ImmutableMap, ModelReference
from mergekit.graph import Executor, Task
from mergekit.io.tasks import FinalizeModel, SaveTensor
from mergekit.merge_methods.task_adapter import (
    ExecuteMergeMethodTask,
    TensorDictWrapper,
)
from mergekit.multigpu_executor import MultiGPUExecutor
from mergekit.options import MergeOptions
from pydantic import ConfigDict

from mergekit_ram.errors import MergeError
from mergekit_ram.host.groups import BoundGroup, rescaling_by_agent
from mergekit_ram.method.overlap import GroupOverlap
from mergekit_ram.report.merge_report import Report
from mergekit_ram.report.record import MergeRecord, overflow_warnings

LOG = logging.getLogger(__name__)


# What a bound parameter of this name tells our methods: who calls them.
CALL = "mergekit_ram_call"


class Call(Enum):
    """Who calls a merge method.

    Of a ``DIRECT`` caller the groups are all that is merged, so that a model-wide ratio is theirs.
    A ``PLANNED`` one is a task that takes the bound groups themselves, since it knows what else
    applies to them.
    """

    DIRECT = "direct"
    PLANNED = "planned"


class CountTensor(Task[Optional[GroupOverlap]]):
    """Overlap of the agents in what one merge task would merge; None where it
    would merge nothing.
    """

    merge: ExecuteMergeMethodTask

    def arguments(self) -> dict[str, Task]:
        return self.merge.arguments()

    def group_label(self) -> Optional[str]:
        return self.merge.group_label()

    def uses_accelerator(self) -> bool:
        return self.merge.uses_accelerator()

    def execute(self, tensors: dict[ModelReference, torch.Tensor]) -> Optional[GroupOverlap]:
        group = bound_group(self.merge, tensors)
        return None if group is None else group.count()


class CountModel(Task[GroupOverlap]):
    """Overlap of every agent over the whole model: the sum of what the given tasks would merge."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    merges: tuple[ExecuteMergeMethodTask, ...]
    options: MergeOptions
    record: MergeRecord

    # Every plan has its own, and graphs compare and hash their tasks often.
    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> bool:
        return self is other

    def arguments(self) -> dict[str, Task]:
        return {}

    def main_thread_only(self) -> bool:
        return True

    def execute(self) -> GroupOverlap:
        found = [(task.merge, overlap) for task, overlap in self._count() if overlap is not None]
        return record_measured(self.record, found)

    def _count(self) -> list[tuple[CountTensor, Optional[GroupOverlap]]]:
        counting = [CountTensor(merge=merge) for merge in self.merges]
        quiet = self.options.quiet
        return list(run(counting, self.options, quiet=quiet, desc="Measuring overlap"))


class KnownOverlap(Task[GroupOverlap]):
    """The same, measured elsewhere."""

    overlap: GroupOverlap

    def arguments(self) -> dict[str, Task]:
        return {}

    def execute(self) -> GroupOverlap:
        return self.overlap


class RamMerge(ExecuteMergeMethodTask, Task[torch.Tensor]):
    """A merge that takes its place in the record, by a model-wide ratio if there is one.

    mergekit's task is a ``Task[Optional[Tensor]]`` only, which recent pydantic does not let its own
    in-memory plan (``ReturnTensor``, used by ``mergekit-evolve``) hold; this one is both.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    record: MergeRecord
    overlap: Optional[Union[CountModel, KnownOverlap]] = None

    def arguments(self) -> dict[str, Task]:
        arguments = super().arguments()
        if self.overlap is not None:
            arguments["overlap"] = self.overlap
        return arguments

    def execute(
        self,
        tensors: dict[ModelReference, torch.Tensor],
        overlap: Optional[GroupOverlap] = None,
    ) -> Optional[torch.Tensor]:
        merge = _execute_as_planned(self, tensors)
        if not isinstance(merge, BoundGroup):
            return merge
        rescaling = None if overlap is None else rescaling_by_agent(overlap, self.parameters)
        merged = merge.merge(rescaling, counting=True)
        if merged.overlap is not None:
            self.record.add(merge.name, merged.overlap, merged.rescaling)
        if merged.overflowed:
            self.record.add_overflow(merge.name, merged.overflowed)
        return merged.tensor


class NumberedTensors(TensorDictWrapper):
    """mergekit's inputs of a merge of files, passed by number."""

    def arguments(self) -> dict[str, Task]:
        return {str(i): load for i, load in enumerate(self.tensors.values())}

    def execute(self, **loaded: torch.Tensor) -> dict[ModelReference, torch.Tensor]:
        return {model: loaded[str(i)] for i, model in enumerate(self.tensors)}


class Saved(Task[None]):
    """Tensors that are saved."""

    saves: tuple[SaveTensor, ...]

    def arguments(self) -> dict[str, Task]:
        return {str(i): save for i, save in enumerate(self.saves)}

    def main_thread_only(self) -> bool:
        # Or mergekit's multi-GPU executor would take the tensors for dependent on each other.
        return True

    def execute(self, **_saved: None) -> None:
        pass


class WriteReport(Task[Report]):
    """``ram_report.json`` beside a model whose tensors are all written."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    out_path: str
    finalize: FinalizeModel
    record: MergeRecord

    def arguments(self) -> dict[str, Task]:
        return {"_finalized": self.finalize}

    def main_thread_only(self) -> bool:
        return True

    def execute(self, _finalized: None) -> Report:
        report = self.record.report()
        self.record.warn(*report.advice(), *overflow_warnings(self.record.overflows))
        report = report.model_copy(update={"warnings": self.record.warnings})
        report.write(self.out_path)
        return report


def batched_saves(saves: Sequence[SaveTensor]) -> tuple[Saved, ...]:
    """All saves in a few tasks, so that mergekit, which visits every value it holds after every
    task, holds few.
    """
    # mergekit executes them by name.
    saves = sorted(saves, key=lambda save: save.tensor_name)
    size = math.isqrt(len(saves)) + 1
    return tuple(
        Saved(saves=tuple(saves[start : start + size])) for start in range(0, len(saves), size)
    )


def recorded_merges(
    merges: Sequence[ExecuteMergeMethodTask],
    record: MergeRecord,
    overlap: CountModel | KnownOverlap | None = None,
) -> list[RamMerge]:
    """The same merges, noting the overlap they meet, or rescaled by the ratio of a given one."""
    return [
        RamMerge.model_construct(**dict(merge), record=record, overlap=overlap) for merge in merges
    ]


def merges_by_model_ratio(
    merges: Sequence[ExecuteMergeMethodTask],
    record: MergeRecord,
    options: MergeOptions,
) -> list[RamMerge]:
    """The same merges, rescaled by the ratio over all of them, which is measured first."""
    overlap = CountModel(merges=tuple(merges), options=options, record=record)
    return recorded_merges(merges, record, overlap)


def record_measured(
    record: MergeRecord, found: Sequence[tuple[ExecuteMergeMethodTask, GroupOverlap]]
) -> GroupOverlap:
    """Note what each merge was measured to be, and the λ that follow from their sum, which is
    returned.
    """
    for merge, overlap in found:
        record.add(merge.output_weight.name, overlap, {})
    total = record.overlap()
    for merge, overlap in found:
        rescaling = rescaling_by_agent(total, merge.parameters)
        record.add(merge.output_weight.name, overlap, rescaling)
    log_agents(record.report())
    return total


def run(
    targets: Sequence[Task],
    options: MergeOptions,
    *,
    quiet: bool,
    desc: str | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Run a graph on the devices that the options name; yields every target with what it gave.

    Args:
        quiet: show no progress bar.
        desc: title of the progress bar.
    """
    if options.multi_gpu:
        executor = MultiGPUExecutor(
            targets, storage_device=None if options.low_cpu_memory else "cpu"
        )
        return executor.run(quiet=quiet)
    executor = Executor(
        targets,
        math_device=options.device,
        storage_device=options.device if options.low_cpu_memory else "cpu",
    )
    # mergekit looks a task up among the targets after it, in a list of them.
    executor.targets = set(executor.targets)
    return executor.run(quiet=quiet, desc=desc)


def bound_group(
    merge: ExecuteMergeMethodTask, tensors: dict[ModelReference, torch.Tensor]
) -> BoundGroup | None:
    """What one of our methods would merge; None where it would merge nothing.

    Raises:
        MergeError: the tensors cannot be merged.
    """
    # The merge task itself decides what is merged, copied or skipped.
    result = _execute_as_planned(merge, tensors)
    return result if isinstance(result, BoundGroup) else None


def log_agents(report: Report) -> None:
    """One line an agent, at INFO."""
    for agent in report.agents:
        LOG.info(
            "%s changed %d of %d elements: %d unique, %d shared; overlap-unique ratio %.6g, "
            "unique updates rescaled by %s",
            agent.model,
            agent.changed,
            agent.total,
            agent.unique,
            agent.shared,
            agent.rho,
            " to ".join(f"{factor:.6g}" for factor in sorted(set(agent.lambda_range))),
        )


def _execute_as_planned(
    task: ExecuteMergeMethodTask, tensors: dict[ModelReference, torch.Tensor]
) -> BoundGroup | torch.Tensor | None:
    """What one of our methods would merge, or what mergekit itself copies in its place.

    Raises:
        MergeError: the tensors cannot be merged.
    """
    parameters = ImmutableMap({**dict(task.parameters.items()), CALL: Call.PLANNED})
    planned = task.model_copy(update={"parameters": parameters})
    try:
        return ExecuteMergeMethodTask.execute(planned, tensors)
    except MergeError:
        raise
    except ValueError as error:  # mergekit's, of tensors unlike
        raise MergeError(f"cannot merge {task.output_weight.name}: {error}") from error
