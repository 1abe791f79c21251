"""Pickles are merged as mergekit merges them, or refused with what to do."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from mergekit_ram import cli
from support import checkpoints
from support.recipes import recipe_of, write_recipe
from support.spoilt import merged, refused

BESIDE = {
    "bool": torch.tensor([True, False]),
    "complex": torch.ones(2, dtype=torch.complex64),
    "int": torch.arange(3),
    "no elements": torch.zeros(0, 3),
    "no dimensions": torch.tensor(1.0),
    "none": None,
    "a number": 3,
    "a dictionary": {"lr": 0.1},
}


def as_pickled(kind, weights):
    first = "model.norm.weight"
    changed = dict(weights)
    if kind == "parameter":
        changed = {name: torch.nn.Parameter(w) for name, w in weights.items()}
    elif kind == "strided":
        wide = torch.stack([weights[first], weights[first]], 1)
        changed[first] = wide[:, 0]
    elif kind == "shared":
        whole = torch.cat([weights[first], weights[first]])
        changed[first] = whole[: weights[first].numel()]
        changed["unused"] = whole
    else:
        changed["unused"] = BESIDE[kind]
    return changed


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", [*BESIDE, "parameter", "strided", "shared"])
def test_pickles_are_merged_as_mergekit_merges_them(kind, zipped, tmp_path):
    config, base = checkpoints.make_base("qwen2", tied=False)
    weights = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [tmp_path / f"model{i}" for i in range(3)]
    for path, its in zip(paths, weights, strict=True):
        path.mkdir()
        config.save_pretrained(path)
        torch.save(
            as_pickled(kind, its),
            path / "pytorch_model.bin",
            _use_new_zipfile_serialization=zipped,
        )
    write_recipe(recipe_of(*map(str, paths)), tmp_path)
    checked = CliRunner().invoke(cli.check, [str(tmp_path / "recipe.yml")])
    assert checked.exit_code == 0, checked.output
    result = merged(tmp_path)
    assert result.exit_code == 0, result.output
    output = checkpoints.read(tmp_path / "merged")
    for name, tensor in base.items():
        agents = [agent[name].double() for agent in weights[1:]]
        deltas = torch.stack([agent - tensor.double() for agent in agents])
        changed = deltas.abs() > 1e-5
        mean = (deltas * changed).sum(0) / changed.sum(0).clamp(min=1)
        assert torch.allclose(output[name].double(), tensor.double() + mean, atol=1e-6)


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_nested_pickles_are_refused_with_what_to_do(key, models, tmp_path):
    weights = checkpoints.read(models[1])
    for file in models[1].glob("model*"):
        file.unlink()
    torch.save({key: weights, "epoch": 3}, models[1] / "pytorch_model.bin")
    said = refused(tmp_path)
    assert "save the weights alone" in said.replace("\n", " ")
    assert key in said
