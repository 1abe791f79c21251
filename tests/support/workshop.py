"""Recipes to break, and the problems that ``mergekit-ram check`` finds in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mergekit_ram.cli import main as mergekit_ram
from support.commands import invoke
from support.recipes import Models, write_recipe


def check_file(file: Path, *options) -> str:
    """``mergekit-ram check`` of a recipe that is fine; its output."""
    return invoke(mergekit_ram, "check", file, *options)


def check_recipe(recipe, directory: Path, *options) -> str:
    return check_file(write_recipe(recipe, directory), *options)


def problems_of(recipe, directory: Path, *options) -> list[dict[str, str]]:
    """Problems that ``mergekit-ram check --json`` finds in a recipe that is not fine."""
    file = write_recipe(recipe, directory)
    arguments = ["check", str(file), "--json", *map(str, options)]
    result = CliRunner().invoke(mergekit_ram, arguments, catch_exceptions=False)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["recipe"] == str(file)
    assert found["problems"]
    for problem in found["problems"]:
        assert problem.keys() == {"where", "what", "remedy"}
        assert all(problem.values())
    return found["problems"]


def assert_told(problems: list[dict[str, str]], where: str, *parts: str) -> None:
    """One problem there says all the parts."""
    said = [p["what"] + " " + p["remedy"] for p in problems if p["where"] == where]
    assert any(all(part in text for part in parts) for text in said), problems


class Workshop:
    """Copies of the models, to break one at a time."""

    def __init__(self, models: Models, directory: Path):
        self.directory = directory
        self.base = self._copy(models.base_path)
        self.agents = [self._copy(path) for path in models.agent_paths]

    def _copy(self, path: str) -> str:
        return shutil.copytree(path, self.directory / Path(path).name)

    def recipe(self, method="ram") -> dict:
        return {
            "merge_method": method,
            "base_model": str(self.base),
            "models": [{"model": str(agent)} for agent in self.agents],
        }

    def weights(self, agent: int) -> dict[str, torch.Tensor]:
        return load_file(self.agents[agent] / "model.safetensors")

    def save(self, agent: int, weights) -> None:
        file = self.agents[agent] / "model.safetensors"
        save_file(weights, file, metadata={"format": "pt"})

    def configure(self, agent: int, **entries) -> None:
        file = self.agents[agent] / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def missing_tensors(shop, recipe):
    weights = shop.weights(0)
    for i in range(3):
        del weights[f"model.layers.{i}.mlp.up_proj.weight"]
    del weights["model.norm.weight"]
    shop.save(0, weights)
    parts = ["4 tensors missing", "model.layers.0.mlp.up_proj.weight", "and 1 more"]
    return [(shop.agents[0], parts)]


def other_vocabulary(shop, recipe):
    weights = shop.weights(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name][:2]])
    shop.save(1, weights)
    parts = ["2 tensors", "model.embed_tokens.weight [50, 16]", "[48, 16]", "tokenizer"]
    return [(shop.agents[1], parts)]
