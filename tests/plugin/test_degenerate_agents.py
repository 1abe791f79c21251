"""Degenerate agents have a defined result."""

from __future__ import annotations

import logging
import os
import warnings

import pytest
import torch

from support import checkpoints
from support.checkpoints import Weights
from support.commands import merge
from support.expected import METHODS, STRONG, check, expect, plan
from support.recipes import save_models


def degenerate(name: str, base: Weights) -> list[Weights]:
    one, two = checkpoints.change(base, 1), checkpoints.change(base, 2)
    return {
        "an agent equal to the base": lambda: [base, one, two],
        "two identical agents": lambda: [one, one, two],
        "only identical agents": lambda: [one, one],
        "one agent": lambda: [one],
        "all equal to the base": lambda: [base, base],
        "only an agent equal to the base": lambda: [base],
        "an agent without unique changes": lambda: [
            # It changed, otherwise, some of what the first changed.
            {n: torch.where(one[n] != base[n], two[n], base[n]) for n in base},
            one,
        ],
        "agents without shared changes": lambda: [
            {n: torch.where(one[n] == base[n], two[n], base[n]) for n in base},
            one,
        ],
    }[name]()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case",
    [
        "an agent equal to the base",
        "two identical agents",
        "only identical agents",
        "one agent",
        "all equal to the base",
        "only an agent equal to the base",
        "an agent without unique changes",
        "agents without shared changes",
    ],
)
def test_degenerate_agents_have_a_defined_result(case, method, make_models, tmp_path, caplog):
    models = make_models()
    agents = degenerate(case, models.base)
    models = save_models(tmp_path, models.config, models.base, agents)
    parameters = {} if method == "ram" else STRONG
    recipe = models.recipe(method, parameters=parameters)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        output = merge(recipe, tmp_path)
    assert all(tensor.isfinite().all() for tensor in output.values())
    check(output, expect(method, plan(models.base, agents, parameters)))
    ours = ("mergekit_ram", "torch", "numpy")
    assert not [w for w in warned if any(f"{os.sep}{part}{os.sep}" in w.filename for part in ours)]
    # At most one an agent, however many tensors there are.
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum(r.name.startswith("mergekit_ram") for r in logged) <= len(agents)
