"""What is odd about agents is warned of, once a merge."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from support import checkpoints
from support.commands import merge, merge_raw
from support.expected import METHODS
from support.recipes import Models, raw_recipe, save_models, state_dicts
from support.reports import read_report
from support.tensors import BF16, F32


def warnings_of(recipe: Mapping, directory: Path, caplog) -> list[str]:
    """What a merge warns of: logged once each, and kept in the report."""
    caplog.clear()
    merge(recipe, directory)
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("mergekit_ram") and record.levelno >= logging.WARNING
    ]
    assert logged == read_report(directory / "merged").warnings
    return logged


def with_agents(make_models, directory: Path, agents, dtypes=None) -> Models:
    models = make_models()
    base = models.base
    if dtypes:
        base, *agents = [
            checkpoints.cast(weights, dtype)
            for weights, dtype in zip([base, *agents], dtypes, strict=True)
        ]
    return save_models(directory / "models", models.config, base, agents)


@pytest.mark.parametrize("method", METHODS)
def test_identical_agent_is_warned_of_once(method, make_models, tmp_path, caplog):
    base = make_models().base
    agents = [base, checkpoints.change(base, 1), checkpoints.change(base, 2)]
    models = with_agents(make_models, tmp_path, agents)
    (warning,) = warnings_of(models.recipe(method), tmp_path, caplog)
    assert models.agent_paths[0] in warning
    assert "does not differ from the base" in warning


@pytest.mark.parametrize("method", METHODS)
def test_dense_agent_is_warned_of_once(method, make_models, tmp_path, caplog):
    base = make_models().base
    dense = checkpoints.change(base, 1, fraction=0.95)
    agents = [checkpoints.change(base, 2, fraction=0.85), dense]
    models = with_agents(make_models, tmp_path, agents)
    (warning,) = warnings_of(models.recipe(method), tmp_path, caplog)
    assert models.agent_paths[1] in warning
    for part in ("95%", "dense", "LoRA", "epsilon", "ties"):
        assert part in warning


@pytest.mark.parametrize("method", METHODS)
def test_nothing_above_epsilon_is_warned_of_once(method, make_models, tmp_path, caplog):
    models = make_models()
    recipe = models.recipe(method, parameters={"epsilon": 10.0})
    (warning,) = warnings_of(recipe, tmp_path, caplog)
    assert "no agent changed any element" in warning
    assert "epsilon" in warning
    merged = checkpoints.read(tmp_path / "merged")
    assert all(torch.equal(merged[name], t) for name, t in models.base.items())


@pytest.mark.parametrize("method", METHODS)
def test_rounding_of_float32_agents_is_warned_of_once(method, make_models, tmp_path, caplog):
    base = make_models().base
    agents = [checkpoints.change(base, seed) for seed in (1, 2)]
    models = with_agents(make_models, tmp_path, agents, (BF16, F32, BF16))
    recipe = models.recipe(method, dtype="bfloat16")
    (warning,) = warnings_of(recipe, tmp_path, caplog)
    assert models.agent_paths[0] in warning
    assert models.agent_paths[1] not in warning
    for part in ("bfloat16", "float32", "out_dtype"):
        assert part in warning
    # What it recommends is not warned of, nor is nothing rounded.
    recipe |= {"dtype": "float32", "out_dtype": "bfloat16"}
    assert warnings_of(recipe, tmp_path, caplog) == []
    assert warnings_of(models.recipe(method), tmp_path, caplog) == []


def test_pickled_float32_agents_are_warned_of(make_models, tmp_path, caplog):
    recipe = make_models(pickle=True).recipe("ram", dtype="float16")
    (warning,) = warnings_of(recipe, tmp_path, caplog)
    assert "float16" in warning


@pytest.mark.parametrize("method", METHODS)
def test_sparse_agents_are_not_warned_of(method, make_models, tmp_path, caplog):
    assert warnings_of(make_models().recipe(method), tmp_path, caplog) == []


def test_state_dicts_are_warned_of_too(make_models, tmp_path, caplog):
    base, agents = state_dicts(make_models())
    agents[0] = dict(base)
    recipe = raw_recipe(tmp_path, base, agents, "ramplus")
    recipe["dtype"] = "bfloat16"
    merge_raw(recipe, tmp_path)
    logged = [r.getMessage() for r in caplog.records if r.name.startswith("mergekit_ram")]
    warnings = read_report(tmp_path / "merged").warnings
    assert [text for text in logged if text in warnings] == warnings
    assert len(warnings) == 2
    assert any("does not differ" in text for text in warnings)
    assert any("float32" in text for text in warnings)
