"""Damaged shards and indexes are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support import checkpoints
from support.commands import refusal
from support.workshop import Workshop, problems_of


def sharded(make_models, directory: Path, **settings) -> Workshop:
    (directory / "models").mkdir()
    return Workshop(make_models(shards=3, **settings), directory / "models")


def edit_index(directory: Path, edit: Callable[[dict], object]) -> Path:
    (file,) = directory.glob("*.index.json")
    content = json.loads(file.read_text())
    edited = edit(content)
    file.write_text(edited if isinstance(edited, str) else json.dumps(content))
    return file


INDEXES = {
    "not json": lambda index: "{",
    "empty file": lambda index: "",
    "list": lambda index: "[1]",
    "no weight_map": lambda index: index.pop("weight_map"),
    "empty weight_map": lambda index: index.update(weight_map={}),
    "list for a weight_map": lambda index: index.update(weight_map=["a"]),
    "numbers for files": lambda index: index.update(weight_map={"a": 1}),
    "null for a file": lambda index: index["weight_map"].update(a=None),
}


@pytest.mark.parametrize("edit", INDEXES.values(), ids=INDEXES)
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
def test_corrupt_index_is_named(edit, pickled, make_models, tmp_path, no_weight_is_read):
    shop = sharded(make_models, tmp_path, pickle=pickled)
    file = edit_index(shop.agents[1], edit)
    (problem,) = problems_of(shop.recipe(), tmp_path)
    assert problem["where"] == str(shop.agents[1])
    assert str(file) in problem["what"]
    assert problem["what"] in refusal(shop.recipe(), tmp_path)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize(
    "damage", ["missing", "truncated", "empty", "directory", "text", "other tensors"]
)
def test_damaged_shard_is_named(damage, pickled, make_models, tmp_path, no_weight_is_read):
    shop = sharded(make_models, tmp_path, pickle=pickled)
    file = sorted(shop.agents[2].glob("*-of-*"))[1]
    content = file.read_bytes()
    file.unlink()
    if damage == "directory":
        file.mkdir()
    elif damage == "other tensors":
        checkpoints.save_state_dict(file, {"other": torch.zeros(2)})
    elif damage != "missing":
        left = {"truncated": content[:-50], "empty": b"", "text": b"no weights at all"}
        file.write_bytes(left[damage])
    (problem,) = problems_of(shop.recipe(), tmp_path)
    assert problem["where"] == str(shop.agents[2])
    assert str(file) in problem["what"]
    assert problem["what"] in refusal(shop.recipe(), tmp_path)


def test_shard_without_permission_is_named(make_models, tmp_path, monkeypatch):
    shop = sharded(make_models, tmp_path)
    file = str(sorted(shop.agents[2].glob("*-of-*"))[1])
    real = open

    def forbidding(path, *args, **kwargs):  # as root, no mode keeps a file from us
        if str(path) == file:
            raise PermissionError(13, "Permission denied", file)
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", forbidding)
    (problem,) = problems_of(shop.recipe(), tmp_path)
    assert f"{file}: Permission denied" in problem["what"]


def test_damaged_shards_of_all_models_are_named_at_once(make_models, tmp_path):
    shop = sharded(make_models, tmp_path)
    files = [sorted(a.glob("*-of-*"))[i] for i, a in enumerate(shop.agents)]
    for file in files:
        file.write_bytes(file.read_bytes()[:-10])
    message = refusal(shop.recipe(), tmp_path)
    assert "3 problems" in message
    assert all(str(file) in message for file in files)
