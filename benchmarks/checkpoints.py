"""Llama checkpoints of random weights: a base, and agents that changed a fifth of it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from safetensors import safe_open
from safetensors.torch import save_file

_DRAWN_AT_ONCE = 1 << 24
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

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)
        for number in range(self.layers):
            for name, shape in self._layer().items():
                yield f"model.layers.{number}.{name}.weight", shape

    def _layer(self) -> Shapes:
        widen = (self.intermediate, self.hidden)
        square = (self.hidden, self.hidden)
        return {
            **{f"self_attn.{p}_proj": square for p in "qkvo"},
            "mlp.gate_proj": widen,
            "mlp.up_proj": widen,
            "mlp.down_proj": widen[::-1],
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }

    def parameters(self) -> int:
        """Elements of one checkpoint."""
        return sum(torch.Size(shape).numel() for _, shape in self.shapes())

    def tensors(self) -> int:
        return sum(1 for _ in self.shapes())


DEFAULT = Sizes()


directory_option = click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(tempfile.gettempdir()) / "mergekit-ram-benchmark",
    show_default=True,
    help="Where the checkpoints are made once and kept.",
)


def make(directory: Path, agents: int, sizes: Sizes = DEFAULT) -> None:
    """Write ``base`` and ``agent-0`` … under the directory, a shard at a time."""
    folders = [directory / "base", *(directory / f"agent-{i}" for i in range(agents))]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    shards = list(_shards(sizes))
    index: dict[str, str] = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        base = {name: _weights(shape, generator) for name, shape in shapes.items()}
        save_file(base, folders[0] / file, metadata={"format": "pt"})
        for folder in folders[1:]:
            agent = {name: _train(base[name], generator) for name in base}
            save_file(agent, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, file)
    for folder in folders:
        _write_json(folder / "model.safetensors.index.json", {"weight_map": index})
        _write_json(
            folder / "config.json", sizes.config()
        )  # last: the mark of a whole one


def made(directory: Path, agents: int) -> bool:
    folders = ["base", *(f"agent-{i}" for i in range(agents))]
    return all((directory / folder / "config.json").exists() for folder in folders)


def read_all_write_one(directory: Path, agents: int, output: Path) -> float:
    """Seconds to read every checkpoint and write one of them, with safetensors alone."""
    start = time.perf_counter()
    others = [directory / f"agent-{i}" for i in range(agents)]
    output.mkdir()
    for file in sorted((directory / "base").glob("*.safetensors")):
        for folder in others:
            for _, tensor in _tensors(folder / file.name):
                tensor.clone()
        save_file({name: t.clone() for name, t in _tensors(file)}, output / file.name)
    return time.perf_counter() - start


def evict(directory: Path) -> None:
    """Take every checkpoint out of the operating system's page cache. Linux only."""
    os.sync()  # what is not written yet stays
    for file in directory.glob("*/*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def difference(left: Path, right: Path) -> tuple[float, float]:
    """The greatest absolute difference of two checkpoints, and the fraction of their elements that differ."""
    greatest, differing, total = 0.0, 0, 0
    files = files_by_tensor(right)
    for file in sorted(left.glob("*.safetensors")):
        for name, tensor in _tensors(file):
            with safe_open(files[name], "pt") as other:
                gap = tensor.float().sub_(other.get_tensor(name).float()).abs_()
            greatest = max(greatest, gap.max().item())
            differing += int(gap.count_nonzero())
            total += gap.numel()
    return greatest, differing / total


def _shards(sizes: Sizes) -> Iterator[Shapes]:
    shard: Shapes = {}
    elements = 0
    for name, shape in sizes.shapes():
        shard[name] = shape
        elements += torch.Size(shape).numel()
        if len(shard) == _SHARD_TENSORS or elements >= _SHARD_ELEMENTS:
            yield shard
            shard, elements = {}, 0
    if shard:
        yield shard


def _weights(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of a tensor with more elements than are drawn at once, the blocks are alike."""
    weights = torch.empty(shape, dtype=torch.bfloat16)
    blocks = weights.view(-1).split(_DRAWN_AT_ONCE)
    drawn = torch.randn(blocks[0].shape, generator=generator).mul_(_WEIGHT_SCALE)
    for block in blocks:
        block.copy_(drawn[: block.numel()])
    return weights


def _train(base: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    agent = base.clone()
    blocks = agent.view(-1).split(_DRAWN_AT_ONCE)
    update = torch.randn(blocks[0].shape, generator=generator).mul_(_UPDATE_SCALE)
    update.mul_(torch.rand(update.shape, generator=generator) < _DENSITY)
    for block in blocks:
        block.add_(update[: block.numel()])
    return agent


def files_by_tensor(folder: Path) -> dict[str, Path]:
    """The file of every tensor."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dictionary
            yield name, tensors.get_tensor(name)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
