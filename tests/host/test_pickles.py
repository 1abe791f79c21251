"""Pickles that mergekit's built-in methods merge are merged by ours, whatever else they hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.scripts import merge_raw_pytorch, run_yaml

from mergekit_ram import cli
from support import checkpoints

BESIDE = {
    "bool": torch.tensor([True, False]),
    "complex": torch.ones(2, dtype=torch.complex64),
    "int": torch.arange(3),
    "uint16": torch.arange(3).to(torch.uint16),
    "byte": torch.arange(3).to(torch.int8),
    "no elements": torch.zeros(0, 3),
    "no elements, int": torch.zeros(0, dtype=torch.int64),
    "no dimensions": torch.tensor(1.0),
    "expanded": torch.ones(1).expand(5),
    "with gaps": torch.arange(8.0)[::2],
    "buffer": torch.nn.Buffer(torch.ones(2)),
}


def recipe_of(directory: Path, method: str, paths) -> str:
    base, *agents = map(str, paths)
    content = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": agent, "parameters": {"weight": 1.0}} for agent in agents],
    }
    file = directory / f"{method}.yml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


def invoke(command, *arguments) -> None:
    result = CliRunner().invoke(command, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("parameters", [False, True], ids=["tensors", "Parameters"])
def test_files_with_any_tensors_are_merged_as_by_mergekit(parameters, tmp_path):
    weights = {"a": torch.zeros(4, 4), "b": torch.ones(4)}
    files = []
    for i in range(2):
        changed = {n: t + 0.5 * i * torch.eye(4) for n, t in weights.items()}
        content = {n: t.clone() for n, t in changed.items()}
        if parameters:
            content = {n: torch.nn.Parameter(t) for n, t in content.items()}
        files.append(tmp_path / f"{i}.pt")
        torch.save({**content, **BESIDE}, files[-1])
    outputs = {}
    for method in ("task_arithmetic", "ram"):
        recipe = recipe_of(tmp_path, method, files)
        invoke(merge_raw_pytorch.main, recipe, str(tmp_path / method))
        outputs[method] = checkpoints.read(tmp_path / method)
    for command in (cli.check, cli.inspect, cli.compare):
        invoke(command, recipe)
    # Of one agent, RAM and task arithmetic make the same.
    assert outputs["ram"].keys() == outputs["task_arithmetic"].keys()
    assert {*weights, *BESIDE} == outputs["ram"].keys()
    for name, tensor in outputs["ram"].items():
        other = outputs["task_arithmetic"][name]
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor, other), name


def test_model_of_unknown_architecture_is_not_waited_for(tmp_path):
    """mergekit infers such an architecture from the files of weights."""
    config, base = checkpoints.make_base("qwen2", tied=False)
    config.architectures = ["UnheardOfForCausalLM"]
    paths = [tmp_path / f"model{i}" for i in range(2)]
    for path in paths:
        checkpoints.save(path, config, base)
    file = paths[1] / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    result = CliRunner().invoke(
        run_yaml.main, [recipe_of(tmp_path, "ram", paths), str(tmp_path / "merged")]
    )
    assert result.exit_code == 1
    assert f"{file}: not a file but" in result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
