"""Merges that are killed leave no half a model, and can be run again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import safetensors.torch
import transformers

from mergekit_ram.method import stream as kernel
from mergekit_ram.report.record import Report
from support import checkpoints
from support.expected import STRONG, check, expect, plan
from support.jobs import ENTRIES, Job, contents, in_child


def killing(owner, name: str, call: int, *, after: bool = False):
    """Replace a function by one that kills its process before, or after, that call of it."""
    function = getattr(owner, name)
    calls = 0

    def replacement(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, replacement)


def half_written(call: int):
    """Kill in the middle of writing a shard."""
    calls = 0

    def save_file(tensors, filename, metadata=None):
        nonlocal calls
        calls += 1
        content = safetensors.torch.save(tensors, metadata)
        if calls == call:
            Path(filename).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        Path(filename).write_bytes(content)

    safetensors.torch.save_file = save_file


# Of the steps that count, so that mergekit-multi's first merge is through.
MOMENTS = {
    "counting, first tensor": lambda n: killing(kernel._Stream, "count", n + 1),
    "counting, a tensor": lambda n: killing(kernel._Stream, "count", n + 9),
    "merging, first tensor": lambda n: killing(kernel._Stream, "merge", n + 1),
    "merging, a tensor": lambda n: killing(kernel._Stream, "merge", n + 9),
    "writing": lambda n: half_written(1 + (n > 0)),
    "report": lambda n: killing(Report, "write", 1 + (n > 0)),
    "after the report": lambda n: killing(Report, "write", 1 + (n > 0), after=True),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_killed_merge_leaves_no_model_and_can_be_run_again(entry, moment, make_models, tmp_path):
    models = make_models()
    job = Job(entry, models, tmp_path)

    def run_killed():
        MOMENTS[moment](len(models.base) if entry == "multi" else 0)
        job.run()

    assert in_child(run_killed) == -signal.SIGKILL
    assert not job.out.exists()
    if entry == "multi":
        first = checkpoints.read(job.first)
        written = (job.first / "model.safetensors").stat().st_mtime_ns
    result = job.run()
    assert result.exit_code == 0, result.output
    job.assert_finished()
    if entry == "multi":
        assert (job.first / "model.safetensors").stat().st_mtime_ns == written
        planned = plan(models.base, [first, models.agents[2]], STRONG)
        check(checkpoints.read(job.out), expect("ramplus", planned))


LATE = {
    "second shard": lambda: half_written(2),
    "naming shards": lambda: killing(os, "rename", 2),
    "before the config": lambda: killing(transformers.Qwen2Config, "save_pretrained", 1),
    "after the config": lambda: killing(transformers.Qwen2Config, "save_pretrained", 1, after=True),
    "publishing": lambda: killing(os, "rename", 10**6) or killing(os, "replace", 2),
}


@pytest.mark.parametrize("moment", LATE)
def test_merge_killed_late_leaves_no_model(moment, make_models, tmp_path):
    job = Job("yaml", make_models(), tmp_path)

    def run_killed():
        LATE[moment]()
        job.run("--out-shard-size", "4K")

    assert in_child(run_killed) == -signal.SIGKILL
    assert not job.out.exists()
    assert job.run("--out-shard-size", "4K").exit_code == 0
    job.assert_finished()


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["yaml", "pytorch"])
def test_merge_over_a_model_killed_anywhere_leaves_the_old_one_the_new_one_or_none(
    entry, make_models, tmp_path
):
    models = make_models()
    job = Job(entry, models, tmp_path)
    sharded = ("--out-shard-size", "4K")
    assert job.run(*sharded).exit_code == 0
    (job.out / "notes.txt").write_text("mine")
    old = contents(job.out)
    seen = set()
    # The report is put in place first; what follows is the move to the output.
    for name, call in [("replace", n) for n in range(1, 8)] + [
        ("unlink", n) for n in range(1, 12, 2)
    ]:

        def run_killed(name=name, call=call):
            killing(os, name, call)
            job.run()

        code = in_child(run_killed)
        if code == 0:
            continue
        assert code == -signal.SIGKILL
        if contents(job.out) == old:
            seen.add("old")
        else:
            assert not job.weights_of_finished() or finished(job, old)
            seen.add("none")
        assert (job.out / "notes.txt").read_text() == "mine"
        assert job.run(*sharded).exit_code == 0
        job.assert_finished()
    assert seen == {"old", "none"}


def finished(job: Job, old: dict[str, bytes]) -> bool:
    """Whether the weights of the output are the old model's, or the new one's, all of them."""
    weights = checkpoints.read(job.out)
    return weights.keys() >= job.expected.keys()


@pytest.mark.parametrize("first", [(), ("--out-shard-size", "4K")], ids=["one", "many"])
@pytest.mark.parametrize("second", [(), ("--out-shard-size", "4K")], ids=["one", "many"])
@pytest.mark.parametrize(
    "serialization", [(), ("--no-safe-serialization",)], ids=["safe", "pickle"]
)
def test_model_over_another_leaves_none_of_its_weights(
    first, second, serialization, make_models, tmp_path
):
    models = make_models()
    (tmp_path / "other").mkdir()
    other = Job("yaml", make_models("qwen2", tied=False), tmp_path / "other")
    job = Job("yaml", models, tmp_path)
    other.arguments[-1] = job.out
    assert other.run(*first).exit_code == 0
    (job.out / "notes.txt").write_text("mine")
    result = job.run(*second, *serialization)
    assert result.exit_code == 0, result.output
    job.assert_finished()
    assert (job.out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("entry", ENTRIES)
def test_output_may_be_a_link_or_relative(entry, make_models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "elsewhere" / "model"
    place.mkdir(parents=True)
    job = Job(entry, make_models(), tmp_path)
    job.out.symlink_to(place)
    job.arguments[-1] = "merged"
    assert job.run().exit_code == 0
    assert job.out.is_symlink()
    assert (place / "model.safetensors").exists()
    job.assert_finished()
