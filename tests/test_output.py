"""The output directory: the old model whole or the new one whole, one merge at a time, nothing of
others touched.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import platform
import signal
from pathlib import Path

import checkpoints
import pytest
import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.scripts import run_yaml

from mergekit_ram import cli
from mergekit_ram.cluster import driver as cluster
from mergekit_ram.cluster.directory import require_own
from mergekit_ram.errors import MergeError, WriteError
from mergekit_ram.host import output

OLD = {
    "config.json": "old",
    "model.safetensors.index.json": "old",
    "model-00001-of-00002.safetensors": "old 1",
    "model-00002-of-00002.safetensors": "old 2",
    "README.md": "old",
    "notes.txt": "mine",
}
NEW = {
    "config.json": "new",
    "model.safetensors": "new",
    "README.md": "new",
    "ram_report.json": "new",
}
AFTER = {**NEW, "notes.txt": "mine"}


def write(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(content)


def read(directory: Path) -> dict[str, str]:
    """Files by their path in the directory."""
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def merge(out: Path, files: dict[str, str] = NEW) -> None:
    with output.staged_output(str(out)) as staging:
        write(Path(staging), files)


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if "mergekit-ram" in path.name]


@pytest.fixture(autouse=True)
def forget_loaders():
    yield
    LoaderCache().loaders.clear()


# --- Publishing -----------------------------------------------------------------------------------


def fail_at(monkeypatch, name: str, call: int, number: int) -> list[int]:
    """Have a function of ``os`` fail at one call; the number of calls so far."""
    function, calls = getattr(os, name), []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise OSError(number, os.strerror(number))
        return function(*arguments, **options)

    monkeypatch.setattr(os, name, failing)
    return calls


def fail_from(monkeypatch, name: str, call: int, number: int) -> None:
    """Have a function of ``os`` fail at one call and at all that follow."""
    function, calls = getattr(os, name), []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) >= call:
            raise OSError(number, os.strerror(number))
        return function(*arguments, **options)

    monkeypatch.setattr(os, name, failing)


# Five files go and four come.
@pytest.mark.parametrize("call", range(1, 10))
@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSPC, errno.EACCES])
def test_old_model_is_whole_whichever_move_fails(call, number, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)
    with monkeypatch.context() as patch:
        calls = fail_at(patch, "replace", call, number)
        with pytest.raises(WriteError) as refused:
            merge(out)
    assert len(calls) >= call
    kept = out / ".mergekit-ram-partial" / "out"
    assert str(kept) in str(refused.value)
    assert os.strerror(number) in str(refused.value)
    assert read(kept) == NEW
    assert {n: c for n, c in read(out).items() if not n.startswith(".")} == OLD
    merge(out)
    assert read(out) == AFTER
    assert not leftovers(tmp_path)


def test_every_move_is_covered(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)
    calls = fail_at(monkeypatch, "replace", 100, errno.EIO)
    merge(out)
    assert len(calls) == 9


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSPC, errno.EACCES])
def test_finished_model_stays_where_a_new_directory_cannot_be_made(number, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        fail_at(patch, "replace", 1, number)
        with pytest.raises(WriteError) as refused:
            merge(out)
    kept = tmp_path / ".out.mergekit-ram-partial" / "out"
    assert str(kept) in str(refused.value)
    assert read(kept) == NEW
    assert not out.exists()
    merge(out)
    assert read(out) == NEW
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("call", range(1, 10))
def test_next_merge_takes_back_the_moves_of_a_killed_one(call, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)

    def killed():
        replace, calls = os.replace, []

        def killing(*arguments):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*arguments)

        os.replace = killing
        merge(out)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(RuntimeError), output.staged_output(str(out)):
        raise RuntimeError("the next merge fails too")
    assert read(out) == OLD
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("call", range(2, 10))
def test_message_says_what_stands_where_no_move_can_be_taken_back(call, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)
    with monkeypatch.context() as patch:
        fail_from(patch, "replace", call, errno.EACCES)
        with pytest.raises(WriteError) as refused:
            merge(out)
        message = str(refused.value)
        assert "as it was" not in message
        partial = out / ".mergekit-ram-partial"
        for part in (partial / "out", partial / "replaced"):
            assert str(part) in message
        assert os.strerror(errno.EACCES) in message
        everything = read(out)
        with pytest.raises(WriteError, match="replaced"):
            merge(out)
        assert read(out) == everything
    with pytest.raises(RuntimeError), output.staged_output(str(out)):
        raise RuntimeError("the next merge fails too")
    assert read(out) == OLD
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("name", ["replace", "rmdir", "unlink"])
@pytest.mark.parametrize("call", range(1, 5))
def test_taking_back_can_be_killed_too(name, call, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)
    with monkeypatch.context() as patch:
        fail_from(patch, "replace", 8, errno.EACCES)
        with pytest.raises(WriteError):
            merge(out)

    def killed():
        function, calls = getattr(os, name), []

        def killing(*arguments, **options):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        setattr(os, name, killing)
        with output.staged_output(str(out)):
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(RuntimeError), output.staged_output(str(out)):
        raise RuntimeError("the next merge fails too")
    assert read(out) == OLD
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("name", NEW)
def test_users_directories_are_never_replaced(name, tmp_path):
    out = tmp_path / "out"
    old = {n: c for n, c in OLD.items() if n != name}
    write(out, old)
    write(out / name, {"mine.txt": "mine"})
    before = read(out)
    with pytest.raises(WriteError, match="is a directory") as refused:
        merge(out)
    kept = out / ".mergekit-ram-partial" / "out"
    assert str(out / name) in str(refused.value)
    assert str(kept) in str(refused.value)
    assert read(kept) == NEW
    after = read(out)
    assert {n: c for n, c in after.items() if not n.startswith(".")} == before


def test_links_are_replaced_and_not_followed(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    write(out, {"notes.txt": "mine"})
    write(elsewhere, {"model.safetensors": "theirs"})
    (out / "model.safetensors").symlink_to(elsewhere / "model.safetensors")
    merge(out)
    assert read(out) == AFTER
    assert read(elsewhere) == {"model.safetensors": "theirs"}


# --- One merge at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
def test_second_merge_says_who_holds_the_output(exists, tmp_path):
    out = tmp_path / "out"
    if exists:
        write(out, OLD)
    with output.staged_output(str(out)) as staging:
        write(Path(staging), NEW)
        with pytest.raises(WriteError) as refused:
            merge(out, {"config.json": "second"})
        for part in (str(out), f"process {os.getpid()}", platform.node(), "since"):
            assert part in str(refused.value)
    assert read(out) == (AFTER if exists else NEW)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("exists", [False, True])
def test_lock_of_a_killed_merge_does_not_block(exists, tmp_path):
    out = tmp_path / "out"
    if exists:
        write(out, OLD)

    def killed():
        with output.staged_output(str(out)) as staging:
            write(Path(staging), {"config.json": "half"})
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()
    assert leftovers(tmp_path)
    merge(out)
    assert read(out) == (AFTER if exists else NEW)
    assert not leftovers(tmp_path)


# --- Places that cannot be one --------------------------------------------------------------------

PLACES = {
    "a file": lambda out: out.write_text("mine"),
    "below a file": lambda out: out.parent.write_text("mine"),
    "a dangling link": lambda out: out.symlink_to("nowhere"),
    "a link to a file": lambda out: (
        (out.parent / "file").write_text("mine"),
        out.symlink_to("file"),
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    config, base = checkpoints.make_base("qwen2")
    models = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [
        checkpoints.save(directory / f"model{i}", config, weights)
        for i, weights in enumerate(models)
    ]
    file = directory / "recipe.yml"
    content = {
        "merge_method": "ram",
        "base_model": paths[0],
        "models": [{"model": path} for path in paths[1:]],
    }
    file.write_text(yaml.safe_dump(content))
    return str(file)


@pytest.mark.parametrize("command", [run_yaml.main, cli.check])
@pytest.mark.parametrize("place", PLACES)
def test_place_that_cannot_be_the_output_is_refused_while_planning(
    place, command, recipe, tmp_path
):
    out = tmp_path / "sub" / "out"
    if place != "below a file":
        out.parent.mkdir()
    PLACES[place](out)
    before = sorted(tmp_path.rglob("*"))
    arguments = [recipe, str(out)] if command is run_yaml.main else [recipe, "--out", str(out)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code in (1, 2), result.output
    assert str(out) in result.output.replace("\n", "")
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(WriteError, match="out"):
        merge(out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("name", ["mkdir", "open"])
def test_place_that_takes_no_files_is_named(name, number, exists, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if exists:
        write(out, OLD)
    with monkeypatch.context() as patch:
        fail_from(patch, name, 1, number)
        with pytest.raises(WriteError, match=str(out)) as refused:
            merge(out)
    assert os.strerror(number) in str(refused.value)
    assert read(out) == (OLD if exists else {})
    merge(out)
    assert read(out) == (AFTER if exists else NEW)


def test_link_to_a_directory_takes_the_model(recipe, tmp_path):
    (tmp_path / "place").mkdir()
    out = tmp_path / "out"
    out.symlink_to("place")
    result = CliRunner().invoke(run_yaml.main, [recipe, str(out)])
    assert result.exit_code == 0, result.output
    assert out.is_symlink()
    assert (tmp_path / "place" / "model.safetensors").exists()
    assert json.loads((out / "ram_report.json").read_text())["method"] == "ram"
    assert not leftovers(tmp_path)


# --- Job directories of --ray ---------------------------------------------------------------------

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
