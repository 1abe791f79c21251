from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import checkpoints
from support.recipes import recipe_of, write_recipe


@pytest.fixture
def models(tmp_path) -> list[Path]:
    """Directories of a base and two agents, beside a recipe of theirs."""
    config, base = checkpoints.make_base("qwen2", tied=False)
    weights = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [tmp_path / f"model{i}" for i in range(3)]
    for path, its in zip(paths, weights, strict=True):
        checkpoints.save(path, config, checkpoints.cast(its, torch.bfloat16), shards=2)
    write_recipe(recipe_of(*map(str, paths)), tmp_path)
    return paths
