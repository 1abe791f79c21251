"""Job directories of ``--ray``: of its own files only."""

from __future__ import annotations

from pathlib import Path

import pytest
from mergekit.options import MergeOptions

from mergekit_ram.cluster import driver as cluster
from mergekit_ram.cluster.directory import require_own
from mergekit_ram.errors import MergeError
from support.outputs import read, write

OWN = (
    "partition.json",
    "00001.counted.json",
    "00001.written.json",
    "00001.model.safetensors",
    "00002.pytorch_model.bin",
    "partition.json.host.12.partial",
    "00003.written.json.host.12.partial",
)


def options(directory: Path) -> cluster.ClusterOptions:
    return cluster.ClusterOptions(**dict(MergeOptions()), job_directory=str(directory))


def test_own_job_directory_is_removed(tmp_path):
    job = tmp_path / "job"
    write(job, dict.fromkeys(OWN, ""))
    write(job / "00003.host.12.xyz.partial", {"model-1.safetensors": ""})
    with cluster.finished_parts_kept(options(job)):
        pass
    assert not job.exists()


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "parts", ".hidden"])
def test_job_directory_with_other_files_is_refused(name, tmp_path):
    job = tmp_path / "job"
    write(job, {name: "mine", "partition.json": "{}"})
    with (
        pytest.raises(MergeError, match=name),
        cluster.finished_parts_kept(options(job)),
    ):
        raise AssertionError("it was used")
    assert read(job) == {name: "mine", "partition.json": "{}"}


def test_what_others_write_into_the_job_directory_meanwhile_stays(tmp_path):
    job = tmp_path / "job"
    write(job, dict.fromkeys(OWN, ""))
    with cluster.finished_parts_kept(options(job)):
        write(job, {"notes.txt": "mine"})
        write(job / "sub", {"model.safetensors": "mine"})
    assert read(job) == {"notes.txt": "mine", "sub/model.safetensors": "mine"}


def test_job_directory_that_is_a_file_is_refused(tmp_path):
    job = tmp_path / "job"
    job.write_text("mine")
    with pytest.raises(MergeError, match="no directory"):
        require_own(str(job))
    assert job.read_text() == "mine"
