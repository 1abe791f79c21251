"""Merges that overflow stop or warn once."""

from __future__ import annotations

import json

import pytest
import torch
from mergekit.merge_methods import merge_state_dicts

from mergekit_ram.errors import OverflowedWeightsError
from mergekit_ram.report.record import MergeRecord
from support import checkpoints
from support.commands import run_merge
from support.recipes import save_agents
from support.tensors import F16


@pytest.mark.parametrize("method", ["ram", "ramplus", "ramplus_tl"])
def test_a_recipe_that_overflows_stops_or_warns_once(method, tmp_path, caplog):
    def spoil(base, agent, other):
        base["model.norm.weight"][:2] = other["model.norm.weight"][:2] = 40_000
        agent["model.norm.weight"][:2] = 60_000

    paths = save_agents(tmp_path, 2, F16, spoil)
    settings = {"lambda": 2.0}
    result = run_merge(tmp_path, paths, method, parameters=settings)
    assert result.exit_code == 1
    assert "2 elements of model.norm.weight overflow float16" in result.output
    assert not (tmp_path / "merged").exists()

    settings["non_finite"] = "ignore"
    caplog.clear()
    result = run_merge(tmp_path, paths, method, parameters=settings)
    assert result.exit_code == 0, result.output
    told = [r.message for r in caplog.records if "not finite" in r.message]
    assert len(told) == 1
    assert told[0].startswith("2 elements of model.norm.weight are not finite")
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    assert told[0] in report["warnings"]
    merged = checkpoints.read(tmp_path / "merged")["model.norm.weight"]
    assert (~merged.isfinite()).nonzero().flatten().tolist() == [0, 1]


def overflowing_tensors():
    base = {f"t{i}": torch.full((3,), 4e4, dtype=F16) for i in range(3)}
    agent = {name: tensor.clone() for name, tensor in base.items()}
    for name in ("t0", "t2"):
        agent[name][:2] = 6e4
    return base, agent


@pytest.mark.parametrize("method", ["ram", "ramplus", "ramplus_tl"])
def test_state_dicts_that_overflow_are_refused_or_warned_of_once(method, caplog):
    models = dict(enumerate(overflowing_tensors()))
    parameters = {"lambda": 2.0}
    with pytest.raises(OverflowedWeightsError, match=r"2 elements of t0.*float16"):
        merge_state_dicts(models, method, base=0, parameters=parameters)
    parameters["non_finite"] = "ignore"
    merge_state_dicts(models, method, base=0, parameters=parameters)
    (told,) = [r.message for r in caplog.records if "not finite" in r.message]
    assert told.startswith("4 elements of t0 and 1 more are not finite")


def test_a_record_that_nobody_reports_tells_of_the_first_overflow(caplog):
    silent, unread = (
        MergeRecord(method="ram", base_model=None, recipe={}, agents=[]) for _ in range(2)
    )
    silent.reported = True
    for record in (silent, unread):
        record.add_overflow("a", 3)
        record.add_overflow("b", 4)
        assert record.overflows == {"a": 3, "b": 4}
    (told,) = [r.message for r in caplog.records]
    assert told.startswith("3 elements of a are not finite")
