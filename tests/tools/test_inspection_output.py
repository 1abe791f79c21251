"""What ``mergekit-ram inspect`` shows a person and writes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from mergekit_ram import cli
from mergekit_ram.report.findings import percent, power, short_names
from support import checkpoints
from support.recipes import Models, save_models
from support.tools import count_by_oracle, run, words


def test_output_fits_80_columns_and_needs_no_colour(models, tmp_path):
    result = run("inspect", models.recipe("ram"), tmp_path)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "\x1b" not in result.output
    changed = count_by_oracle(models.base, models.agents).changed
    for name, count in zip(("agent0", "agent1", "agent2"), changed):
        assert re.search(rf"^{name} +{count:,} ", result.output, re.MULTILINE)
    for title in (
        "Agents",
        "Pairs of agents",
        "Magnitudes",
        "by epsilon",
        "by layer",
        "by module type",
        "Verdict",
    ):
        assert title in result.output


def test_long_names_of_many_agents_fit_80_columns(models, tmp_path):
    agents = [checkpoints.change(models.base, seed) for seed in range(6)]
    name = "Some-Organisation-7B-Instruct-trained-for-{}-by-GRPO"
    paths = [
        checkpoints.save(tmp_path / name.format(i), models.config, agent)
        for i, agent in enumerate(agents)
    ]
    many = Models(models.config, models.base, agents, models.base_path, paths)
    result = run("inspect", many.recipe("ram"), tmp_path)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_verdict_tells_sparse_from_dense_agents(models, tmp_path):
    sparse = words(run("inspect", models.recipe("ram"), tmp_path).output)
    assert "RAM is made for this" in sparse
    agents = [checkpoints.change(models.base, seed, fraction=1.0) for seed in (1, 2)]
    dense = save_models(tmp_path / "dense", models.config, models.base, agents)
    text = words(run("inspect", dense.recipe("ram"), tmp_path).output)
    assert "nearly dense" in text
    assert "RAM is made for this" not in text
    assert "agent0 and agent1 collide: they share 100% of what either changed" in text


def test_verdict_names_the_agents_that_collide_and_no_others(models, tmp_path):
    first = checkpoints.change(models.base, 1, fraction=0.2, names="mlp")
    twin = {n: t + (t - models.base[n]) for n, t in first.items()}
    apart = checkpoints.change(models.base, 2, fraction=0.2, names="self_attn")
    made = save_models(tmp_path / "made", models.config, models.base, [first, apart, twin])
    text = words(run("inspect", made.recipe("ram"), tmp_path).output)
    assert text.count("collide") == 1
    assert "agent0 and agent2 collide" in text
    assert "0% of the shared ones in opposite directions" in text


def test_verdict_says_where_epsilon_matters(models, tmp_path):
    small = {n: t + 2e-5 * (torch.rand(t.shape) < 0.3) * (t == 0) for n, t in models.base.items()}
    made = save_models(tmp_path / "made", models.config, models.base, [small])
    text = words(run("inspect", made.recipe("ram"), tmp_path).output)
    assert "at 1e-4 instead of 1e-5 100% of the updates would no longer count" in text
    text = words(run("inspect", made.recipe("ram"), tmp_path, "--epsilon", "1e-4").output)
    assert "no agent changed any element" in text


def test_unchanged_agent_is_named(models, tmp_path):
    agents = [models.agents[0], models.base]
    made = save_models(tmp_path / "made", models.config, models.base, agents)
    text = words(run("inspect", made.recipe("ram"), tmp_path).output)
    # A long path may be broken anywhere.
    assert "agent1doesnotdifferfromthebase" in text.replace(" ", "")


def test_model_card_section_is_all_that_is_printed(models, tmp_path):
    result = run("inspect", models.recipe("ramplus"), tmp_path, "--model-card")
    assert result.output.startswith("### Reinforced Agent Merging\n")
    changed = count_by_oracle(models.base, models.agents).changed
    for path, count in zip(models.agent_paths, changed):
        assert re.search(rf"^\| {path} \| {count:,} ", result.output, re.MULTILINE)
    assert "Jaccard" in result.output


def test_json_keys_are_those_of_the_report(models, tmp_path):
    path = tmp_path / "found.json"
    run("inspect", models.recipe("ramplus"), tmp_path, "--json", str(path))
    found = json.loads(path.read_text())
    assert {"agents", "pairwise_shared", "sign_conflicts", "layers"} <= found.keys()
    for agent in found["agents"]:
        assert {
            "model",
            "total",
            "changed",
            "unique",
            "shared",
            "overlap_histogram",
            "rho",
            "lambda",
        } <= agent.keys()
        assert sum(agent["overlap_histogram"]) == agent["changed"]


def test_plots_are_drawn(models, tmp_path):
    result = run("inspect", models.recipe("ram"), tmp_path, "--plots", str(tmp_path / "plots"))
    assert result.exit_code == 0, result.output
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    names = ("overlap", "overlap_histogram", "layers", "magnitudes", "epsilon")
    assert drawn == {f"{name}.png" for name in names}
    for path in (tmp_path / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_plots_without_matplotlib_say_how_to_get_it(command, models, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    monkeypatch.setattr(checkpoints, "load_file", None)
    result = run(command, models.recipe("ram"), tmp_path, "--plots", str(tmp_path / "plots"))
    assert result.exit_code == 1
    assert "pip install 'mergekit-ram[plots]'" in result.output
    assert not (tmp_path / "plots").exists()


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from mergekit_ram.cli import main; "
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0; "
        "heavy = {'torch', 'mergekit', 'rich', 'pydantic', 'matplotlib', 'transformers', 'numpy'}; "
        "print(heavy & sys.modules.keys(), 'inspect' in result.output, 'compare' in result.output)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set() True True", done.stdout + done.stderr


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_mergekits_options_are_taken(command):
    text = CliRunner().invoke(cli.main, [command, "--help"]).output
    for option in ("--trust-remote-code", "--read-to-gpu", "--lora-merge-cache", "--num-threads"):
        assert option in text


@pytest.mark.parametrize("content", ["", "- 1", "models: [a]", "a: {b", "text"])
def test_file_that_is_no_recipe_is_told(content, tmp_path):
    file = tmp_path / "recipe.yml"
    file.write_text(content)
    result = CliRunner().invoke(cli.main, ["inspect", str(file)])
    assert result.exit_code == 1
    assert "recipe.yml is not a recipe" in words(result.output)


@pytest.mark.parametrize("command", ["inspect", "compare"])
@pytest.mark.parametrize("fault", ["no base", "not a recipe", "no such method", "missing tensor"])
def test_faults_are_messages(command, fault, models, tmp_path):
    recipe, told = models.recipe("ties", parameters={"weight": 1.0}), "no base_model"
    if fault == "no base":
        del recipe["base_model"]
    elif fault == "not a recipe":
        del recipe["models"]
        told = "not a recipe"
    elif fault == "no such method":
        recipe["merge_method"], told = "tie", "no merge method tie"
    else:
        weights = dict(models.agents[0])
        del weights["model.layers.1.mlp.up_proj.weight"]
        path = checkpoints.save(tmp_path / "broken", models.config, weights)
        recipe["models"][0]["model"], told = path, "1 tensor missing"
    result = run(command, recipe, tmp_path)
    assert result.exit_code == 1
    assert told in words(result.output)
    assert isinstance(result.exception, SystemExit)


def test_not_a_number_stops_the_pass(models, tmp_path):
    weights = {n: t.clone() for n, t in models.agents[0].items()}
    weights["model.norm.weight"][3] = float("nan")
    made = save_models(tmp_path / "made", models.config, models.base, [weights])
    result = run("inspect", made.recipe("ties", parameters={"weight": 1.0}), tmp_path)
    assert result.exit_code == 1
    assert "NaN or infinity in model.norm.weight" in result.output


def test_names_are_as_short_as_they_can_be():
    assert short_names(["a/b/one", "a/b/two"]) == ["one", "two"]
    assert short_names(["a/one/final", "a/two/final"]) == ["one/final", "two/final"]
    assert short_names(["org/model"]) == ["model"]
    assert short_names(["same", "same"]) == ["same", "same"]


def test_percentages_never_hide_a_few_or_a_missing_one():
    parts = (0, 1, 1e-6, 0.00123, 0.0321, 0.5, 0.9951, 0.999999)
    texts = ("0%", "100%", "<0.01%", "0.12%", "3.2%", "50%", "99.5%", ">99.99%")
    assert tuple(map(percent, parts)) == texts
    assert [power(v) for v in (1e-5, 3e-4, 0.1, 1.5e-5)] == ["1e-5", "3e-4", "0.1", "1.5e-05"]
