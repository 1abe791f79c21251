"""What every process of a merge has to know: its parts, models, options and directory."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.options import MergeOptions
from mergekit.tokenizer import TokenizerInfo
from pydantic import ValidationError

from mergekit_ram.check.tensors import PlannedCheckpoints, output_bytes
from mergekit_ram.cluster.directory import remove_own
from mergekit_ram.cluster.manifests import Manifest, Partition
from mergekit_ram.errors import MergeError
from mergekit_ram.report.record import MergeRecord, versions

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


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in found.items())
