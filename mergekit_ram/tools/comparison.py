"""What several merge methods keep of the same agents: each is run on every tensor of a recipe, in
memory.

One pass through mergekit's graph loads a tensor of every model, lets each method merge it by
mergekit's own means, takes the sums of ``retention`` and lets everything go.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mergekit import merge_methods
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Task
from mergekit.io.tasks import SaveTensor
from mergekit.merge_methods.base import BasePolicy
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from pydantic import ConfigDict

from mergekit_ram.errors import MergeError
from mergekit_ram.host.known_methods import parameter_names, require_method, required_parameters
from mergekit_ram.host.recipe import Recipe
from mergekit_ram.host.tasks import RamMerge, bound_group, run
from mergekit_ram.method import retention
from mergekit_ram.method.overlap import GroupOverlap
from mergekit_ram.method.retention import AgentRetention, Retention
from mergekit_ram.report.findings import AgentComparison, Comparison, MethodComparison
from mergekit_ram.report.record import versions
from mergekit_ram.tools import plans
from mergekit_ram.tools.inspection import count, plan_inspection
from mergekit_ram.tools.progress import progress

DEFAULT_METHODS = ("ram", "ramplus", "ties", "dare_ties", "task_arithmetic", "linear")

# Values of parameters that a method has no default for, and the density that the papers of those
# that prune suggest.
_ASSUMED = {"weight": 1.0, "t": 0.5}
_PRUNED_DENSITY = 0.5
_PRUNING = (
    "ties",
    "dare_ties",
    "dare_linear",
    "breadcrumbs",
    "breadcrumbs_ties",
    "della",
    "della_linear",
)

# Merged tensors wait for each other, and are measured together, up to this size.
_WAITING_BYTES = 256 << 20


@dataclass(frozen=True)
class PlannedMethod:
    """A method and its merges of a recipe.

    Attributes:
        merges: by the output tensor's name.
        dtypes: what the output is saved as, by the same name.
        assumed: values that the recipe lacks.
    """

    name: str
    merges: Mapping[str, ExecuteMergeMethodTask]
    dtypes: Mapping[str, str | None]
    assumed: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one tensor by one method."""

    seconds: float
    retention: Retention


@dataclass(frozen=True)
class Compared:
    """One tensor by every method, ``outcomes`` in the order of the methods."""

    agents: tuple[ModelReference, ...]
    total: int
    outcomes: tuple[Outcome, ...]


class CompareTensor(Task[Any]):
    """Merges one tensor by every method and compares the results.

    Attributes:
        counted: the tensor as ``ramplus`` takes it, which says who its agents are.
        overlap: over the whole model, for a method that needs it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    counted: ExecuteMergeMethodTask
    methods: tuple[PlannedMethod, ...]
    overlap: Any
    seed: int

    # Every plan has its own, and graphs compare and hash their tasks often.
    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> bool:
        return self is other

    def arguments(self) -> dict[str, Task]:
        return {"tensors": self.counted.gather_tensors}

    def group_label(self) -> str | None:
        return self.counted.group_label()

    def uses_accelerator(self) -> bool:
        return True

    def execute(self, tensors: dict[ModelReference, torch.Tensor]) -> Compared | None:
        bound = bound_group(self.counted, tensors)
        if bound is None:
            return None
        group, epsilon = bound.group, bound.parameters["epsilon"]
        if not group.non_base:
            # The base's own weights go through, whatever the method.
            nothing = Outcome(0.0, Retention((), delta_square=0.0, changed=0))
            outcomes = (nothing,) * len(self.methods)
            return Compared((), group.base.tensor.numel(), outcomes)
        agents = [entry.tensor for entry in group.non_base]
        outcomes: list[Outcome] = []
        waiting: list[tuple[float, torch.Tensor]] = []

        def measure_waiting() -> None:
            merged = [tensor for _, tensor in waiting]
            kept = retention.retained(group.base.tensor, agents, merged, epsilon)
            outcomes.extend(Outcome(s, k) for (s, _), k in zip(waiting, kept))
            waiting.clear()

        for method in self.methods:
            waiting.append(self._merge(method, tensors))
            if sum(tensor.nbytes for _, tensor in waiting) > _WAITING_BYTES:
                measure_waiting()
        measure_waiting()
        return Compared(
            agents=tuple(entry.id for entry in group.non_base),
            total=group.base.tensor.numel(),
            outcomes=tuple(outcomes),
        )

    def _merge(
        self, method: PlannedMethod, tensors: dict[ModelReference, torch.Tensor]
    ) -> tuple[float, torch.Tensor]:
        """Seconds and result of one method, whose random choices depend on the seed and the tensor
        alone.
        """
        name = self.counted.output_weight.name
        merge, dtype = method.merges[name], method.dtypes[name]
        needs_overlap = isinstance(merge, RamMerge) and merge.overlap is not None
        extra = {"overlap": self.overlap} if needs_overlap else {}
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + zlib.crc32(name.encode()))
            start = time.perf_counter()
            try:
                merged = merge.execute(tensors, **extra)
            except (ValueError, RuntimeError, TypeError) as error:
                raise MergeError(f"{method.name} cannot merge {name}: {error}") from error
            if merged.is_cuda:
                torch.cuda.synchronize(merged.device)
            seconds = time.perf_counter() - start
        return seconds, merged if dtype is None else merged.to(dtype_from_name(dtype))


def compare(
    recipe: Recipe, options: MergeOptions, methods: Sequence[str] = DEFAULT_METHODS
) -> Comparison:
    """Run every method on the models of a recipe and measure what is left of each agent.

    A method's value for a parameter is the recipe's, else a usual one where the method has no
    default of its own.

    Raises:
        MergeError: the recipe cannot be merged, by one of the methods at least.
    """
    for name in methods:
        require_method(name)
    prepared = plans.prepared(recipe, options)
    counted = plan_inspection(prepared, options, {})
    planned = tuple(_plan(prepared, options, name) for name in methods)
    overlap, counting_seconds = None, 0.0
    if "ramplus" in methods:
        counting = count(counted, sample_every=0, description="Counting overlap")
        counting_seconds = sum(inspected.seconds for inspected in counting)
        overlap = counted.record.overlap()
    seed = options.random_seed or 0
    found = list(_run(counted, planned, overlap, seed))
    agents = counted.record.agents
    epsilons = {merge.parameters["epsilon"] for merge in counted.merges}
    by_method = []
    for i, method in enumerate(planned):
        kept = _sum(found, i, agents)
        seconds = sum(compared.outcomes[i].seconds for compared in found)
        if method.name == "ramplus":
            seconds += counting_seconds
        by_method.append(_report(method, kept, agents, seconds))
    return Comparison(
        versions=versions(),
        base_model=counted.record.base_model,
        recipe=recipe.content,
        epsilon=(min(epsilons), max(epsilons)),
        seed=seed,
        total=sum(compared.total for compared in found),
        methods=by_method,
    )


def _run(
    counted: Any,
    planned: tuple[PlannedMethod, ...],
    overlap: GroupOverlap | None,
    seed: int,
) -> Iterator[Compared]:
    targets = [
        CompareTensor(counted=merge, methods=planned, overlap=overlap, seed=seed)
        for merge in counted.merges
    ]
    options = counted.options
    results = run(targets, options, quiet=True)
    for _, compared in progress(results, len(targets), "Comparing methods", quiet=options.quiet):
        if compared is not None:
            yield compared


def _plan(recipe: Recipe, options: MergeOptions, name: str) -> PlannedMethod:
    names = required_parameters(name)
    wanted = {n: _ASSUMED[n] for n in names if n in _ASSUMED}
    if name in _PRUNING:
        wanted["density"] = _PRUNED_DENSITY
    assumed = {n: value for n, value in wanted.items() if n not in recipe.parameters()}
    saves = plans.plan(recipe.by_method(name).with_defaults(wanted), options)
    return PlannedMethod(
        name=name,
        merges={save.tensor_name: _merge_of(save) for save in saves},
        dtypes={save.tensor_name: save.dtype for save in saves},
        assumed=assumed,
    )


def _merge_of(save: SaveTensor) -> ExecuteMergeMethodTask:
    """The merge of the models that the method takes: not of the base where that would be one among
    the others to it.

    Where slices have unlike sources, mergekit also leaves some out of what comes after the layers.
    """
    merge = save.tensor_task
    order = tuple(model for model in merge.model_order if model in merge.input_parameters)
    contract = merge_methods.get(merge.method_name).spec.contract
    if contract.base not in (BasePolicy.IGNORED, BasePolicy.FORBIDDEN):
        return merge.model_copy(update={"model_order": order})
    agents = tuple(model for model in order if model != merge.base_model)
    return merge.model_copy(update={"model_order": agents or order, "base_model": None})


def _sum(found: Sequence[Compared], method: int, agents: Sequence[ModelReference]) -> Retention:
    """One method's retention over all tensors; an agent absent from a tensor
    changed nothing there.
    """
    sums = dict.fromkeys(agents, AgentRetention())
    for compared in found:
        kept = compared.outcomes[method].retention
        for agent, its in zip(compared.agents, kept.agents):
            sums[agent] += its
    kept = [compared.outcomes[method].retention for compared in found]
    return Retention(
        agents=tuple(sums.values()),
        delta_square=sum(retention.delta_square for retention in kept),
        changed=sum(retention.changed for retention in kept),
    )


def _report(
    method: PlannedMethod,
    kept: Retention,
    agents: Sequence[ModelReference],
    seconds: float,
) -> MethodComparison:
    return MethodComparison(
        method=method.name,
        parameters=_parameters(method),
        assumed=dict(method.assumed),
        seconds=seconds,
        delta_norm=kept.delta_square**0.5,
        changed=kept.changed,
        agents=[
            AgentComparison(
                model=str(agent),
                changed=int(its.changed),
                unique=int(its.unique),
                unique_retention=its.unique_retention,
                shared_retention=its.shared_retention,
                cosine=its.cosine(kept.delta_square),
                sign_agreement=its.sign_agreement,
                norm_ratio=its.norm_ratio(kept.delta_square),
            )
            for agent, its in zip(agents, kept.agents)
        ],
    )


def _parameters(method: PlannedMethod) -> dict[str, Any]:
    """A value for each parameter; by model where models differ, [lowest,
    highest] where tensors do.
    """
    merges = method.merges.values()
    values: dict[str, Any] = {}
    for name in parameter_names(method.name, by_model=False):
        values[name] = _summary({merge.parameters[name] for merge in merges})
    for name in parameter_names(method.name, by_model=True):
        by_model: dict[str, set] = {}
        for merge in merges:
            for model in merge.model_order:
                if name in merge.input_parameters[model]:
                    value = merge.input_parameters[model][name]
                    by_model.setdefault(str(model), set()).add(value)
        summaries = {model: _summary(found) for model, found in by_model.items()}
        different = len({str(summary) for summary in summaries.values()}) > 1
        values[name] = summaries if different else next(iter(summaries.values()), None)
    return values


def _summary(values: set) -> Any:
    if len(values) == 1:
        return next(iter(values))
    ordered = sorted(values, key=lambda value: (str(type(value)), value))
    return [ordered[0], ordered[-1]]
