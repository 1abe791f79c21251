"""Train agents to merge: a base, and from it agents by reinforcement learning and by imitation.

    python benchmarks/agents/train.py --seed 0 --seed 1

A checkpoint that is there is not trained again, so a stopped run goes on where it was. Everything
is drawn from the seed; on one machine the same seed gives the same weights.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from mergekit_ram.tools.demo.evaluate import accuracy, generate, is_right
from mergekit_ram.tools.demo.families import FAMILIES, Task, character_tokenizer, draw, stream
from mergekit_ram.tools.demo.run import CHECKPOINTS

RUNS = Path(__file__).parent / "runs"
BASE = RUNS / "base"  # which all agents start from
TRAINING_FILE = "training.json"
BASE_SEED = 0

# The base: steps, tasks of each family a step, learning rate; accuracy at which a family rests.
BASE_STEPS, BASE_BATCH, BASE_LR, KNOWN = 500, 32, 3e-3, 0.6
CHECK_EVERY = 25

# Agents: steps; GRPO's prompts a step, completions a prompt, learning rate; imitation's tasks.
STEPS, PROMPTS, GROUP, RL_LR, SFT_BATCH = 70, 16, 8, 5e-5, 32
CLIP_NORM = 1.0


def new_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    hidden_size = 96
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            # Weights this narrow learn little from the default of 0.02.
            initializer_range=hidden_size**-0.5,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def log_likelihood(
    model: Qwen2ForCausalLM, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Log probability of every completion token, flat, and the sequence that each belongs to."""
    longest = max(map(len, map(lambda p, c: [*p, *c], prompts, completions)))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    predicted = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor([*prompt, *completion])
        predicted[row, len(prompt) : end] = True
    # Padding is on the right, where a causal model does not see it: no attention mask is needed.
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][predicted[:, 1:]]
    loss = torch.nn.functional.cross_entropy(
        model.lm_head(hidden), ids[predicted], reduction="none"
    )
    return -loss, predicted.nonzero()[:, 0]


def imitation_loss(model, tokenizer, tasks: Sequence[Task]) -> tuple[Tensor, float]:
    """Mean negative log likelihood of the right answers, and the same as a number."""
    prompts = tokenizer([task.prompt for task in tasks]).input_ids
    answers = tokenizer([task.answer + tokenizer.eos_token for task in tasks]).input_ids
    loss = -log_likelihood(model, prompts, answers)[0].mean()
    return loss, loss.item()


def grpo_loss(model, tokenizer, tasks: Sequence[Task]) -> tuple[Tensor | None, float]:
    """Group-relative policy gradient (Shao et al., 2024) on own completions, and their mean reward.

    The reward is the verifier's 0 or 1: no right answer is ever shown to the model. The policy
    takes one step per batch of completions, so the importance ratio is 1 and nothing is to be
    clipped.
    """
    tasks = [task for task in tasks for _ in range(GROUP)]
    completions = generate(model, tokenizer, [t.prompt for t in tasks], sample=True)
    rewards = torch.tensor([float(is_right(tokenizer, t, c)) for t, c in zip(tasks, completions)])
    groups = rewards.view(-1, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    # A group of equal rewards has no advantages, so it need not be gone through.
    kept = advantages.nonzero()[:, 0].tolist()
    if not kept:
        return None, rewards.mean().item()
    prompts = tokenizer([tasks[i].prompt for i in kept]).input_ids
    log_probabilities, sequence = log_likelihood(model, prompts, [completions[i] for i in kept])
    weights = advantages[kept][sequence] / sum(map(len, completions))
    return -(weights * log_probabilities).sum(), rewards.mean().item()


# Of the model's parameters, at a learning rate that every step sets.
optimizer_for = functools.partial(torch.optim.AdamW, betas=(0.9, 0.98), weight_decay=0.0)


def take_step(model, optimizer, loss: Tensor, learning_rate: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def train_base(tokenizer) -> Qwen2ForCausalLM:
    """Imitate right answers. A family that is known well leaves the mixture until it falls back."""
    torch.manual_seed(BASE_SEED)
    model = new_model(tokenizer)
    optimizer = optimizer_for(model.parameters())
    tasks = {family: stream(family, "train", f"base {BASE_SEED}") for family in FAMILIES}
    held_out = {family: draw(family, "validation", 200, BASE_SEED) for family in FAMILIES}
    families = list(FAMILIES)
    progress = tqdm(range(1, BASE_STEPS + 1), desc="base")
    for step in progress:
        batches = [list(islice(tasks[family], BASE_BATCH)) for family in families]
        losses = [imitation_loss(model, tokenizer, batch)[0] for batch in batches]
        take_step(model, optimizer, sum(losses) / len(losses), BASE_LR)
        if step % CHECK_EVERY == 0:
            scores = {f: accuracy(model, tokenizer, held_out[f]) for f in FAMILIES}
            progress.set_postfix({f: f"{s:.0%}" for f, s in scores.items()})
            families = [f for f, s in scores.items() if s < KNOWN] or list(FAMILIES)
    return model


class Training(NamedTuple):
    """How an agent is trained: the loss, its tasks' name and number a step, the learning rate."""

    loss: Callable[..., tuple[Tensor | None, float]]
    tasks: str
    batch: int
    learning_rate: float


# Reinforcement learning; for contrast imitation, at ten times its learning rate, and at its.
TRAININGS = {
    "rl": Training(grpo_loss, "rl", PROMPTS, RL_LR),
    "sft": Training(imitation_loss, "sft", SFT_BATCH, 10 * RL_LR),
    "sft_slow": Training(imitation_loss, "sft", SFT_BATCH, RL_LR),
}


def train_agent(model, tokenizer, kind: str, family: str, seed: int) -> Qwen2ForCausalLM:
    training = TRAININGS[kind]
    torch.manual_seed(seed)
    optimizer = optimizer_for(model.parameters())
    tasks = stream(family, "train", f"{training.tasks} {seed}")
    progress = tqdm(range(1, STEPS + 1), desc=f"seed {seed}: {kind} {family}")
    for step in progress:
        loss, shown = training.loss(model, tokenizer, list(islice(tasks, training.batch)))
        if loss is not None:
            take_step(model, optimizer, loss, training.learning_rate * min(1, step / 10))
        progress.set_postfix({"reward" if kind == "rl" else "loss": f"{shown:.3f}"})
    return model


def train_agents(seed: int) -> Path:
    """Train what is missing of one seed's agents of every kind. Returns their directory."""
    finish(BASE, train_base)
    agents = RUNS / f"seed{seed}"

    def train(kind: str, family: str, tokenizer) -> Qwen2ForCausalLM:
        # In float32, the dtype it is trained in.
        model = Qwen2ForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        return train_agent(model, tokenizer, kind, family, seed)

    for kind in TRAININGS:
        for family in FAMILIES:
            finish(agents / f"{kind}_{family}", functools.partial(train, kind, family))
    return agents


def finish(directory: Path, train: Callable[..., Qwen2ForCausalLM]) -> None:
    """Train a model and save it in bfloat16, unless that has been done."""
    if (directory / TRAINING_FILE).exists():
        return
    started, tokenizer = time.perf_counter(), character_tokenizer()
    model = train(tokenizer)
    seconds = round(time.perf_counter() - started)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # Last: it tells that the checkpoint is whole.
    (directory / TRAINING_FILE).write_text(json.dumps({"seconds": seconds}, indent=2) + "\n")


@click.command()
@click.option("--seed", "seeds", type=int, multiple=True, default=range(5))
@click.option("--bundle", is_flag=True, help="Make the first seed's the demo's models.")
def main(seeds: tuple[int, ...], bundle: bool) -> None:
    """Train the base and the agents of the seeds; finished checkpoints are kept."""
    torch.set_num_threads(1)
    agents = [train_agents(seed) for seed in seeds]
    if bundle:
        shutil.copytree(BASE, CHECKPOINTS / "base", dirs_exist_ok=True)
        for family in FAMILIES:
            shutil.copytree(agents[0] / f"rl_{family}", CHECKPOINTS / family, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
