"""A part of a merge, done by any process: its tensors are counted, or merged into a shard."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mergekit.graph import Executor, Task, TaskUniverse
from mergekit.io.tasks import FinalizeModel, TensorWriterTask
from mergekit.io.tensor_writer import TensorWriter
from mergekit.tokenizer import BuildTokenizer

from mergekit_ram.cluster.job import Job, Part
from mergekit_ram.cluster.manifests import Counted, Shard, TensorOverlap, sha256_of
from mergekit_ram.host import loading, tasks
from mergekit_ram.method.overlap import GroupOverlap
from mergekit_ram.report.record import MergeRecord


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
        file, sha256 = f"{part.name}.{written}", sha256_of(os.path.join(scratch, written))
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
