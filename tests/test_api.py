"""The commands as Python functions: the same results as on the command line, typed."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import yaml
from click.testing import CliRunner

import mergekit_ram
from mergekit_ram import api, cli
from support import checkpoints


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Plain data of a recipe of three agents."""
    directory = tmp_path_factory.mktemp("models")
    config, base = checkpoints.make_base("qwen2")
    checkpoints.save(directory / "base", config, base)
    for i in range(3):
        agent = checkpoints.change(base, seed=i + 1)
        checkpoints.save(directory / f"agent{i}", config, agent)
    return {
        "merge_method": "ramplus",
        "base_model": str(directory / "base"),
        "models": [{"model": str(directory / f"agent{i}")} for i in range(3)],
        "dtype": "float32",
    }


@pytest.fixture
def file(recipe, tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def command(*arguments) -> str:
    result = CliRunner().invoke(cli.main, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def written_by_the_command(name, file, tmp_path, *options):
    """What the command writes as JSON."""
    command(name, file, "--json", tmp_path / "found.json", "--quiet", *options)
    return json.loads((tmp_path / "found.json").read_text())


def test_everything_that_is_public_can_be_had_and_is_listed():
    for name in mergekit_ram.__all__:
        assert getattr(mergekit_ram, name) is not None
        assert name in dir(mergekit_ram)
    with pytest.raises(AttributeError, match="no attribute 'mrege'"):
        mergekit_ram.mrege  # noqa: B018


@pytest.mark.parametrize("kind", ["path", "text", "data", "recipe"])
def test_merge_takes_any_kind_of_recipe_and_returns_the_report(kind, recipe, file, tmp_path):
    given = {
        "path": file,
        "text": str(file),
        "data": recipe,
        "recipe": mergekit_ram.Recipe.read(str(file)),
    }
    report = mergekit_ram.merge(given[kind], tmp_path / "out")
    written = json.loads((tmp_path / "out" / "ram_report.json").read_text())
    assert json.loads(report.to_json()) == written
    command("merge", file, tmp_path / "by_command", "--quiet")
    mine, theirs = (checkpoints.read(tmp_path / name) for name in ("out", "by_command"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_merge_by_a_method_of_mergekit_has_no_report(recipe, tmp_path):
    models = [{**model, "parameters": {"weight": 0.5}} for model in recipe["models"]]
    other = {**recipe, "merge_method": "task_arithmetic", "models": models}
    assert mergekit_ram.merge(other, tmp_path / "out") is None
    assert checkpoints.read(tmp_path / "out")


def test_merge_of_what_cannot_be_merged_raises_all_problems_and_leaves_nothing(recipe, tmp_path):
    models = [{"model": str(tmp_path / name)} for name in ("gone", "away")]
    with pytest.raises(mergekit_ram.RecipeError) as refused:
        mergekit_ram.merge({**recipe, "models": models}, tmp_path / "out")
    assert {problem.where for problem in refused.value.problems} == {m["model"] for m in models}
    assert not (tmp_path / "out").exists()


def test_data_that_is_no_recipe_is_refused_with_the_place(recipe):
    models = [{"model": "a", "parameters": 3}]
    for function in (api.check, mergekit_ram.inspect, mergekit_ram.compare):
        with pytest.raises(mergekit_ram.MergeError, match="the recipe is not a recipe") as refused:
            function({**recipe, "models": models})
        assert "models[0].parameters" in str(refused.value)


def test_check_of_a_sound_recipe(recipe, file, tmp_path):
    for given in (recipe, file, mergekit_ram.Recipe.read(str(file))):
        found = api.check(given, tmp_path / "out")
        assert found.ok and found.method == "ramplus" and found.problems == []
        found.raise_for_problems()
    assert json.loads(api.check(file).to_json())["recipe"] == str(file)


def test_check_finds_what_the_command_finds(recipe, tmp_path):
    file = tmp_path / "recipe.yml"
    file.write_text(yaml.safe_dump({**recipe, "parameters": {"epsilon": -1, "r": "much"}}))
    found = api.check(file)
    result = CliRunner().invoke(cli.main, ["check", str(file), "--json"])
    assert result.exit_code == 1 and not found.ok
    assert json.loads(result.output)["problems"] == json.loads(found.to_json())["problems"]
    with pytest.raises(mergekit_ram.RecipeError) as refused:
        found.raise_for_problems()
    assert list(refused.value.problems) == found.problems


def test_inspect_finds_what_the_command_finds(file, tmp_path):
    found = mergekit_ram.inspect(file, epsilon=1e-3, r=0.5)
    options = ("--epsilon", "1e-3", "--r", "0.5")
    assert json.loads(found.to_json()) == written_by_the_command(
        "inspect", file, tmp_path, *options
    )
    frame = found.to_frame()
    assert frame["model"].tolist() == [agent.model for agent in found.agents]
    assert frame["lambda"].tolist() == [agent.lambda_ for agent in found.agents]
    assert len(mergekit_ram.write_plots(found, tmp_path / "plots")) == 5


def test_compare_finds_what_the_command_finds(file, tmp_path):
    found = mergekit_ram.compare(file, ["ram", "ties"])
    written = written_by_the_command("compare", file, tmp_path, "--methods", "ram,ties")
    mine = json.loads(found.to_json())
    for method in (*mine["methods"], *written["methods"]):
        assert method.pop("seconds") > 0
    assert mine == written
    frame = found.to_frame()
    assert frame["method"].tolist() == ["ram"] * 3 + ["ties"] * 3
    assert frame["unique_retention"].tolist() == [
        agent.unique_retention for method in found.methods for agent in method.agents
    ]
    assert len(mergekit_ram.write_plots(found, tmp_path / "plots")) == 1


def test_frames_without_pandas_say_what_to_install(file, monkeypatch):
    found = mergekit_ram.inspect(file)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(mergekit_ram.MergeError, match=r"pip install 'mergekit-ram\[frames\]'"):
        found.to_frame()
