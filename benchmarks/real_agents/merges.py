"""Merging by mergekit, in this process.

mergekit merges and writes in float32. The result's task vector is then scaled by lambda in float32
and rounded once to bfloat16: for methods that know ``lambda`` this is their own with
``dtype: float32`` and ``out_dtype: bfloat16``; ``linear`` and ``sce``, which do not, get it so too.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from methods import Setting
from safetensors.torch import load_file
from torch import Tensor

SEED = 0  # of the methods that drop at random
BASELESS = {"linear"}


def recipe(
    method: str, parameters: Mapping[str, float], base: Path, agents: Sequence[Path]
) -> dict:
    """As one would write it; a weight of 1 for every agent, which some methods require."""
    contents: dict[str, Any] = {
        "merge_method": method,
        "models": [{"model": str(agent), "parameters": {"weight": 1.0}} for agent in agents],
        "parameters": dict(parameters),
        "dtype": "float32",
    }
    return contents if method in BASELESS else {**contents, "base_model": str(base)}


def merge(method: str, setting: Setting, base: Path, agents: Sequence[Path]) -> dict[str, Tensor]:
    """The merged model at lambda 1, in float32."""
    config = MergeConfiguration.model_validate(
        recipe(method, dict(setting.parameters), base, agents)
    )
    options = MergeOptions(
        random_seed=SEED, quiet=True, copy_tokenizer=False, write_model_card=False
    )
    logging.getLogger("mergekit").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=memory_directory()) as target:
        run_merge(config, target, options)
        return load_file(Path(target) / "model.safetensors")


def scaled(
    merged: Mapping[str, Tensor], base: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Base plus the scaled task vector, rounded to bfloat16."""
    found = {}
    for name, tensor in merged.items():
        start = base[name].float()
        exact = tensor if scale == 1.0 else start + scale * (tensor - start)
        found[name] = exact.to(torch.bfloat16)
    return found


def memory_directory() -> str | None:
    """Where files are memory, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
