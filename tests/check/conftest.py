from __future__ import annotations

from pathlib import Path

import pytest

from support import checkpoints
from support.workshop import Workshop


@pytest.fixture
def shop(make_models, tmp_path) -> Workshop:
    (tmp_path / "models").mkdir()
    return Workshop(make_models(tied=False), tmp_path / "models")


@pytest.fixture
def models(tmp_path) -> list[Path]:
    """Directories of a base and two agents, of pickles."""
    config, base = checkpoints.make_base("qwen2", tied=False)
    weights = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [tmp_path / f"model{i}" for i in range(3)]
    for path, its in zip(paths, weights, strict=True):
        checkpoints.save(path, config, its, pickle=True)
    return paths
