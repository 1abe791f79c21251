"""A part of a merge, done by any process: its tensors are counted, or merged into a shard.

Everything finished has a manifest of what it was made from, so that whoever does a part again,
after a worker or the whole merge was killed, finds what is done. Shards are checked by their
SHA-256 before they are taken over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from mergekit.common import ModelReference
from mergekit.graph import Executor, Task, TaskUniverse
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import FinalizeModel, LoaderCache, SaveTensor, TensorWriterTask
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from mergekit.tokenizer import BuildTokenizer, TokenizerInfo
from pydantic import BaseModel, ValidationError

from mergekit_ram.check.tensors import PlannedCheckpoints, output_bytes
from mergekit_ram.errors import MergeError
from mergekit_ram.host import loading, tasks
from mergekit_ram.host.checkpoint import some
from mergekit_ram.method.overlap import GroupOverlap, OverlapCounts, Rescaling
from mergekit_ram.report.record import MergeRecord, versions

_HASHED_AT_ONCE = 1 << 24
# Names that a merge gives in its job directory: the partition, manifests, shards, and what a killed
# process left of them.
_OWN = re.compile(
    r"partition\.json|\d{5}\.(counted|written)\.json|\d{5}\.(pytorch_)?model\.(safetensors|bin)"
    r"|(partition|\d{5})\..*\.partial"
)
# Options that do not change a bit of a shard.
_IRRELEVANT = {
    "quiet",
    "verbosity",
    "num_threads",
    "async_write",
    "write_threads",
    "copy_tokenizer",
    "write_model_card",
}


class TensorOverlap(BaseModel):
    """What one tensor turned out to be. Agents are their places among the recipe's."""

    tensor: str
    agents: list[int]
    counts: OverlapCounts
    rescaling: dict[int, float] = {}

    @classmethod
    def of(
        cls,
        tensor: str,
        overlap: GroupOverlap,
        rescaling: Rescaling,
        agents: Sequence[ModelReference],
    ) -> TensorOverlap:
        place = {agent: i for i, agent in enumerate(agents)}
        return cls(
            tensor=tensor,
            agents=[place[agent] for agent in overlap.agents],
            counts=overlap.counts,
            rescaling={place[agent]: factor for agent, factor in rescaling.items()},
        )

    def named(
        self, agents: Sequence[ModelReference]
    ) -> tuple[GroupOverlap, dict[ModelReference, float]]:
        """The overlap and λ by the agents themselves."""
        overlap = GroupOverlap(tuple(agents[i] for i in self.agents), self.counts)
        return overlap, {agents[i]: factor for i, factor in self.rescaling.items()}


class Manifest(BaseModel):
    """What was finished.

    Attributes:
        fingerprint: of everything it depends on.
    """

    fingerprint: str

    def sound(self, directory: str) -> bool:
        """Whether what it describes is still as it was finished."""
        return True


class Partition(Manifest):
    """The tensors of every part. Kept, since a rerun may meet another number of workers."""

    parts: list[list[str]]


class Counted(Manifest):
    """The overlap in a part's tensors."""

    overlaps: list[TensorOverlap]


class Shard(Manifest):
    """A part that was merged and written.

    Attributes:
        file: where, in the job's directory; None if the model has none of the part's tensors, all
            optional.
        tensor_bytes: of the tensors alone.
        overlaps: where merging found them out.
        overflows: by tensor, elements that are not finite though all inputs are.
    """

    file: str | None
    sha256: str
    tensors: list[str]
    tensor_bytes: int
    overlaps: list[TensorOverlap]
    overflows: dict[str, int] = {}

    def sound(self, directory: str) -> bool:
        if self.file is None:
            return True
        path = os.path.join(directory, self.file)
        return os.path.exists(path) and _sha256(path) == self.sha256


FinishedT = TypeVar("FinishedT", bound=Manifest)


@dataclass(frozen=True)
class Part:
    """Output tensors that are merged into one shard.

    Attributes:
        memory_bytes: of its output and of the largest tensor's inputs, which are held together.
    """

    name: str
    saves: tuple[SaveTensor, ...]
    memory_bytes: int


@dataclass(frozen=True)
class Job:
    """What all parts of a merge have in common. Sent to every worker.

    Attributes:
        directory: where finished parts lie.
        indexes: the files of every model, as they were found where the merge was planned.
        working_directory: what the recipe's relative paths start from.
    """

    directory: str
    fingerprint: str
    agents: tuple[ModelReference, ...]
    indexes: Mapping[ModelReference, ShardedTensorIndex]
    options: MergeOptions
    tokenizer: TokenizerInfo | None
    versions: Mapping[str, str]
    working_directory: str

    @classmethod
    def of(
        cls,
        saves: Sequence[SaveTensor],
        record: MergeRecord,
        options: MergeOptions,
        tokenizer: TokenizerInfo | None,
        directory: str,
    ) -> Job:
        """The job of merging what is saved.

        Its directory is made, or found with an earlier try's parts.
        """
        models = {model for save in saves for model in save.tensor_task.model_order}
        indexes = {model: _index(model) for model in models}
        job = cls(
            directory=directory,
            fingerprint=_fingerprint(record.recipe, options, indexes),
            agents=tuple(record.agents),
            indexes=indexes,
            options=options,
            tokenizer=tokenizer,
            versions=versions(),
            working_directory=os.getcwd(),
        )
        os.makedirs(directory, exist_ok=True)
        return job

    def parts(self, saves: Sequence[SaveTensor], dtype: str | None, number: int) -> list[Part]:
        """An earlier try's parts, or about so many of about equal bytes.

        None is beyond mergekit's shard size.

        Args:
            dtype: of the recipe.
        """
        checkpoints = PlannedCheckpoints(lazy_unpickle=self.options.lazy_unpickle)
        save_of = {save.tensor_name: save for save in saves}
        # Pickles do not tell: their tensors count as equal.
        size_of = {
            name: output_bytes(save.tensor_task, save.dtype or dtype, checkpoints) or 1
            for name, save in save_of.items()
        }
        partition = self.finished("partition.json", Partition)
        if partition is None:
            remove_own(self.directory)
            os.makedirs(self.directory, exist_ok=True)
            limit = -(-sum(size_of.values()) // number)
            if self.options.out_shard_size > 0:
                limit = min(limit, self.options.out_shard_size)
            names = cut(size_of.items(), limit)
            partition = Partition(fingerprint=self.fingerprint, parts=names)
            self.finish("partition.json", partition)
        parts = []
        for i, names in enumerate(partition.parts):
            members = tuple(save_of[name] for name in names)
            inputs = max(
                size_of[save.tensor_name] * len(save.tensor_task.model_order) for save in members
            )
            output = sum(size_of[name] for name in names)
            parts.append(Part(f"{i + 1:05d}", members, inputs + output))
        return parts

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def finished(self, name: str, kind: type[FinishedT]) -> FinishedT | None:
        """What an earlier try finished under that name, if it is of this job and sound."""
        try:
            with open(self.path(name), encoding="utf-8") as file:
                manifest = kind.model_validate_json(file.read())
        except (FileNotFoundError, ValidationError):
            return None
        if manifest.fingerprint != self.fingerprint:
            return None
        return manifest if manifest.sound(self.directory) else None

    def finish(self, name: str, manifest: Manifest) -> None:
        """Write a manifest, whole or not at all."""
        partial = self.path(f"{name}.{platform.node()}.{os.getpid()}.partial")
        with open(partial, "w", encoding="utf-8") as file:
            file.write(manifest.model_dump_json())
        os.replace(partial, self.path(name))

    def enter(self) -> None:
        """Make this process one that can do the job's parts.

        Raises:
            MergeError: files or software here are not what they are where the merge was planned.
        """
        if versions() != self.versions:
            raise MergeError(
                f"{platform.node()} runs {_listed(versions())}, the merge "
                f"{_listed(self.versions)}: install the same versions on all machines"
            )
        places = [index.base_path for index in self.indexes.values()]
        for place in (self.directory, *places):
            if not os.path.isdir(place):
                raise MergeError(
                    f"{platform.node()} has no {place}: models and "
                    "output must lie on storage that all machines share"
                )
        if os.path.isdir(self.working_directory):
            os.chdir(self.working_directory)
        torch.set_num_threads(self.options.num_threads or 1)
        cache = LoaderCache()
        cache.setup(self.options)
        for model, index in self.indexes.items():
            cache.loaders[model] = LazyTensorLoader(index, self.options.lazy_unpickle)


def count_part(job: Job, part: Part) -> Counted:
    """Count the overlap of the agents in a part's tensors."""
    job.enter()
    loading.stream(save.tensor_task for save in part.saves)
    name = f"{part.name}.counted.json"
    counted = job.finished(name, Counted)
    if counted is None:
        counting = [tasks.CountTensor(merge=save.tensor_task) for save in part.saves]
        overlaps = [
            TensorOverlap.of(task.merge.output_weight.name, overlap, {}, job.agents)
            for task, overlap in _execute(counting, job)
            if overlap is not None
        ]
        counted = Counted(fingerprint=job.fingerprint, overlaps=overlaps)
        job.finish(name, counted)
    return counted


def write_part(job: Job, part: Part, overlap: GroupOverlap | None) -> Shard:
    """Merge a part's tensors and write them as one file.

    Args:
        overlap: over the whole model, where its ratio rescales.
    """
    job.enter()
    loading.stream(save.tensor_task for save in part.saves)
    name = f"{part.name}.written.json"
    shard = job.finished(name, Shard)
    if shard is None:
        prefix = f"{part.name}.{platform.node()}.{os.getpid()}."
        with tempfile.TemporaryDirectory(
            prefix=prefix, suffix=".partial", dir=job.directory
        ) as scratch:
            shard = _write(job, part, overlap, scratch)
        job.finish(name, shard)
    return shard


def _write(job: Job, part: Part, overlap: GroupOverlap | None, scratch: str) -> Shard:
    known = None if overlap is None else tasks.KnownOverlap(overlap=overlap)
    record = MergeRecord(method="", base_model=None, recipe={}, agents=job.agents)
    record.reported = True
    writer_task = TensorWriterTask(
        out_path=scratch,
        max_shard_size=-1,
        safe_serialization=job.options.safe_serialization,
    )
    merges = tasks.recorded_merges([save.tensor_task for save in part.saves], record, known)
    saves = tuple(
        save.model_copy(update={"tensor_task": merge, "writer_task": writer_task})
        for save, merge in zip(part.saves, merges)
    )
    finalize = FinalizeModel(tensor_save_tasks=saves, writer_task=writer_task)
    results = [value for _, value in _execute([writer_task, finalize], job)]
    (writer,) = (value for value in results if isinstance(value, TensorWriter))
    file, sha256 = None, ""
    if writer.weight_map:
        (written,) = os.listdir(scratch)
        file, sha256 = f"{part.name}.{written}", _sha256(os.path.join(scratch, written))
        os.replace(os.path.join(scratch, written), job.path(file))
    return Shard(
        fingerprint=job.fingerprint,
        file=file,
        sha256=sha256,
        tensors=list(writer.weight_map),
        tensor_bytes=writer.total_size,
        overlaps=[
            TensorOverlap.of(tensor, overlap, rescaling, job.agents)
            for tensor, (overlap, rescaling) in record.tensors().items()
        ],
        overflows=record.overflows,
    )


def _execute(targets: Sequence[Task], job: Job) -> Iterator[tuple[Task, Any]]:
    """Run a graph as mergekit does, its tokenizer the one that the job brought."""
    options = job.options
    universe = TaskUniverse(targets)
    tokenizers = [task for task in universe.tasks if isinstance(task, BuildTokenizer)]
    executor = Executor(
        [universe.get_handle(target) for target in targets],
        math_device=options.device,
        storage_device=options.device if options.low_cpu_memory else "cpu",
        cached_values={universe.get_handle(task): job.tokenizer for task in tokenizers},
    )
    yield from executor.run(quiet=True)


def hand_over(shards: Iterable[Shard], directory: str, writer: TensorWriter) -> None:
    """Put shards where mergekit's writer keeps those it wrote itself, for it to name and to index.

    Args:
        directory: the job's. Shards stay there too where the file system has links.
    """
    for shard in shards:
        if shard.file is None:
            continue
        writer.shards_written += 1
        _, stem, extension = shard.file.split(".")
        name = f"{stem}-{writer.shards_written}.{extension}"
        source = os.path.join(directory, shard.file)
        target = os.path.join(writer.out_path, name)
        try:
            os.link(source, target)
        except OSError:
            os.replace(source, target)
        writer.weight_map.update(dict.fromkeys(shard.tensors, name))
        writer.total_size += shard.tensor_bytes


def require_own(directory: str) -> None:
    """Refuse a directory that holds anything else than what merges leave in one.

    Raises:
        MergeError: names some of it.
    """
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise MergeError(f"the job directory {directory} is no directory: name another")
    others = [name for name in _names(directory) if not _OWN.fullmatch(name)]
    if others:
        raise MergeError(
            f"the job directory {directory} holds {some(others)}, "
            "which no merge wrote: name an empty or a new one"
        )


def remove_own(directory: str) -> None:
    """Remove what a merge left in a job directory, and the directory if nothing else is in it."""
    for name in filter(_OWN.fullmatch, _names(directory)):
        path = os.path.join(directory, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    with contextlib.suppress(OSError):  # not empty, or not there
        os.rmdir(directory)


def _names(directory: str) -> list[str]:
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def cut(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Cut named sizes, in order, into runs of at most ``limit`` bytes; a larger one is alone."""
    parts: list[list[str]] = []
    filled = 0
    for name, size in sizes:
        if not parts or filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    return parts


def _index(model: ModelReference) -> ShardedTensorIndex:
    """Where the files of a model lie; a recipe of ``mergekit-pytorch`` names a file itself."""
    path = model.model.path
    if os.path.isfile(path):
        return ShardedTensorIndex(os.path.dirname(os.path.abspath(path)), False, {}, [])
    return _absolute(LoaderCache().get(model).index)


def _absolute(index: ShardedTensorIndex) -> ShardedTensorIndex:
    return ShardedTensorIndex(
        os.path.abspath(index.base_path),
        index.is_safetensors,
        index.tensor_paths,
        index.shards,
    )


def _fingerprint(
    recipe: Mapping[str, Any],
    options: MergeOptions,
    indexes: Mapping[ModelReference, ShardedTensorIndex],
) -> str:
    """Of recipe, options and versions, and of every input file's size and time of change."""
    made_from = {
        "versions": versions(),
        "recipe": recipe,
        "options": options.model_dump(exclude=_IRRELEVANT),
        "files": {str(model): sorted(_files(index.base_path)) for model, index in indexes.items()},
    }
    text = json.dumps(made_from, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _files(directory: str) -> Iterator[tuple[str, int, int]]:
    for entry in os.scandir(directory):
        if entry.is_file():
            yield entry.name, entry.stat().st_size, entry.stat().st_mtime_ns


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_HASHED_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in found.items())
