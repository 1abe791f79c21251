"""What ``mergekit-ram compare`` shows a person and writes."""

from __future__ import annotations

import json
import re

from click.testing import CliRunner

from mergekit_ram import cli
from mergekit_ram.tools.comparison import DEFAULT_METHODS as METHODS
from support.recipes import write_recipe
from support.tools import MEASURES, run, words


def test_output_fits_80_columns_and_marks_the_best_without_colour(models, tmp_path):
    result = run("compare", models.recipe("ram"), tmp_path)
    assert max(map(len, result.output.splitlines())) <= 80
    assert "\x1b" not in result.output
    table = result.output.split("Unique / shared")[0]
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line[:1].isalpha()}
    assert rows.keys() >= set(METHODS)
    assert rows["ram"][1] == "*1.00"
    assert rows["linear"][1] == "0.33"
    seconds = {method: rows[method][-1] for method in METHODS}
    assert sum(text.startswith("*") for text in seconds.values()) >= 1


def test_json_holds_methods_with_parameters_and_agents(models, tmp_path):
    path = tmp_path / "found.json"
    run("compare", models.recipe("ram"), tmp_path, "--json", str(path))
    found = json.loads(path.read_text())
    assert [method["method"] for method in found["methods"]] == list(METHODS)
    for method in found["methods"]:
        assert {
            "method",
            "parameters",
            "agents",
            "seconds",
            "delta_norm",
            "changed",
        } <= method.keys()
        assert method["seconds"] > 0
        for agent in method["agents"]:
            assert {"model", *MEASURES} <= agent.keys()


def test_model_card_section_is_all_that_is_printed(models, tmp_path):
    result = run("compare", models.recipe("ram"), tmp_path, "--model-card")
    assert result.output.startswith("### What merge methods keep of each agent\n")
    assert re.search(r"^\| ram \| 1.00 \|", result.output, re.MULTILINE)


def test_plots_are_drawn(models, tmp_path):
    run("compare", models.recipe("ram"), tmp_path, "--plots", str(tmp_path / "plots"))
    (path,) = (tmp_path / "plots").iterdir()
    assert path.name == "retention.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_is_written_beside_the_recipe(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("compare", models.recipe("ram"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yml"]


def test_unknown_method_is_told_with_the_known_ones(models, tmp_path):
    result = run("compare", models.recipe("ram"), tmp_path, "--methods", "ram,tie")
    assert result.exit_code == 1
    assert "no merge method tie; known are" in words(result.output)


def test_method_that_cannot_merge_the_recipe_is_named(models, tmp_path):
    result = run("compare", models.recipe("ram"), tmp_path, "--methods", "ram,slerp")
    assert result.exit_code == 1
    assert "slerp cannot merge" in words(result.output)


def test_progress_is_shown_unless_quiet(models, tmp_path):
    file = str(write_recipe(models.recipe("ram"), tmp_path))
    result = CliRunner().invoke(cli.main, ["compare", file])
    assert "Comparing methods" in result.stderr
    assert "Comparing methods" not in result.stdout
    assert not run("compare", models.recipe("ram"), tmp_path).stderr
