"""Small real checkpoints for tests: a base of random weights, agents as sparse changes of it, and
reading them back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

Weights = dict[str, torch.Tensor]

_DECODER = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "max_position_embeddings": 32,
}
_GEMMA2 = {**_DECODER, "head_dim": 8}
_T5 = {
    "vocab_size": 48,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}

# Name → (class of the configuration, class of the model, sizes). To mergekit the biases of GLM4 are
# optional and T5 is made of three modules, all layers gated.
ARCHITECTURES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "mistral": ("MistralConfig", "MistralForCausalLM", _DECODER),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA2),
    "glm4": (
        "Glm4Config",
        "Glm4ForCausalLM",
        {**_GEMMA2, "attention_bias": True, "pad_token_id": 0},
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
}


def make_base(
    architecture: str, *, tied: bool = True, seed: int = 0, **sizes
) -> tuple[transformers.PretrainedConfig, Weights]:
    """A model's configuration and its float32 weights, under the names and in the number a
    checkpoint has.

    A few weights of every tensor are −0, which a sum with +0 would turn into +0.
    """
    config_class, model_class, defaults = ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**{**defaults, **sizes}, tie_word_embeddings=tied)
    config.architectures = [model_class]
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config)
    weights, stored = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in stored:
            stored.add(tensor.data_ptr())
            weights[name] = tensor.detach().clone()
    for tensor in weights.values():
        if tensor.numel() > 8:
            tensor.view(-1)[::7] = -0.0
    return config, weights


def change(
    weights: Mapping[str, torch.Tensor],
    seed: int,
    *,
    fraction: float = 0.2,
    size: float = 0.02,
    names: str = "",
) -> Weights:
    """An agent: about that fraction of the elements changed, by at least size / 4, where the name
    contains ``names``.

    Agents of different seeds overlap by chance. Non-floating tensors stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    agent = {}
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or names not in name:
            agent[name] = tensor.clone()
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        update = (noise.abs() + 0.25) * size * noise.sign()
        changed = torch.rand(tensor.shape, generator=generator) < fraction
        updated = (tensor.double() + update).to(tensor.dtype)
        agent[name] = torch.where(changed, updated, tensor)
    return agent


def cast(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weights:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def save(
    directory: Path,
    config: transformers.PretrainedConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    shards: int = 1,
    pickle: bool = False,
    tokens: list[str] | None = None,
) -> str:
    """Write a checkpoint as Hugging Face does.

    Args:
        shards: number of files the tensors are spread over.
        pickle: ``.bin`` files instead of safetensors.
        tokens: vocabulary of a tokenizer to write beside the weights.

    Returns:
        The directory, as a recipe names it.
    """
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    stem, suffix = ("pytorch_model", ".bin") if pickle else ("model", ".safetensors")
    names = list(weights)
    if shards == 1:
        save_state_dict(directory / f"{stem}{suffix}", weights)
    else:
        places = {}
        for i in range(shards):
            file = f"{stem}-{i + 1:05}-of-{shards:05}{suffix}"
            part = {name: weights[name] for name in names[i::shards]}
            save_state_dict(directory / file, part)
            places.update(dict.fromkeys(part, file))
        index = {"metadata": {}, "weight_map": places}
        (directory / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    if tokens is not None:
        make_tokenizer(tokens).save_pretrained(directory)
    return str(directory)


def save_state_dict(file: Path, weights: Mapping[str, torch.Tensor]) -> str:
    """Write one file of tensors, pickled if it is a ``.bin``; returns its path, as a recipe names
    it.
    """
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if file.suffix == ".bin":
        torch.save(weights, file)
    else:
        save_file(weights, file, metadata={"format": "pt"})
    return str(file)


def read(directory: Path) -> Weights:
    """All tensors of a checkpoint, whatever its files."""
    weights = {}
    for file in sorted(Path(directory).iterdir()):
        if file.suffix == ".safetensors":
            part = load_file(file)
        elif file.suffix == ".bin":
            part = torch.load(file, weights_only=True)
        else:
            continue
        assert not part.keys() & weights.keys(), f"{file} repeats tensors"
        weights.update(part)
    return weights


def make_tokenizer(tokens: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of whole words, whose IDs are their places in the list."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=tokens[0])
