"""Llama checkpoints of random weights: a base, and agents that changed a fifth of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_LAYERS = 24
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 1024, 3584, 32000
_LAYERS_PER_SHARD = 8

# The scale of a language model's weights and of the updates of reinforcement learning.
_WEIGHT_SCALE, _UPDATE_SCALE, _DENSITY = 0.02, 1e-3, 0.2

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": _VOCABULARY,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

Shapes = dict[str, tuple[int, ...]]


def make(directory: Path, agents: int) -> None:
    """Write ``base`` and ``agent-0`` … under the directory, a shard at a time."""
    folders = [directory / "base", *(directory / f"agent-{i}" for i in range(agents))]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    shards = list(_shards())
    index: dict[str, str] = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        base = {
            name: torch.randn(shape, generator=generator)
            .mul_(_WEIGHT_SCALE)
            .to(torch.bfloat16)
            for name, shape in shapes.items()
        }
        save_file(base, folders[0] / file, metadata={"format": "pt"})
        for folder in folders[1:]:
            agent = {name: _train(base[name], generator) for name in base}
            save_file(agent, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, file)
    for folder in folders:
        _write_json(folder / "model.safetensors.index.json", {"weight_map": index})
        _write_json(folder / "config.json", CONFIG)  # last: the mark of a whole one


def made(directory: Path, agents: int) -> bool:
    folders = ["base", *(f"agent-{i}" for i in range(agents))]
    return all((directory / folder / "config.json").exists() for folder in folders)


def parameters() -> int:
    """Elements of one checkpoint."""
    shapes = [shape for shard in _shards() for shape in shard.values()]
    return sum(torch.Size(shape).numel() for shape in shapes)


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


def difference(left: Path, right: Path) -> tuple[float, float]:
    """The greatest absolute difference of two checkpoints, and the fraction of their elements that differ."""
    greatest, differing, total = 0.0, 0, 0
    files = _files(right)
    for file in _files(left).values():
        for name, tensor in _tensors(file):
            with safe_open(files[name], "pt") as other:
                gap = tensor.float().sub_(other.get_tensor(name).float()).abs_()
            greatest = max(greatest, gap.max().item())
            differing += int(gap.count_nonzero())
            total += gap.numel()
    return greatest, differing / total


def _shards() -> Iterator[Shapes]:
    yield {
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (_VOCABULARY, _HIDDEN),
    }
    for start in range(0, _LAYERS, _LAYERS_PER_SHARD):
        layers = range(start, min(start + _LAYERS_PER_SHARD, _LAYERS))
        yield {name: shape for i in layers for name, shape in _layer(i).items()}


def _layer(number: int) -> Shapes:
    widen, narrow = (_INTERMEDIATE, _HIDDEN), (_HIDDEN, _INTERMEDIATE)
    shapes = {
        **{f"self_attn.{p}_proj": (_HIDDEN, _HIDDEN) for p in "qkvo"},
        "mlp.gate_proj": widen,
        "mlp.up_proj": widen,
        "mlp.down_proj": narrow,
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
    }
    return {f"model.layers.{number}.{key}.weight": shapes[key] for key in shapes}


def _train(base: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    update = torch.randn(base.shape, generator=generator).mul_(_UPDATE_SCALE)
    update.mul_(torch.rand(base.shape, generator=generator) < _DENSITY)
    return update.add_(base).to(base.dtype)


def _files(folder: Path) -> dict[str, Path]:
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
