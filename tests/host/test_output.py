"""The output directory: one merge at a time, and only where a model can go."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import platform
import signal
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from mergekit.scripts import run_yaml

from mergekit_ram import cli
from mergekit_ram.errors import WriteError
from mergekit_ram.host import output
from support import checkpoints
from support.outputs import AFTER, NEW, OLD, fail_from, leftovers, merge, read, write

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
