"""Pickles are looked at without being run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import mergekit.io.lazy_unpickle
import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import pytest
import torch
from mergekit.scripts import run_yaml

from support.commands import invoke_refused, merge
from support.recipes import raw_recipe, state_dicts, write_recipe
from support.workshop import Workshop, check_recipe, problems_of


class Exploit:
    """Unpickled, it would create a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mknod, (str(self.file),)


@pytest.mark.parametrize("lazy", [(), ("--lazy-unpickle",)], ids=["eager", "lazy"])
@pytest.mark.parametrize("form", ["torch", "legacy torch", "plain pickle"])
@pytest.mark.parametrize("entry", ["yaml", "sharded", "pytorch"])
def test_malicious_pickle_is_refused_and_not_run(entry, form, lazy, make_models, tmp_path):
    mark = tmp_path / "run"
    content = {"model.norm.weight": torch.ones(16), "more": Exploit(mark)}

    def plant(file: Path):
        if form == "plain pickle":
            file.write_bytes(pickle.dumps(content))
        else:
            zipped = form == "torch"
            torch.save(content, file, _use_new_zipfile_serialization=zipped)

    plant(tmp_path / "proof.bin")
    if form == "plain pickle":
        pickle.loads((tmp_path / "proof.bin").read_bytes())
    else:
        torch.load(tmp_path / "proof.bin", weights_only=False)
    assert mark.exists()
    mark.unlink()

    if entry == "pytorch":
        base, agents = state_dicts(make_models())
        recipe = raw_recipe(tmp_path, base, agents, "ram", ".bin")
        file, command = Path(recipe["models"][1]["model"]), raw_pytorch.main
    else:
        shards = 3 if entry == "sharded" else 1
        (tmp_path / "models").mkdir()
        models = make_models(pickle=True, shards=shards)
        shop = Workshop(models, tmp_path / "models")
        recipe, command = shop.recipe(), run_yaml.main
        file = sorted(shop.agents[1].glob("*.bin"))[0]
    plant(file)
    (problem,) = problems_of(recipe, tmp_path)
    assert str(file) in problem["what"]
    out = tmp_path / "merged"
    message = invoke_refused(command, write_recipe(recipe, tmp_path), out, *lazy)
    assert str(file) in message
    assert not out.exists()
    assert not mark.exists()


def test_shapes_of_pickles_are_compared(make_models, tmp_path, no_weight_is_read):
    (tmp_path / "models").mkdir()
    shop = Workshop(make_models(pickle=True), tmp_path / "models")
    file = shop.agents[1] / "pytorch_model.bin"
    weights = torch.load(file, weights_only=True)
    weights["model.norm.weight"] = torch.zeros(3)
    torch.save(weights, file)
    (problem,) = problems_of(shop.recipe(), tmp_path)
    assert "model.norm.weight [3] for the base's [16]" in problem["what"]


def test_check_reads_no_weights_of_pickles(make_models, tmp_path, monkeypatch):
    recipe = make_models(pickle=True).recipe("ramplus")

    def refuse(*_):
        raise AssertionError("a weight was read")

    lazy = mergekit.io.lazy_unpickle
    monkeypatch.setattr(lazy.DeferredLoad, "execute", refuse)
    monkeypatch.setattr("mergekit.io.loader.DumbPytorchLoader.__init__", refuse)
    monkeypatch.setattr("mergekit.io.ShardedTensorIndex.from_file", refuse)
    check_recipe(recipe, tmp_path)


@pytest.mark.parametrize("form", ["parameters", "legacy"])
def test_pickles_that_mergekit_loads_are_fine(form, make_models, tmp_path):
    (tmp_path / "models").mkdir()
    shop = Workshop(make_models(pickle=True), tmp_path / "models")
    file = shop.agents[1] / "pytorch_model.bin"
    weights = torch.load(file, weights_only=True)
    if form == "parameters":
        torch.save({n: torch.nn.Parameter(t) for n, t in weights.items()}, file)
    else:
        torch.save(weights, file, _use_new_zipfile_serialization=False)
    check_recipe(shop.recipe("ramplus"), tmp_path)
    merge(shop.recipe("ramplus"), tmp_path)
