"""Paths of any letters, relative ones and those with a plus."""

from __future__ import annotations

import json

import pytest
from mergekit.io.tasks import LoaderCache

from support.everywhere import assert_merged, everywhere, refused_everywhere, save_models
from support.recipes import recipe_of

NAMES = ("my model", "a#b", "it's", "tab\there", "größe ∆", 'say "yes"', "a: b")


@pytest.mark.parametrize("name", NAMES)
def test_paths_of_any_letters_merge(name, tmp_path):
    models, paths = save_models(tmp_path, name)
    assert_merged(everywhere(tmp_path, recipe_of(*paths)), models)
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    assert [agent["model"] for agent in report["agents"]] == paths[1:]
    assert [entry["model"] for entry in report["recipe"]["models"]] == paths[1:]


@pytest.mark.parametrize("spelling", ["{}/", "./{}", "../here/{}", "{}/../{}"])
def test_relative_paths_and_trailing_slashes_merge(spelling, tmp_path, monkeypatch):
    directory = tmp_path / "here"
    models, _ = save_models(directory)
    monkeypatch.chdir(directory)
    paths = [spelling.format(f"model{i}", f"model{i}") for i in range(3)]
    assert_merged(everywhere(directory, recipe_of(*paths)), models)


def test_path_with_a_plus_is_told_how_to_be_written_and_then_merges(tmp_path):
    models, paths = save_models(tmp_path, "a+b")
    for said in refused_everywhere(tmp_path, recipe_of(*paths)):
        assert "`+` separates a model from its adapter" in said
    written = [{"model": {"path": path}} for path in paths]
    output = everywhere(tmp_path, recipe_of(*written))
    assert_merged(output, models)
    # What the report says of the recipe merges again.
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    (tmp_path / "again").mkdir()
    LoaderCache().loaders.clear()
    assert_merged(everywhere(tmp_path / "again", report["recipe"]), models)
