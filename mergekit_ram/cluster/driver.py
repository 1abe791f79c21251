"""Merging on a Ray cluster: workers merge parts of the model into shards, the driver the rest.

What is finished lies in a hidden directory beside the output until the model is whole, see
``directory``. Ray is imported once a merge needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Optional, TypeVar

import torch
import tqdm
from mergekit.graph import Task
from mergekit.io.tasks import FinalizeModel, SaveTensor
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from mergekit.tokenizer import BuildTokenizer, TokenizerInfo
from pydantic import ConfigDict

from mergekit_ram.cluster import shards
from mergekit_ram.cluster.directory import remove_own, require_own
from mergekit_ram.cluster.job import Job, Part
from mergekit_ram.cluster.manifests import Counted
from mergekit_ram.errors import MergeError
from mergekit_ram.host import tasks
from mergekit_ram.method.overlap import GroupOverlap
from mergekit_ram.report.record import MergeRecord

LOG = logging.getLogger(__name__)

# So many parts a worker that all finish together, and so few that shards stay large.
_PARTS_PER_WORKER = 4
# For plans and counts; weights never go through Ray.
_OBJECT_STORE_BYTES = 256 << 20

T = TypeVar("T")


class ClusterOptions(MergeOptions, frozen=True):
    """mergekit's options of a merge that runs on a Ray cluster.

    Attributes:
        ray_address: as ``ray.init`` takes it, ``local`` for a cluster of this machine alone. None
            takes the cluster that ``RAY_ADDRESS`` names or that runs on this machine, else
            ``local``.
        job_directory: where finished parts lie until the model is whole; all machines share it.
    """

    ray_address: Optional[str] = None
    job_directory: str

    @classmethod
    def beside(
        cls, out_path: str, options: MergeOptions, ray_address: str | None
    ) -> ClusterOptions:
        """Keep finished parts hidden beside the output, so on the same storage."""
        parent, name = os.path.split(os.path.abspath(out_path))
        directory = os.path.join(parent, f".{name}.mergekit-ram-parts")
        return cls(**dict(options), ray_address=ray_address, job_directory=directory)


def of_merge(options: MergeOptions) -> MergeOptions:
    """mergekit's own among the options, which are all of a merge that runs on no cluster."""
    names = MergeOptions.model_fields
    return MergeOptions(**{name: getattr(options, name) for name in names})


class MergeOnCluster(FinalizeModel):
    """Finalizes a model whose tensors the workers of a cluster merge and write."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    saves: tuple[SaveTensor, ...]
    tokenizer_task: Optional[BuildTokenizer]
    model_wide: bool
    record: MergeRecord
    options: ClusterOptions

    # Graphs hash their tasks often, and this one holds a whole plan.
    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> bool:
        return self is other

    def arguments(self) -> dict[str, Task]:
        arguments: dict[str, Task] = {"writer": self.writer_task}
        if self.tokenizer_task is not None:
            arguments["tokenizer"] = self.tokenizer_task
        return arguments

    def execute(self, writer: TensorWriter, tokenizer: Optional[TokenizerInfo] = None) -> None:
        options, record = self.options, self.record
        with _connected(options) as cluster:
            job = Job.of(
                self.saves,
                record,
                of_merge(options),
                tokenizer,
                options.job_directory,
            )
            parts = job.parts(
                self.saves,
                record.recipe.get("dtype"),
                _PARTS_PER_WORKER * cluster.workers,
            )
            shared_job = cluster.share(job)
            overlap = None
            if self.model_wide:
                counted = cluster.map(
                    shards.count_part, parts, shared_job, label="Measuring overlap"
                )
                overlap = self._add_up(counted)
            written = cluster.map(shards.write_part, parts, shared_job, overlap, label="Merging")
        for found in (found for shard in written for found in shard.overlaps):
            record.add(found.tensor, *found.named(record.agents))
        for tensor, count in (o for shard in written for o in shard.overflows.items()):
            record.add_overflow(tensor, count)
        shards.hand_over(written, options.job_directory, writer)
        writer.finalize()

    def _add_up(self, counted: Sequence[Counted]) -> GroupOverlap:
        """Overlap over the whole model, noted in the record with the λ that follow."""
        merges = {s.tensor_name: s.tensor_task for s in self.saves}
        return tasks.record_measured(
            self.record,
            [
                (merges[found.tensor], found.named(self.record.agents)[0])
                for part in counted
                for found in part.overlaps
            ],
        )


def distributed(
    targets: Sequence[Task],
    record: MergeRecord,
    options: ClusterOptions,
    *,
    model_wide: bool,
) -> list[Task]:
    """The targets of a plan to disk, with merging and writing left to a cluster.

    Args:
        model_wide: count everything first, for a ratio over the whole model.
    """
    (finalize,) = (task for task in targets if isinstance(task, FinalizeModel))
    tokenizers = [task for task in targets if isinstance(task, BuildTokenizer)]
    merge = MergeOnCluster(
        tensor_save_tasks=(),
        writer_task=finalize.writer_task,
        saves=finalize.tensor_save_tasks,
        tokenizer_task=next(iter(tokenizers), None),
        model_wide=model_wide,
        record=record,
        options=options,
    )
    return [merge, *tokenizers]


@contextlib.contextmanager
def finished_parts_kept(options: MergeOptions) -> Iterator[None]:
    """Drop a cluster's finished parts once the block ends; after an error say where they are."""
    if not isinstance(options, ClusterOptions):
        yield
        return
    require_own(options.job_directory)
    try:
        yield
    except BaseException:
        if os.path.isdir(options.job_directory):
            LOG.warning(
                "Finished parts stay in %s: the same command "
                "takes them up. Delete them if you do not go on",
                options.job_directory,
            )
        raise
    remove_own(options.job_directory)


class _Cluster:
    """A Ray cluster that this process is connected to."""

    def __init__(self, ray: ModuleType, options: ClusterOptions):
        self._ray = ray
        self._options = options
        self._cores = options.num_threads or 1
        self._gpus = int(torch.device(options.device).type == "cuda")
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._memory = int(max(node.get("memory", 0) for node in nodes))
        self.workers = max(1, sum(self._workers_on(node) for node in nodes))

    def _workers_on(self, node: Mapping[str, float]) -> int:
        """How many parts a node can do at a time."""
        by_cores = node.get("CPU", 0) // self._cores
        return int(min(by_cores, node.get("GPU", 0)) if self._gpus else by_cores)

    def share(self, value: Any) -> Any:
        """Send a value to the cluster once, for the functions that take it."""
        return self._ray.put(value)

    def map(
        self,
        function: Callable[..., T],
        parts: Sequence[Part],
        job: Any,
        *arguments: Any,
        label: str,
    ) -> list[T]:
        """Results of a function of job and part, called for every part on some worker.

        A part is done again if its worker dies.

        Raises:
            MergeError: what a worker refused, or that workers died again and again.
        """
        remote = self._ray.remote(function)
        pending = {}
        for part in parts:
            placed = remote.options(
                name=f"{function.__name__} {part.name}",
                num_cpus=self._cores,
                num_gpus=self._gpus,
                # What exceeds every machine would wait for ever.
                memory=min(part.memory_bytes, self._memory),
            )
            pending[placed.remote(job, part, *arguments)] = part.name
        results = {}
        with tqdm.tqdm(total=len(parts), desc=label, disable=self._options.quiet) as progress:
            while pending:
                (done,), _ = self._ray.wait(list(pending))
                results[pending.pop(done)] = self._result(done)
                progress.update()
        return [results[part.name] for part in parts]

    def _result(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise MergeError(f"Ray gave up on a part of the merge: {error}") from None


@contextlib.contextmanager
def _connected(options: ClusterOptions) -> Iterator[_Cluster]:
    """Connect to a cluster for the block, unless this process is connected to one."""
    try:
        import ray  # late: an optional extra, and seconds of start-up
    except ImportError:
        raise MergeError("--ray needs Ray: pip install 'mergekit-ram[ray]'") from None
    if ray.is_initialized():
        yield _Cluster(ray, options)
        return
    try:
        _connect(ray, options.ray_address)
        yield _Cluster(ray, options)
    finally:
        ray.shutdown()


def _connect(ray: ModuleType, address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS")
    if address != "local":
        try:
            ray.init(address or "auto", logging_level=logging.WARNING)
            return
        except ConnectionError as error:
            if address:
                raise MergeError(f"no Ray cluster at {address}: {error}") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        "local",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
    )
