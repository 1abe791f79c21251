"""Merges on several accelerators."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import mergekit.multigpu_executor
import pytest
from mergekit.graph import Executor

from support.commands import merge, plan_recipe
from support.expected import METHODS, STRONG, check, expect, plan


@pytest.fixture
def two_accelerators(monkeypatch):
    """Let mergekit's multi-GPU executor take the CPU for two accelerators."""
    module = mergekit.multigpu_executor

    def work(self, task_list, cached_values, device, quiet):
        executor = Executor(task_list, cached_values=cached_values)
        for handle, result in executor._run(quiet=quiet):
            if handle not in self.targets | self.trailing_dependencies:
                result = None
            self.task_completion_queue.put((handle._index, result))

    monkeypatch.setattr(module, "get_torch_accelerator_count", lambda *_: 2)
    monkeypatch.setattr(module, "get_torch_accelerator_type", lambda *_: "cuda")
    monkeypatch.setattr(module.MultiGPUExecutor, "_device_worker", work)


def islands(recipe: Mapping, out: Path, caplog) -> int:
    caplog.clear()
    targets = plan_recipe(recipe).plan_to_disk(str(out))
    with caplog.at_level(logging.INFO, "mergekit.multigpu_executor"):
        executor = mergekit.multigpu_executor.MultiGPUExecutor(targets)
    assert len(executor.gpu_assignments) == 2
    (found,) = re.findall(r"Found (\d+) islands", caplog.text)
    return int(found)


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_stays_an_island_of_its_own(
    method, make_models, tmp_path, caplog, two_accelerators
):
    models = make_models("llama", tied=False)
    agents = [{"weight": 1.0}] * 3
    theirs = islands(models.recipe("task_arithmetic", agents=agents), tmp_path, caplog)
    assert theirs == len(models.base)
    assert islands(models.recipe(method), tmp_path, caplog) == theirs


def test_multi_gpu_executor_merges_by_the_model_wide_ratio(make_models, tmp_path, two_accelerators):
    models = make_models("llama", tied=False)
    recipe = models.recipe("ramplus", parameters=STRONG)
    output = merge(recipe, tmp_path, "--multi-gpu")
    check(output, expect("ramplus", plan(models.base, models.agents, STRONG)))
