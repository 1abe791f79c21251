"""Recipes for merging the agents, and running them with mergekit's own command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from mergekit.scripts import run_yaml

# What mergekit requires of a recipe without having a default for it.
_WEIGHTED = {"ties", "dare_ties", "dare_linear", "task_arithmetic", "linear"}
SEED = 0


def recipe(
    method: str,
    base: str | Path,
    agents: Sequence[str | Path],
    parameters: Mapping[str, Any] | None = None,
    weights: Sequence[float] | None = None,
) -> dict[str, Any]:
    """A recipe as plain data. Weights are 1 where a method wants some and none are given."""
    models: list[dict[str, Any]] = [{"model": str(agent)} for agent in agents]
    if weights is None and method in _WEIGHTED:
        weights = [1.0] * len(models)
    for model, weight in zip(models, weights or ()):
        model["parameters"] = {"weight": weight}
    result: dict[str, Any] = {"merge_method": method, "models": models}
    if method != "linear":
        result["base_model"] = str(base)
    if parameters:
        result["parameters"] = dict(parameters)
    return {**result, "dtype": "bfloat16"}


def write_recipe(path: Path, contents: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(contents), sort_keys=False), encoding="utf-8")
    return path


def merge(recipe_file: Path, out: Path) -> None:
    """``mergekit-yaml RECIPE_FILE OUT``, in this process, which saves mergekit's import."""
    # The random methods draw from the global generator.
    arguments = [str(recipe_file), str(out), "--quiet", "--random-seed", str(SEED)]
    run_yaml.main(arguments, standalone_mode=False)
