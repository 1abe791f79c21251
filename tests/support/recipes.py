"""Small checkpoints on disk, and recipes that merge them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers
import yaml

from support import ROOT, checkpoints
from support.checkpoints import Weights
from support.tensors import F32

EXAMPLES = sorted((ROOT / "example_yamls").glob("*.yml"))


@dataclasses.dataclass
class Models:
    """A base and its agents: their weights as saved, and their paths."""

    config: transformers.PretrainedConfig
    base: Weights
    agents: list[Weights]
    base_path: str
    agent_paths: list[str]

    def recipe(self, method: str, *, agents: Sequence[Mapping] = (), **entries) -> dict:
        """A recipe that merges all agents.

        Args:
            agents: parameters of the first, second, … agent.
            entries: the recipe's other entries; ``parameters`` among them.
        """
        models = [{"model": path} for path in self.agent_paths]
        for model, parameters in zip(models, agents, strict=False):
            if parameters:
                model["parameters"] = dict(parameters)
        return {
            "merge_method": method,
            "base_model": self.base_path,
            "models": models,
            **entries,
        }


def save_models(directory: Path, config, base: Weights, agents, shards=1, pickle=False) -> Models:
    def write(name, weights):
        return checkpoints.save(directory / name, config, weights, shards=shards, pickle=pickle)

    paths = [write(f"agent{i}", agent) for i, agent in enumerate(agents)]
    return Models(config, base, list(agents), write("base", base), paths)


def slice_recipe(recipe: dict, models: Models, places: Sequence[tuple]) -> None:
    """Have a recipe take slices: for each, the layers ``[first, last + 1]`` of the base and of some
    agents.
    """
    del recipe["models"]
    recipe["slices"] = [
        {
            "sources": [
                {"model": path, "layer_range": list(layers)}
                for path in (
                    models.base_path,
                    *(models.agent_paths[i] for i in members),
                )
            ]
        }
        for layers, members in places
    ]


def write_recipe(recipe: Mapping | str, directory: Path) -> Path:
    file = directory / "recipe.yml"
    file.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe))
    return file


def state_dicts(models: Models) -> tuple[Weights, list[Weights]]:
    """Weights with what else a state dict holds: a counter, an empty tensor, a single number."""
    extra = {"steps": torch.tensor(7), "empty": torch.zeros(0, 4)}
    scale = {"scale": torch.tensor(0.5)}
    agents = [
        {**agent, **extra, "scale": scale["scale"] + 0.25 * i}
        for i, agent in enumerate(models.agents)
    ]
    return {**models.base, **extra, **scale}, agents


def raw_recipe(
    directory: Path,
    base: Weights,
    agents,
    method: str,
    suffix=".safetensors",
    **parameters,
) -> dict:
    files = [
        checkpoints.save_state_dict(directory / f"{name}{suffix}", weights)
        for name, weights in [("base", base), *enumerate(agents)]
    ]
    return {
        "merge_method": method,
        "base_model": files[0],
        "models": [{"model": file} for file in files[1:]],
        "parameters": parameters,
    }


# Transformers adds the first to the tokenizer of any Qwen2.
TOKENS = ["<|endoftext|>", *(f"token{i}" for i in range(1, 48))]
VOCABULARY_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")
MULTI = """\
name: halfway
merge_method: ramplus
base_model: {base}
models:
  - model: {agents[0]}
  - model: {agents[1]}
parameters:
  r: 1.0
  alpha: 10.0
---
merge_method: ramplus
base_model: {base}
models:
  - model: halfway
  - model: {agents[2]}
parameters:
  r: 1.0
  alpha: 10.0
"""
NAN, INFINITE = float("nan"), float("inf")
INVALID = [
    ("ram", {"epsilon": -1e-6}, [], ["epsilon", "-1e-06"]),
    ("ram", {"epsilon": NAN}, [], ["epsilon", "nan"]),
    ("ram", {"epsilon": "small"}, [], ["epsilon", "small"]),
    ("ram", {"lambda": INFINITE}, [], ["lambda", "inf"]),
    ("ram", {"lambda": NAN}, [], ["lambda", "nan"]),
    ("ram", {"shared": "median"}, [], ["shared", "median"]),
    ("ram", {"normalize": "maybe"}, [], ["normalize", "maybe"]),
    ("ram", {}, [{"density": 0.0}], ["density", "0.0"]),
    ("ram", {}, [{"density": 1.25}], ["density", "1.25"]),
    ("ram", {}, [{"density": NAN}], ["density", "nan"]),
    ("ram", {}, [{"weight": NAN}], ["weight", "nan"]),
    ("ram", {}, [{"keep_unique": "perhaps"}], ["keep_unique", "perhaps"]),
    ("ram", {"weight": 0}, [], ["weight", "0"]),
    ("ram", {}, [{"weight": 1}, {"weight": -1}], ["weight", "-1"]),
    ("ram", {"epsilon": [1e-5, -1.0]}, [], ["epsilon", "-1.0"]),
    ("ramplus", {"r": -0.5}, [], ["r: -0.5"]),
    ("ramplus", {"r": NAN}, [], ["r: nan"]),
    ("ramplus", {"alpha": -0.25}, [], ["alpha", "-0.25"]),
    ("ramplus", {"ratio": "both"}, [], ["ratio", "both"]),
    ("ramplus_tl", {"r": -0.5}, [], ["r: -0.5"]),
    ("ramplus_tl", {"alpha": NAN}, [], ["alpha", "nan"]),
]


def new_models(
    directory: Path,
    architecture: str,
    *,
    tied: bool = True,
    dtypes: Sequence[torch.dtype] = (F32,) * 4,
    shards: int = 1,
    pickle: bool = False,
    **sizes,
) -> Models:
    """A base and agents that each changed more of it than the one before.

    Args:
        dtypes: the base's and every agent's.
    """
    config, base = checkpoints.make_base(architecture, tied=tied, **sizes)
    agents = [
        checkpoints.change(base, seed, fraction=0.1 * (1 + seed)) for seed in range(1, len(dtypes))
    ]
    base, *agents = map(checkpoints.cast, [base, *agents], dtypes)
    return save_models(directory, config, base, agents, shards, pickle)


def spoken_models(directory: Path) -> Models:
    """A base of 48 tokens and two agents with tokenizers.

    One has the same tokens in another order and one more, the other is like the base.
    """
    config, base = checkpoints.make_base("qwen2", tied=False)
    agents = [checkpoints.change(base, seed) for seed in (1, 2)]
    wider, _ = checkpoints.make_base("qwen2", tied=False, vocab_size=49)
    order = [0, *range(47, 0, -1)]
    stored = dict(agents[0])
    for name in VOCABULARY_WEIGHTS:
        stored[name] = torch.cat([agents[0][name][order], torch.full((1, 16), 0.5)])
    shuffled = [TOKENS[i] for i in order]
    return Models(
        config,
        base,
        agents,
        checkpoints.save(directory / "base", config, base, tokens=TOKENS),
        [
            checkpoints.save(directory / "wide", wider, stored, tokens=[*shuffled, "tool"]),
            checkpoints.save(directory / "same", config, agents[1], tokens=TOKENS),
        ],
    )


def save_agents(
    directory: Path,
    agents: int,
    dtype: torch.dtype = F32,
    spoil: Callable | None = None,
    tied: bool = True,
) -> list[str]:
    """Paths of a base and that many agents, spoilt before they are saved."""
    config, base = checkpoints.make_base("qwen2", tied=tied)
    models = [base, *(checkpoints.change(base, seed) for seed in range(agents))]
    models = [checkpoints.cast(weights, dtype) for weights in models]
    if spoil:
        spoil(*models)
    return [
        checkpoints.save(directory / f"model{i}", config, weights)
        for i, weights in enumerate(models)
    ]


def recipe_of(base: str, *agents: str, method: str = "ram", **entries) -> dict:
    return {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": agent} for agent in agents],
        **entries,
    }


def write_ramplus(directory: Path, base: str, *agents: str, **entries) -> str:
    recipe = recipe_of(base, *agents, method="ramplus", **entries)
    return str(write_recipe(recipe, directory))
