"""The place of the output is checked, and nothing is written there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mergekit.scripts import run_yaml

from support.commands import invoke_refused, refusal
from support.recipes import write_recipe
from support.workshop import check_file, check_recipe, problems_of


def test_nothing_is_written(shop, tmp_path):
    file = write_recipe(shop.recipe(), tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check_file(file, "--out", tmp_path / "merged")
    assert sorted(tmp_path.rglob("*")) == before


def test_disk_space_is_checked_where_the_output_goes(shop, tmp_path, monkeypatch):
    recipe = shop.recipe()
    needed = sum(t.numel() for t in shop.weights(0).values()) * 4
    asked = []

    def disk_usage(path):
        asked.append(Path(path))
        return shutil._ntuple_diskusage(needed, 1, free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    free = needed - 1
    out = tmp_path / "not" / "yet" / "there"
    (problem,) = problems_of(recipe, tmp_path, "--out", out)
    assert problem["where"] == "recipe"
    assert str(out) in problem["what"]
    assert asked == [tmp_path]
    assert "free" in refusal(recipe, tmp_path)

    check_recipe({**recipe, "out_dtype": "bfloat16"}, tmp_path, "--out", out)
    problems_of({**recipe, "dtype": "float64"}, tmp_path, "--out", out)
    free = needed
    check_recipe(recipe, tmp_path, "--out", out)


@pytest.mark.parametrize("which", ["base", "agent", "link"])
def test_output_is_not_an_input(which, shop, tmp_path):
    out = shop.base if which == "base" else shop.agents[0]
    if which == "link":
        out = tmp_path / "link"
        out.symlink_to(shop.agents[0])
    before = (shop.agents[0] / "model.safetensors").read_bytes()
    (problem,) = problems_of(shop.recipe(), tmp_path, "--out", out)
    assert str(out) in problem["what"]
    file = write_recipe(shop.recipe(), tmp_path)
    assert problem["what"] in invoke_refused(run_yaml.main, file, out)
    assert (shop.agents[0] / "model.safetensors").read_bytes() == before


def test_output_below_a_file_is_refused(shop, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "merged"):
        (problem,) = problems_of(shop.recipe(), tmp_path, "--out", out)
        assert "is a file" in problem["what"]
