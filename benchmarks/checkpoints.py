"""Llama checkpoints of random weights: a base, agents that changed a fifth of it, merges."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import yaml
from harness import Run, clock, in_new_process, run_process
from safetensors import safe_open
from safetensors.torch import save_file

# Tensors or elements of a file, whichever are fewer.
_SHARD_TENSORS, _SHARD_ELEMENTS = 1000, 1 << 27

# The scale of a language model's weights and of the updates of reinforcement learning.
_WEIGHT_SCALE, _UPDATE_SCALE, _DENSITY = 0.02, 1e-3, 0.2

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """Of a Llama model."""

    layers: int = 24
    hidden: int = 1024
    intermediate: int = 3584
    vocabulary: int = 32000
    tied: bool = False

    def config(self) -> dict:
        heads = max(1, self.hidden // 64)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> Shapes:
        """Of every tensor."""
        embedding, square = (self.vocabulary, self.hidden), (self.hidden, self.hidden)
        widen = (self.intermediate, self.hidden)
        layer = dict.fromkeys([f"self_attn.{p}_proj" for p in "qkvo"], square)
        layer |= {"mlp.gate_proj": widen, "mlp.up_proj": widen, "mlp.down_proj": widen[::-1]}
        norms = ("input_layernorm", "post_attention_layernorm")
        layer |= dict.fromkeys(norms, (self.hidden,))
        found = {"model.embed_tokens": embedding, "model.norm": (self.hidden,)}
        found |= {} if self.tied else {"lm_head": embedding}
        for i in range(self.layers):
            found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return {f"{name}.weight": shape for name, shape in found.items()}

    def shards(self) -> list[Shapes]:
        """The shapes, file by file."""
        shards: dict[tuple[int, int], Shapes] = {}
        before = 0
        for i, (name, shape) in enumerate(self.shapes().items()):
            place = before // _SHARD_ELEMENTS, i // _SHARD_TENSORS
            shards.setdefault(place, {})[name] = shape
            before += math.prod(shape)
        return list(shards.values())

    def parameters(self) -> int:
        """Elements of one checkpoint."""
        return sum(map(math.prod, self.shapes().values()))


TINY = Sizes(layers=2, hidden=64, intermediate=128, vocabulary=256)
EMBEDDING = Sizes(layers=0, hidden=8192, intermediate=64, vocabulary=152_064, tied=True)


def make(directory: Path, sizes: Sizes, agents: int = 3) -> None:
    """Write ``base`` and ``agent-0`` … under the directory, a shard at a time."""
    generator = torch.Generator().manual_seed(0)
    folders = [directory / name for name in (*(f"agent-{i}" for i in range(agents)), "base")]
    index: dict[str, str] = {}
    shards = sizes.shards()
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        base = {name: weights(shape, generator) for name, shape in shapes.items()}
        for folder in folders:
            agent = base
            if folder.name != "base":
                agent = {name: train(tensor, generator) for name, tensor in base.items()}
            save_file(agent, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, file)
    for folder in folders:  # the base's config last: the mark of a whole one
        index_file = folder / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"weight_map": index}))
        (folder / "config.json").write_text(json.dumps(sizes.config()))


def make_once(directory: Path, sizes: Sizes) -> Path:
    """Make a base and three agents unless they are there. Returns where."""
    models = directory / f"{sizes.parameters()}-parameters"
    if not (models / "base" / "config.json").exists():
        click.echo(f"making checkpoints in {models} …", err=True)
        in_new_process(make, models, sizes)
    return models


def weights(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype).mul_(_WEIGHT_SCALE)


def train(base: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The base with a fifth of its elements changed."""
    update, chance = torch.empty_like(base), torch.empty_like(base)
    update.normal_(std=_UPDATE_SCALE, generator=generator)
    return update.mul_(chance.uniform_(generator=generator) < _DENSITY).add_(base)


def tensors(elements: int, agents: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A base and its agents, ``[elements]`` each."""
    generator = torch.Generator().manual_seed(elements)
    base = weights((elements,), generator, dtype)
    return [base, *(train(base, generator) for _ in range(agents))]


def read_all_write_one(models: Path) -> Run:
    """With safetensors alone: what no merge can beat. For a process of its own."""

    def copy() -> None:
        for file in sorted(models.glob("agent-*/*.safetensors")):
            for _ in _tensors(file):
                pass
        for file in sorted(models.glob("base/*.safetensors")):
            save_file(dict(_tensors(file)), Path(output) / file.name)

    with tempfile.TemporaryDirectory(dir=models) as output:
        return clock(copy)


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dictionary
            yield name, opened.get_tensor(name).clone()


def evict(models: Path) -> None:
    """Take all checkpoints out of the operating system's page cache."""
    os.sync()  # what is not written yet stays
    for file in models.glob("*/*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


_BUILT_IN = "built-in "
# Merge methods, ``built-in`` mergekit's that ours replace, with the parameters of every agent.
METHODS: dict[str, dict[str, float]] = {
    "built-in ram": {},
    "built-in ramplus_tl": {},
    "ram": {},
    "ramplus_tl": {},
    "ramplus": {},
    "ties": {"weight": 1.0, "density": 0.5},
    "dare_ties": {"weight": 1.0, "density": 0.5},
    "task_arithmetic": {"weight": 1.0},
    "linear": {"weight": 1.0},
}


def write_recipe(path: Path, method: str, models: Path) -> Path:
    """Of all agents there are."""
    agents = sorted(models.glob("agent-*"))
    content = {
        "merge_method": method.removeprefix(_BUILT_IN),
        "models": [{"model": str(a), "parameters": METHODS[method]} for a in agents],
        "dtype": "bfloat16",
    }
    if method != "linear":
        content["base_model"] = str(models / "base")
    path.write_text(yaml.safe_dump(content))
    return path


def merge(method: str, models: Path, *options: str) -> Run:
    """A ``mergekit-yaml`` of its own, its output removed. Options are of ``mergekit-yaml``."""
    with tempfile.TemporaryDirectory(dir=models) as place:
        recipe = write_recipe(Path(place) / "recipe.yml", method, models)
        program = Path(sys.executable).with_name("mergekit-yaml")
        quiet = ("--no-copy-tokenizer", "--quiet")
        disabled = str(int(method.startswith(_BUILT_IN)))
        return run_process(
            [program, recipe, Path(place) / "merged", *quiet, *options],
            {"MERGEKIT_RAM_DISABLE": disabled},
        )


# What looks at the agents of a recipe instead of merging them.
TOOLS = ("inspect", "inspect --exact", "compare")


def look(tool: str, models: Path) -> Run:
    """A ``mergekit-ram inspect`` or ``compare`` of its own."""
    recipe = write_recipe(models / "recipe.yml", "ramplus", models)
    command, *options = tool.split()
    program = Path(sys.executable).with_name("mergekit-ram")
    return run_process([program, command, recipe, *options, "--quiet"])


def import_mergekit() -> Run:
    """What every merge begins with."""
    return run_process([sys.executable, "-c", "import mergekit.scripts.run_yaml"])
