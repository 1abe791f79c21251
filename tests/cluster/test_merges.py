"""Merges on a Ray cluster of several processes: the same bits as without, whoever is killed on the
way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.options import MergeOptions

from mergekit_ram import cli
from mergekit_ram.cluster import shards
from mergekit_ram.cluster.job import Job, cut
from mergekit_ram.errors import MergeError
from mergekit_ram.report.record import versions
from support import checkpoints
from support.checkpoints import Weights
from support.recipes import Models, new_models, save_models, write_recipe
from support.tensors import bits

ray = pytest.importorskip(
    "ray", reason="needs Ray: pip install 'mergekit-ram[ray]'", exc_type=ImportError
)

# Small enough that the model falls into a dozen parts.
SHARDS = ("--out-shard-size", "4K", "--quiet")


@pytest.fixture
def models(tmp_path) -> Models:
    return new_models(tmp_path / "models", "qwen2", tied=False, shards=2)


def run(directory: Path, out: Path, *options: str):
    arguments = [directory / "recipe.yml", out, *SHARDS, *options]
    return CliRunner().invoke(cli.main, ["merge", *map(str, arguments)])


def merge(recipe: dict, directory: Path, out: Path, *options: str) -> Weights:
    """Run ``mergekit-ram merge``."""
    write_recipe(recipe, directory)
    result = run(directory, out, *options)
    assert result.exit_code == 0, (result.output, result.exception)
    return checkpoints.read(out)


def assert_identical(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(bits(left[name]), bits(right[name])), name


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


STRONG = {"r": 1.0, "alpha": 10.0}
RECIPES = {
    "ram": {"parameters": {"epsilon": 0.008}},
    "ram, ties": {"parameters": {"shared": "ties", "density": 0.5}},
    "ramplus": {"parameters": STRONG, "dtype": "bfloat16", "out_dtype": "float32"},
    "ramplus_tl": {"parameters": STRONG, "dtype": "float32", "out_dtype": "float16"},
    "ram, overflowing": {
        "parameters": {"lambda": 1e9, "non_finite": "ignore"},
        "out_dtype": "float16",
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_cluster_gives_the_bits_and_the_report_of_a_local_merge(cluster, models, tmp_path, name):
    recipe = models.recipe(name.split(",")[0], **RECIPES[name])
    local = merge(recipe, tmp_path, tmp_path / "local" / "model")
    remote = merge(recipe, tmp_path, tmp_path / "remote" / "model", "--ray")
    assert_identical(local, remote)

    local, remote = tmp_path / "local" / "model", tmp_path / "remote" / "model"
    for file in ("ram_report.json", "config.json", "mergekit_config.yml"):
        assert (local / file).read_text() == (remote / file).read_text()
    warnings = json.loads((remote / "ram_report.json").read_text())["warnings"]
    overflowing = any("not finite" in warning for warning in warnings)
    assert overflowing == ("overflowing" in name)
    assert (remote / "README.md").exists()
    index = json.loads((remote / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in checkpoints.read(remote).values()
    )
    for tensor, file in index["weight_map"].items():
        assert tensor in checkpoints.load_file(remote / file)
    assert len(set(index["weight_map"].values())) > 4
    assert hidden(remote.parent) == []


def test_a_cluster_aligns_tokenizers_as_a_local_merge_does(cluster, tmp_path):
    paths = []
    for i, words in enumerate((["<unk>", "a", "b", "c"], ["<unk>", "c", "a", "d"])):
        config, weights = checkpoints.make_base("llama", vocab_size=4, seed=i)
        paths.append(checkpoints.save(tmp_path / str(i), config, weights, tokens=words))
    recipe = {
        "merge_method": "ramplus",
        "base_model": paths[0],
        "models": [{"model": paths[1]}],
        "tokenizer": {"source": "union"},
        "parameters": STRONG,
    }
    local = merge(recipe, tmp_path, tmp_path / "local")
    remote = merge(recipe, tmp_path, tmp_path / "remote", "--ray")
    assert local["model.embed_tokens.weight"].shape[0] == 5
    assert_identical(local, remote)
    for file in ("tokenizer.json", "config.json"):
        written = [(tmp_path / d / file).read_text() for d in ("local", "remote")]
        assert written[0] == written[1]


def test_relative_paths_and_pickled_models(cluster, tmp_path, monkeypatch):
    config, base = checkpoints.make_base("qwen2")
    agents = [checkpoints.change(base, i) for i in (1, 2)]
    save_models(tmp_path / "models", config, base, agents, pickle=True)
    monkeypatch.chdir(tmp_path)
    recipe = {
        "merge_method": "ram",
        "base_model": "./models/base",
        "models": [{"model": f"./models/agent{i}"} for i in (0, 1)],
    }
    local = merge(recipe, tmp_path, Path("local"))
    assert_identical(local, merge(recipe, tmp_path, Path("remote"), "--ray"))


@pytest.mark.parametrize("function", ["count_part", "write_part"])
def test_what_a_killed_worker_was_doing_is_done_again(
    cluster, models, tmp_path, monkeypatch, function
):
    marker = tmp_path / "killed"
    do_part = getattr(shards, function)

    # A nested function travels to the workers by value.
    def killed_once(job, part, *arguments):
        import os
        import signal

        from mergekit_ram.cluster import shards

        def kill(*_):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        if part.name == "00002" and not marker.exists():
            shards.os.replace = kill
        return do_part(job, part, *arguments)

    monkeypatch.setattr(shards, function, killed_once)
    recipe = models.recipe("ramplus", parameters=STRONG)
    remote = merge(recipe, tmp_path, tmp_path / "remote", "--ray")
    assert marker.exists()
    monkeypatch.undo()
    assert_identical(merge(recipe, tmp_path, tmp_path / "local"), remote)
    assert "killed" not in str(hidden(tmp_path)) and hidden(tmp_path) == []


def test_workers_that_keep_dying_end_the_merge(cluster, models, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TASK_MAX_RETRIES", "1")

    def dies(job, part, *_):
        import os

        if part.name == "00001":
            os._exit(1)

    monkeypatch.setattr(shards, "write_part", dies)
    write_recipe(models.recipe("ram"), tmp_path)
    result = run(tmp_path, tmp_path / "remote", "--ray")
    assert result.exit_code == 1
    assert "Ray gave up" in result.output
    assert not (tmp_path / "remote").exists()


DRIVER = """
    import sys, time
    from pathlib import Path
    from mergekit_ram import cli
    from mergekit_ram.cluster import shards

    write_part = shards.write_part

    def stuck(job, part, overlap):
        import time
        from pathlib import Path
        if part.name == "00001":
            (Path(job.directory).parent / "stuck").touch()
            time.sleep(600)
        return write_part(job, part, overlap)

    stuck.__module__ = "__main__"
    shards.write_part = stuck
    cli.main(["merge", *sys.argv[1:]])
"""


def test_a_rerun_after_a_killed_driver_takes_over_sound_shards(cluster, models, tmp_path):
    out = tmp_path / "remote"
    recipe = write_recipe(models.recipe("ramplus", parameters=STRONG), tmp_path)
    driver = tmp_path / "driver.py"
    driver.write_text(textwrap.dedent(DRIVER))
    process = subprocess.Popen(
        [sys.executable, driver, recipe, out, *SHARDS, "--ray", "local"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    parts = tmp_path / ".remote.mergekit-ram-parts"
    written = [parts / f"0000{i}.written.json" for i in range(2, 6)]
    stuck = tmp_path / "stuck"
    while not stuck.exists() or not all(p.exists() for p in written):
        assert process.poll() is None, process.stdout.read().decode()
    process.send_signal(signal.SIGKILL)
    process.wait()

    assert not out.exists()
    found = [str(path) for path in parts.rglob("*")]
    assert not any("index" in path or "config" in path for path in found)
    files = sorted(parts.glob("*.safetensors"))
    assert len(files) >= 4
    inodes = [os.stat(file).st_ino for file in files]
    opened = [file.open("rb") for file in files]  # so that no inode is given out again
    content = files[1].read_bytes()
    files[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    remote = merge(recipe_of(recipe), tmp_path, out, "--ray")
    finished = {os.stat(file).st_ino for file in out.glob("*.safetensors")}
    kept = [inode in finished for inode in inodes]
    for file in opened:
        file.close()
    assert kept == [True, False] + [True] * (len(files) - 2)
    assert_identical(merge(recipe_of(recipe), tmp_path, tmp_path / "local"), remote)
    assert hidden(tmp_path) == []


def recipe_of(file: Path) -> dict:
    return yaml.safe_load(file.read_text())


def test_parts_of_other_inputs_or_parameters_are_not_taken_over(
    cluster, models, tmp_path, monkeypatch
):
    def refuse(*_):
        raise MergeError("stopped")

    out = tmp_path / "remote"
    write_recipe(models.recipe("ram"), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("mergekit_ram.cluster.shards.hand_over", refuse)
        stopped = run(tmp_path, out, "--ray")
    assert stopped.exit_code == 1 and "stopped" in stopped.output
    assert not out.exists()
    assert hidden(tmp_path) == [".remote.mergekit-ram-parts"]

    changed = checkpoints.change(models.base, 9)
    agent = Path(models.agent_paths[0])
    for file in agent.glob("*.safetensors"):
        names = checkpoints.load_file(file)
        checkpoints.save_state_dict(file, {name: changed[name] for name in names})
    recipe = models.recipe("ram")
    remote = merge(recipe, tmp_path, out, "--ray")
    assert_identical(merge(recipe, tmp_path, tmp_path / "local"), remote)


def test_what_a_worker_refuses_is_said_without_a_traceback(cluster, models, tmp_path):
    file = next(Path(models.agent_paths[1]).glob("*1-of*.safetensors"))
    weights = checkpoints.load_file(file)
    name = next(iter(weights))
    weights[name].view(-1)[3] = float("nan")
    checkpoints.save_state_dict(file, weights)
    write_recipe(models.recipe("ram"), tmp_path)
    result = run(tmp_path, tmp_path / "remote", "--ray")
    assert result.exit_code == 1
    assert f"NaN or infinity in {name}: 1 in {models.agent_paths[1]}" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "remote").exists()


def test_other_methods_and_a_missing_ray_are_refused(models, tmp_path, monkeypatch):
    write_recipe(models.recipe("task_arithmetic", agents=[{"weight": 1.0}] * 3), tmp_path)
    result = run(tmp_path, tmp_path / "remote", "--ray")
    assert result.exit_code == 1
    assert "ramplus" in result.output

    monkeypatch.setitem(sys.modules, "ray", None)
    write_recipe(models.recipe("ram"), tmp_path)
    result = run(tmp_path, tmp_path / "remote", "--ray")
    assert result.exit_code == 1
    assert "pip install 'mergekit-ram[ray]'" in result.output
    assert not (tmp_path / "remote").exists()


def test_without_ray_merge_checks_first_and_takes_mergekits_options(models, tmp_path):
    recipe = models.recipe("ram")
    assert merge(recipe, tmp_path, tmp_path / "out", "--no-write-model-card")
    assert not (tmp_path / "out" / "README.md").exists()

    recipe["models"].append(dict(recipe["models"][0]))
    write_recipe(recipe, tmp_path)
    result = run(tmp_path, tmp_path / "other")
    assert result.exit_code == 1
    assert "the same model" in result.output


def test_a_machine_without_the_files_or_with_other_versions_says_so(tmp_path):
    job = Job(
        directory=str(tmp_path / "absent"),
        fingerprint="",
        agents=(),
        indexes={},
        options=MergeOptions(),
        tokenizer=None,
        versions=versions(),
        working_directory=str(tmp_path),
    )
    with pytest.raises(MergeError, match=f"{tmp_path}/absent.*storage that all"):
        job.enter()
    job = dataclasses.replace(job, versions={**versions(), "torch": "0.1"})
    with pytest.raises(MergeError, match="the merge .*torch 0.1"):
        job.enter()


def test_parts_are_runs_of_at_most_the_limit():
    sizes = [("a", 3), ("b", 4), ("c", 9), ("d", 1), ("e", 7), ("f", 1)]
    assert cut(sizes, 8) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert cut([], 8) == []
