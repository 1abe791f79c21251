"""Scores of a checkpoint: the part of unseen tasks that greedy generation answers exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mergekit_ram.tools.demo.families import FAMILIES, Split, Task, draw

# Longer than any answer, so that one that is right and goes on is wrong.
MAX_NEW_TOKENS = 13
BATCH = 512


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    sample: bool = False,
) -> list[list[int]]:
    """Each prompt's completion, token IDs up to and with the end if reached, in one batch.

    Args:
        sample: draw from the model's distribution, as it is, instead of taking the likeliest token.
    """
    inputs = tokenizer(list(prompts), padding=True, return_tensors="pt")
    with torch.inference_mode():
        sequences = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=sample,
            **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
        )
    completions = sequences[:, inputs.input_ids.shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in completions]


def is_right(tokenizer: PreTrainedTokenizerBase, task: Task, completion: Sequence[int]) -> bool:
    """Whether a completion is the task's answer, then the end, and nothing else."""
    return list(completion) == [
        *tokenizer(task.answer).input_ids,
        tokenizer.eos_token_id,
    ]


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]
) -> float:
    right = 0
    for start in range(0, len(tasks), BATCH):
        batch = tasks[start : start + BATCH]
        completions = generate(model, tokenizer, [task.prompt for task in batch])
        right += sum(
            is_right(tokenizer, task, completion) for task, completion in zip(batch, completions)
        )
    return right / len(tasks)


def score(
    checkpoint: str | Path,
    *,
    split: Split = "test",
    count: int = 500,
    seed: int = 0,
) -> dict[str, float]:
    """Accuracy of a checkpoint by family, over ``count`` tasks each, computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    return {
        family: accuracy(model, tokenizer, draw(family, split, count, seed)) for family in FAMILIES
    }
