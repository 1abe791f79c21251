"""Merges that are killed, run out of disk, or meet damaged weights: an error that says so, and no
half a model.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import checkpoints
import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import multimerge, run_yaml
from test_recipes import (  # noqa: F401 - the fixtures among them
    BF16,
    F32,
    METHODS,
    MULTI,
    Models,
    array,
    check,
    check_state_dict,
    expect,
    floating,
    forget_loaders,
    invoke,
    invoke_refused,
    make_models,
    merge,
    plan,
    raw_recipe,
    refusal,
    save_models,
    state_dicts,
    write_recipe,
)

from mergekit_ram.method import stream as kernel
from mergekit_ram.report.record import Report

ENTRIES = ("yaml", "multi", "pytorch")
STRONG = {"r": 1.0, "alpha": 10.0}


class Job:
    """One merge through an entry point: what is run, where the model goes, and what it has to be.

    mergekit-multi first merges a step that goes well, then the model in question.
    """

    def __init__(self, entry: str, models: Models, directory: Path, method="ramplus"):
        self.entry = entry
        self.out = directory / "merged"
        parameters = {} if method == "ram" else STRONG
        if entry == "pytorch":
            base, agents = state_dicts(models)
            recipe = raw_recipe(directory, base, agents, method, **parameters)
            self.command = raw_pytorch.main
            self.arguments = [write_recipe(recipe, directory), self.out]
            self.base = base
            self.expected = expect(method, plan(floating(base), agents, parameters))
            return
        recipe = models.recipe(method, parameters=parameters)
        self.expected = expect(method, plan(models.base, models.agents, parameters))
        if entry == "yaml":
            self.command = run_yaml.main
            self.arguments = [write_recipe(recipe, directory), self.out]
        else:
            content = MULTI.format(base=models.base_path, agents=models.agent_paths)
            file = directory / "multi.yml"
            file.write_text(content)
            steps = directory / "steps"
            self.command = multimerge.main
            self.arguments = [file, "-I", steps, "--out-path", self.out]
            self.first = steps / "halfway"
            self.expected = None

    def run(self, *options: str):
        arguments = [*map(str, self.arguments), *options]
        return CliRunner().invoke(self.command, arguments)

    def weights_of_finished(self) -> bool:
        """Whether the output passes for a model."""
        names = {path.name for path in self.out.iterdir()} if self.out.exists() else ()
        stems = ("model.safetensors", "pytorch_model.bin")
        weights = any(s in names or f"{s}.index.json" in names for s in stems)
        return weights and (self.entry == "pytorch" or "config.json" in names)

    def assert_finished(self) -> None:
        """The output is the whole model, and nothing is left over."""
        output = checkpoints.read(self.out)
        if self.entry == "pytorch":
            check_state_dict(output, self.expected, self.base)
        elif self.expected:
            check(output, self.expected)
        Report.model_validate_json((self.out / "ram_report.json").read_text())
        if self.entry != "pytorch":
            assert "### Reinforced" in (self.out / "README.md").read_text()
            transformers.AutoModelForCausalLM.from_pretrained(self.out)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        for directory in (self.out, *self.out.parents[:1], self.out.parent / "steps"):
            if directory.exists():
                assert [p for p in directory.iterdir() if "partial" in p.name] == []


def in_child(function: Callable[[], object], timeout: float = 120) -> int:
    """Run a function in a forked child; its exit code, minus the signal that killed it.

    Forked, for the import of mergekit takes longer than all these tests.
    """

    def target():
        torch.set_num_threads(1)
        function()

    child = multiprocessing.get_context("fork").Process(target=target)
    child.start()
    child.join(timeout)
    if child.is_alive():
        child.kill()
        pytest.fail("the child hangs")
    return child.exitcode


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


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


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


# --- Disk full ------------------------------------------------------------------------------------


def in_little_space(job: Job, limit: int, *options: str) -> tuple[int, str]:
    """Exit code and output of a merge whose files cannot grow over the limit, in bytes."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        result = job.run(*options)
        sender.send((result.exit_code, result.output, repr(result.exception)))

    assert in_child(run) == 0
    code, output, exception = receiver.recv()
    assert exception == "SystemExit(1)", exception
    return code, output


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "options",
    [(), ("--async-write",), ("--no-safe-serialization",), ("--out-shard-size", "8K")],
    ids=" ".join,
)
def test_full_disk_is_an_error_that_names_the_file(entry, options, make_models, tmp_path):
    models = make_models()
    job = Job(entry, models, tmp_path)
    code, output = in_little_space(job, 6000, *options)
    assert code == 1
    assert "Traceback" not in output
    at = job.first if entry == "multi" else job.out
    stem = "pytorch_model" if "safe-serialization" in str(options) else "model"
    assert f"{at}/{stem}-1." in output
    assert "cannot be written" in output
    assert not at.exists()
    job.assert_nothing_left()
    assert job.run(*options).exit_code == 0
    job.assert_finished()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("what", ["report", "config"])
def test_disk_full_at_the_end_is_an_error_too(what, number, make_models, tmp_path, monkeypatch):
    job = Job("yaml", make_models(), tmp_path)
    owner, name = {
        "report": (Report, "write"),
        "config": (transformers.Qwen2Config, "save_pretrained"),
    }[what]

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        result = job.run()
    assert result.exit_code == 1
    assert os.strerror(number) in result.output
    assert str(job.out) in result.output
    assert not job.out.exists()
    job.assert_nothing_left()
    assert job.run().exit_code == 0
    job.assert_finished()


def test_full_disk_leaves_the_old_model(make_models, tmp_path):
    job = Job("yaml", make_models(), tmp_path)
    assert job.run().exit_code == 0
    old = contents(job.out)
    in_little_space(job, 6000)
    assert contents(job.out) == old
    job.assert_nothing_left()


def test_interrupted_merge_leaves_nothing(make_models, tmp_path, monkeypatch):
    job = Job("yaml", make_models(), tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernel._Stream, "merge", interrupt)
        assert job.run().exit_code != 0
    assert not job.out.exists()
    job.assert_nothing_left()


# --- Checkpoints damaged while merging ------------------------------------------------------------


@pytest.mark.parametrize("damage", ["removed", "truncated"])
@pytest.mark.parametrize("entry", ["yaml", "pytorch"])
def test_file_damaged_while_merging_is_named(entry, damage, make_models, tmp_path, monkeypatch):
    models = make_models(shards=1 if entry == "pytorch" else 3)
    own = save_models(tmp_path / "own", models.config, models.base, models.agents, shards=3)
    job = Job(entry, own, tmp_path)
    if entry == "pytorch":
        file = tmp_path / "1.safetensors"
        raw_pytorch.SimpleLoaderCache().loaders.clear()
        moment = (raw_pytorch.SimpleLoadTensor, "execute")
    else:
        file = sorted(Path(own.agent_paths[1]).glob("*-of-*"))[2]
        moment = (kernel._Stream, "count")
    content = file.read_bytes()
    function = getattr(*moment)

    def damaging(*args):
        if file.exists():
            # Not in place: readers have it mapped.
            file.unlink()
            if damage == "truncated":
                file.with_suffix(".new").write_bytes(content[:-100])
                file.with_suffix(".new").rename(file)
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(*moment, damaging)
        result = job.run()
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert str(file) in result.output
    assert not job.out.exists()
    job.assert_nothing_left()
    file.write_bytes(content)
    LoaderCache().loaders.clear()
    raw_pytorch.SimpleLoaderCache().loaders.clear()
    assert job.run().exit_code == 0
    job.assert_finished()


# --- NaN and infinity -----------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj.weight"


def poisoned(models: Models, directory: Path, wrong: dict[int, list[float]]) -> Models:
    """The models with the values at the start of a tensor of some: −1 the
    base, 0 the first agent.
    """
    base, agents = dict(models.base), [dict(agent) for agent in models.agents]
    for place, values in wrong.items():
        weights = base if place == -1 else agents[place]
        weights[UP] = weights[UP].clone()
        weights[UP].view(-1)[: len(values)] = torch.tensor(values).to(weights[UP].dtype)
    return save_models(directory / "models", models.config, base, agents)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("place", [-1, 0, 2], ids=["base", "first", "last"])
@pytest.mark.parametrize("values", [[NAN], [INF, -INF], [-INF, NAN, INF]], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_not_finite_stop_the_merge(method, values, place, make_models, tmp_path):
    models = poisoned(make_models(), tmp_path, {place: values})
    message = refusal(models.recipe(method), tmp_path)
    model = models.base_path if place == -1 else models.agent_paths[place]
    assert f"NaN or infinity in {UP}: {len(values)} in {model}." in message
    assert "non_finite: ignore" in message


@pytest.mark.parametrize("method", METHODS)
def test_every_model_that_is_not_finite_is_named(method, make_models, tmp_path):
    wrong = {-1: [NAN], 0: [INF, INF], 2: [NAN, INF, NAN]}
    models = poisoned(make_models(dtypes=(BF16,) * 4), tmp_path, wrong)
    message = refusal(models.recipe(method), tmp_path)
    first, _, last = models.agent_paths
    assert f"1 in {models.base_path}, 2 in {first}, 3 in {last}" in message


@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@pytest.mark.parametrize("method", METHODS)
def test_not_finite_is_seen_whatever_becomes_of_it(shared, method, make_models, tmp_path):
    models = poisoned(make_models(), tmp_path, {1: [NAN]})
    parameters = {"shared": shared, "keep_unique": False, "density": 0.5}
    assert UP in refusal(models.recipe(method, parameters=parameters), tmp_path)


@pytest.mark.parametrize("entry", ["multi", "pytorch"])
def test_not_finite_weights_stop_every_command(entry, make_models, tmp_path):
    models = poisoned(make_models(), tmp_path, {2: [NAN, NAN]})
    if entry == "pytorch":
        models.agents[2] = checkpoints.read(Path(models.agent_paths[2]))
    job = Job(entry, models, tmp_path)
    message = invoke_refused(job.command, *job.arguments)
    where = tmp_path / "2.safetensors" if entry == "pytorch" else models.agent_paths[2]
    assert f"NaN or infinity in {UP}: 2 in {where}." in message
    assert not job.out.exists()
    job.assert_nothing_left()
    if entry == "multi":
        assert (job.first / "config.json").exists()


def test_overflow_of_a_narrower_dtype_is_told(make_models, tmp_path):
    models = poisoned(make_models(), tmp_path, {0: [1e6]})
    merge(models.recipe("ram"), tmp_path)
    (tmp_path / "half").mkdir()
    message = refusal(models.recipe("ram", dtype="float16"), tmp_path / "half")
    assert f"{UP}: 1 in {models.agent_paths[0]}" in message
    assert "overflow" in message


@pytest.mark.parametrize("method", METHODS)
def test_not_finite_weights_pass_where_the_recipe_says_so(method, make_models, tmp_path):
    healthy = make_models()
    models = poisoned(healthy, tmp_path, {1: [NAN, INF, -INF]})
    output = merge(models.recipe(method, parameters={"non_finite": "ignore"}), tmp_path)
    assert not output[UP].view(-1)[:3].isfinite().any()
    assert output[UP].view(-1)[3:].isfinite().all()
    if method == "ram":
        expected = expect(method, plan(healthy.base, healthy.agents))
        name = "model.layers.0.mlp.up_proj.weight"
        expected[name].check(name, output[name])


def test_finite_weights_of_any_size_pass(make_models, tmp_path):
    largest = float(np.finfo(np.float32).max)
    models = poisoned(make_models(), tmp_path, {0: [largest], 1: [-largest]})
    output = merge(models.recipe("ram"), tmp_path)
    assert output[UP].view(-1)[0].isfinite()
