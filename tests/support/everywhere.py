"""One recipe through check, inspect, compare and merge."""

from __future__ import annotations

import json

import torch
import yaml
from click.testing import CliRunner
from mergekit.scripts import run_yaml

from mergekit_ram import cli
from support import checkpoints


def save_models(directory, name="model", configure=None):
    config, base = checkpoints.make_base("qwen2", tied=False)
    models = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [
        checkpoints.save(directory / f"{name}{i}", config, weights)
        for i, weights in enumerate(models)
    ]
    for path in paths if configure else ():
        with open(f"{path}/config.json") as file:
            content = json.load(file)
        configure(content)
        with open(f"{path}/config.json", "w") as file:
            json.dump(content, file)
    return models, paths


def write(directory, recipe):
    file = directory / "recipe.yml"
    text = recipe if isinstance(recipe, str) else yaml.safe_dump(recipe)
    file.write_text(text, encoding="utf-8")
    return str(file)


def run(command, *arguments):
    result = CliRunner().invoke(command, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    return result


def everywhere(directory, recipe):
    """Check, inspect, compare and merge a recipe; the merged weights."""
    file = write(directory, recipe)
    for command in (["check"], ["inspect"], ["compare", "--methods", "ram,ramplus"]):
        result = run(cli.main, command[0], file, *command[1:])
        assert result.exit_code == 0, f"{command}: {result.output}"
    result = run(run_yaml.main, file, directory / "merged")
    assert result.exit_code == 0, result.output
    return checkpoints.read(directory / "merged")


def refused_everywhere(directory, recipe) -> list[str]:
    """What check, inspect, compare and merge say, in one line each."""
    file = write(directory, recipe)
    said = []
    for arguments in (
        ["check", file],
        ["inspect", file],
        ["compare", file],
        ["merge", file, str(directory / "merged")],
    ):
        result = run(cli.main, *arguments)
        assert result.exit_code == 1, f"{arguments}: {result.output}"
        assert "Traceback" not in result.output
        said.append(" ".join(result.output.split()))
    assert not (directory / "merged").exists()
    return said


def assert_merged(output, models, epsilon=1e-5):
    base, *agents = models
    for name, tensor in base.items():
        deltas = torch.stack([agent[name].double() - tensor.double() for agent in agents])
        changed = deltas.abs() > epsilon
        mean = (deltas * changed).sum(0) / changed.sum(0).clamp(min=1)
        assert torch.allclose(output[name].double(), tensor.double() + mean, atol=1e-6)
