"""Reports and cards do not name the home directory."""

from __future__ import annotations

import logging
from pathlib import Path

import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import pytest
import yaml
from click.testing import CliRunner
from mergekit.scripts import multimerge, run_yaml

from support.commands import merge
from support.recipes import save_models, write_recipe
from support.reports import FILE, read_report


@pytest.fixture
def at_home(make_models, tmp_path, monkeypatch) -> Path:
    """Models in the user's home, named relative to where the user is."""
    home = tmp_path / "home" / "someone"
    home.mkdir(parents=True)
    models = make_models()
    save_models(home / "models", models.config, models.base, models.agents)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    return home


RELATIVE = {
    "merge_method": "ramplus",
    "base_model": "./models/base",
    "models": [{"model": f"./models/agent{i}"} for i in range(3)],
}


@pytest.mark.parametrize("damaged", [False, True], ids=["merged", "refused"])
@pytest.mark.parametrize("entry", ["yaml", "multi", "pytorch"])
def test_home_is_not_named(entry, damaged, at_home, caplog):
    caplog.set_level(logging.INFO)
    recipe = dict(RELATIVE)
    command, options = run_yaml.main, ["merged"]
    if entry == "pytorch":
        command = raw_pytorch.main
        recipe["base_model"] += "/model.safetensors"
        recipe["models"] = [{"model": m["model"] + "/model.safetensors"} for m in recipe["models"]]
    elif entry == "multi":
        command, options = multimerge.main, ["-I", ".", "--out-path", "merged"]
    file = write_recipe(recipe, Path("."))
    if damaged:
        shard = Path("models/agent1/model.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1])
    result = CliRunner().invoke(command, [str(file), *options, "-v"])
    assert result.exit_code == (1 if damaged else 0), result.output
    said = result.output + caplog.text
    if damaged:
        assert "models/agent1/model.safetensors" in said
    else:
        assert "changed" in caplog.text
        written = [f for f in Path("merged").iterdir() if f.suffix != ".safetensors"]
        assert Path("merged") / FILE in written
        said += "".join(path.read_text() for path in written)
        assert "./models/agent1" in said
    assert str(at_home) not in said


def test_recipe_that_names_the_home_keeps_its_names(at_home, tmp_path):
    recipe = yaml.safe_load(yaml.safe_dump(RELATIVE).replace("./models", f"{at_home}/models"))
    merge(recipe, tmp_path)
    report = read_report(tmp_path / "merged")
    assert [agent.model for agent in report.agents] == [
        f"{at_home}/models/agent{i}" for i in range(3)
    ]
