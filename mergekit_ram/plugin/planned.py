"""What becomes of merges planned for a method of ours, by whichever planner of mergekit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mergekit.common import ModelReference
from mergekit.graph import Task
from mergekit.io.tasks import FinalizeModel, SaveTensor
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions

from mergekit_ram.check.problems import parameter_problem
from mergekit_ram.check.tensors import PlannedCheckpoints, rounding_warnings, tensor_problems
from mergekit_ram.cluster import driver
from mergekit_ram.errors import MergeError, RecipeError
from mergekit_ram.host import tasks
from mergekit_ram.host.compatibility import require
from mergekit_ram.host.known_methods import parameter_warnings
from mergekit_ram.host.methods import METHODS, RamMethod
from mergekit_ram.host.parameters import Refusals, note_weights
from mergekit_ram.report.record import MergeRecord

Merges = Sequence[ExecuteMergeMethodTask]


def recorded(
    method: RamMethod,
    merges: Merges,
    refusals: Refusals,
    options: MergeOptions,
    *,
    base_model: ModelReference | str | None,
    recipe: Mapping[str, Any],
    dtype: str | None,
) -> tuple[Merges, MergeRecord]:
    """The merges as this plugin runs them, and the record that they write.

    The workers of a cluster make theirs themselves.

    Args:
        refusals: of parameters, found while planning.
        recipe: as plain data.
        dtype: of the recipe.

    Raises:
        RecipeError: with everything that planning can show to be wrong, before a weight is read.
    """
    record = _record(method, merges, base_model, recipe)
    _require_mergeable(merges, refusals, record, dtype, options)
    if isinstance(options, driver.ClusterOptions):
        return merges, record
    if method.ratio_scope == "model":
        return tasks.merges_by_model_ratio(merges, record, options), record
    return tasks.recorded_merges(merges, record), record


def finished(
    targets: Sequence[Task],
    out_path: str,
    record: MergeRecord | None,
    options: MergeOptions,
) -> list[Task]:
    """The targets of a plan to disk: by a cluster if asked for, the report after the model.

    Args:
        record: of a merge by a method of ours, None of others.
    """
    if isinstance(options, driver.ClusterOptions):
        if record is None:
            raise MergeError(f"a cluster merges {', '.join(METHODS)}, no other method")
        model_wide = METHODS[record.method].ratio_scope == "model"
        targets = driver.distributed(targets, record, options, model_wide=model_wide)
    if record is None:
        return list(targets)
    record.reported = True
    finalize = [task for task in targets if isinstance(task, FinalizeModel)]
    require(len(finalize) == 1, "a plan does not end in one FinalizeModel")
    saves = tasks.batched_saves(finalize[0].tensor_save_tasks)
    finalized = finalize[0].model_copy(update={"tensor_save_tasks": saves})
    report = tasks.WriteReport(out_path=out_path, finalize=finalized, record=record)
    # The report needs everything that is saved. mergekit compares each task with all targets: 20
    # 000 take hours.
    implied = (SaveTensor, FinalizeModel)
    return [*(task for task in targets if not isinstance(task, implied)), report]


def _record(
    method: RamMethod,
    merges: Merges,
    base_model: ModelReference | str | None,
    recipe: Mapping[str, Any],
) -> MergeRecord:
    settings = {}
    if merges and method.ratio_scope != "none":
        settings = {name: merges[0].parameters[name] for name in ("ratio", "alpha")}
    return MergeRecord(
        method=method.spec.name,
        base_model=str(base_model) if base_model else None,
        recipe=recipe,
        agents=dict.fromkeys(agent for merge in merges for agent in _agents(merge)),
        **settings,
    )


def _require_mergeable(
    merges: Merges,
    refusals: Refusals,
    record: MergeRecord,
    dtype: str | None,
    options: MergeOptions,
) -> None:
    for merge in merges:
        refusals.tensor = merge.output_weight.name
        weights = [merge.input_parameters[agent]["weight"] for agent in _agents(merge)]
        note_weights(refusals, merge.parameters, weights)
    problems = [parameter_problem(refusal) for refusal in refusals]
    checkpoints = PlannedCheckpoints(lazy_unpickle=options.lazy_unpickle)
    problems += tensor_problems(merges, checkpoints)
    if problems:
        raise RecipeError(record.method, problems)
    record.warn(*parameter_warnings(record.method, record.recipe))
    record.warn(*rounding_warnings(record.agents, checkpoints, dtype))
    record.warn(*checkpoints.quantization_warnings())


def _agents(merge: ExecuteMergeMethodTask) -> list[ModelReference]:
    return [model for model in merge.model_order if model != merge.base_model]
