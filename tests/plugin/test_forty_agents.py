"""Forty agents merge and can be looked at."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

from mergekit_ram import cli
from support import checkpoints
from support.commands import run_merge
from support.recipes import save_agents


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_forty_agents_can_be_looked_at(command, tmp_path):
    base, *agents = save_agents(tmp_path, 40)
    recipe = {
        "merge_method": "ramplus",
        "base_model": base,
        "models": [{"model": agent} for agent in agents],
    }
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    arguments = [
        command,
        str(tmp_path / "recipe.yml"),
        "--json",
        str(tmp_path / "found"),
    ]
    if command == "compare":
        arguments += ["--methods", "ram"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found").read_text())
    of_agents = found["methods"][0] if command == "compare" else found
    assert len(of_agents["agents"]) == 40


@pytest.mark.parametrize("method", ["ram", "ramplus", "ramplus_tl"])
def test_forty_agents_merge_and_are_reported(method, tmp_path):
    paths = save_agents(tmp_path, 40)
    result = run_merge(tmp_path, paths, method)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    weights = [checkpoints.read(path) for path in paths]
    base, *agents = weights
    for agent, found in zip(agents, report["agents"], strict=True):
        changed = sum(
            int(((agent[n].double() - base[n].double()).abs() > 1e-5).sum()) for n in base
        )
        assert found["changed"] == changed
        assert sum(found["overlap_histogram"]) == changed
