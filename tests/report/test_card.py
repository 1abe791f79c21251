"""The model card's section on the agents."""

from __future__ import annotations

import pytest

from support.commands import merge
from support.expected import METHODS
from support.reports import FILE, read_report, strong


def table(card: str) -> list[list[str]]:
    lines = card[card.index("### Reinforced Agent Merging") :].splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("method", METHODS)
def test_model_card_describes_the_agents(method, make_models, tmp_path):
    models = make_models()
    merge(models.recipe(method, parameters=strong(method)), tmp_path)
    report = read_report(tmp_path / "merged")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert card.startswith("---\n")  # mergekit's own front matter
    assert card.count("### Reinforced Agent Merging") == 1
    assert f"{report.total:,}" in card
    _, _, *rows = table(card)
    assert [row[0] for row in rows] == models.agent_paths
    for row, agent in zip(rows, report.agents, strict=True):
        assert row[1].startswith(f"{agent.changed:,} (")
        assert row[2:4] == [f"{agent.unique:,}", f"{agent.shared:,}"]
        assert float(row[4]) == pytest.approx(agent.rho, rel=1e-3)
        factors = [float(part) for part in row[5].split(" – ")]
        assert factors[0] == pytest.approx(agent.lambda_range[0], rel=1e-3)
        assert factors[-1] == pytest.approx(agent.lambda_range[1], rel=1e-3)


def test_no_card_where_mergekit_writes_none(make_models, tmp_path):
    merge(make_models().recipe("ram"), tmp_path, "--no-write-model-card")
    assert not (tmp_path / "merged" / "README.md").exists()
    read_report(tmp_path / "merged")


def test_other_methods_have_no_report(make_models, tmp_path):
    merge(make_models().recipe("linear", parameters={"weight": 1.0}), tmp_path)
    assert not (tmp_path / "merged" / FILE).exists()
