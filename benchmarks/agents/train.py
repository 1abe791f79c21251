"""Train agents to merge: a base, and from it one agent per family by reinforcement learning and one by imitation.

    python benchmarks/agents/train.py --seed 0 --seed 1

A checkpoint that is there is not trained again, so a stopped run goes on where it was. Everything is drawn from the
seed; on one machine the same seed gives the same weights.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from mergekit_ram.demo import CHECKPOINTS
from mergekit_ram.demo.evaluate import accuracy, generate, is_right
from mergekit_ram.demo.families import FAMILIES, Task, character_tokenizer, draw, stream

RUNS = Path(__file__).parent / "runs"
TRAINING_FILE = "training.json"
BASE_SEED = 0

# The base: steps, tasks of each family a step, learning rate of AdamW; accuracy at which a family takes a rest.
BASE_STEPS, BASE_BATCH, BASE_LR, KNOWN = 500, 32, 3e-3, 0.6
CHECK_EVERY = 25

# GRPO: prompts a step, completions a prompt, steps, learning rate of AdamW.
PROMPTS, GROUP, RL_STEPS, RL_LR = 16, 8, 70, 5e-5
# Supervised fine-tuning, for contrast, with ten times RL's learning rate as is usual, and with RL's.
SFT_STEPS, SFT_BATCH, SFT_LR = 70, 32, 5e-4
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
    model: Qwen2ForCausalLM,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """Log probability of every completion token, flat, and the index of the sequence that each belongs to."""
    longest = max(map(len, map(lambda p, c: [*p, *c], prompts, completions)))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    predicted = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor([*prompt, *completion])
        predicted[row, len(prompt) : end] = True
    # Padding is on the right, where a causal model does not see it, so no attention mask is needed.
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][predicted[:, 1:]]
    loss = torch.nn.functional.cross_entropy(
        model.lm_head(hidden), ids[predicted], reduction="none"
    )
    return -loss, predicted.nonzero()[:, 0]


def imitation_loss(model, tokenizer, tasks: Sequence[Task]) -> Tensor:
    """Mean negative log likelihood of the right answers."""
    prompts = tokenizer([task.prompt for task in tasks]).input_ids
    answers = tokenizer([task.answer + tokenizer.eos_token for task in tasks]).input_ids
    return -log_likelihood(model, prompts, answers)[0].mean()


def grpo_loss(model, tokenizer, tasks: Sequence[Task]) -> tuple[Tensor | None, float]:
    """Group-relative policy gradient (Shao et al., 2024) on the model's own completions, and their mean reward.

    The policy takes one step per batch of completions, so the importance ratio is 1 and nothing is to be clipped.
    """
    tasks = [task for task in tasks for _ in range(GROUP)]
    completions = generate(model, tokenizer, [t.prompt for t in tasks], sample=True)
    rewards = torch.tensor(
        [float(is_right(tokenizer, t, c)) for t, c in zip(tasks, completions)]
    )
    groups = rewards.view(-1, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    # A group of equal rewards has no advantages, so it need not be gone through.
    kept = advantages.nonzero()[:, 0].tolist()
    if not kept:
        return None, rewards.mean().item()
    prompts = tokenizer([tasks[i].prompt for i in kept]).input_ids
    log_probabilities, sequence = log_likelihood(
        model, prompts, [completions[i] for i in kept]
    )
    weights = advantages[kept][sequence] / sum(map(len, completions))
    return -(weights * log_probabilities).sum(), rewards.mean().item()


def optimizer_for(model, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )


def take_step(model, optimizer, loss: Tensor, learning_rate: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def take(tasks: Iterator[Task], count: int) -> list[Task]:
    return [next(tasks) for _ in range(count)]


def train_base(seed: int, tokenizer) -> Qwen2ForCausalLM:
    """Imitate right answers for a while. A family that is known well leaves the mixture until it falls back."""
    torch.manual_seed(seed)
    model = new_model(tokenizer)
    optimizer = optimizer_for(model, BASE_LR)
    tasks = {family: stream(family, "train", f"base {seed}") for family in FAMILIES}
    held_out = {family: draw(family, "validation", 200, seed) for family in FAMILIES}
    families = list(FAMILIES)
    progress = tqdm(range(1, BASE_STEPS + 1), desc="base")
    for step in progress:
        batches = [take(tasks[family], BASE_BATCH) for family in families]
        losses = [imitation_loss(model, tokenizer, batch) for batch in batches]
        take_step(model, optimizer, sum(losses) / len(losses), BASE_LR)
        if step % CHECK_EVERY == 0:
            scores = {f: accuracy(model, tokenizer, held_out[f]) for f in FAMILIES}
            progress.set_postfix({f: f"{s:.0%}" for f, s in scores.items()})
            families = [f for f, s in scores.items() if s < KNOWN] or list(FAMILIES)
    return model


def train_by_reinforcement(model, tokenizer, family: str, seed: int):
    """GRPO with the verifier's 0 or 1 as the reward: no right answer is ever shown to the model."""
    torch.manual_seed(seed)
    optimizer = optimizer_for(model, RL_LR)
    tasks = stream(family, "train", f"rl {seed}")
    progress = tqdm(range(1, RL_STEPS + 1), desc=f"seed {seed}: RL {family}")
    for step in progress:
        loss, reward = grpo_loss(model, tokenizer, take(tasks, PROMPTS))
        if loss is not None:
            take_step(model, optimizer, loss, RL_LR * min(1, step / 10))
        progress.set_postfix(reward=f"{reward:.2f}")
    return model


def train_by_imitation(
    model, tokenizer, family: str, seed: int, learning_rate: float = SFT_LR
):
    """Supervised fine-tuning on right answers."""
    torch.manual_seed(seed)
    optimizer = optimizer_for(model, learning_rate)
    tasks = stream(family, "train", f"sft {seed}")
    progress = tqdm(range(1, SFT_STEPS + 1), desc=f"seed {seed}: SFT {family}")
    for step in progress:
        loss = imitation_loss(model, tokenizer, take(tasks, SFT_BATCH))
        take_step(model, optimizer, loss, learning_rate * min(1, step / 10))
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return model


TRAININGS = {
    "rl": train_by_reinforcement,
    "sft": train_by_imitation,
    "sft_slow": functools.partial(train_by_imitation, learning_rate=RL_LR),
}


def save(model, tokenizer, directory: Path, training: dict) -> None:
    """Write a checkpoint in bfloat16; what tells that it is whole goes last."""
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / TRAINING_FILE).write_text(json.dumps(training, indent=2) + "\n")


def load(directory: Path) -> Qwen2ForCausalLM:
    """A checkpoint in float32, the dtype it is trained in."""
    return Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32)


def train_base_once(runs: Path = RUNS) -> Path:
    """The base that all agents start from, trained if it is not there yet. Returns its directory."""
    directory, tokenizer = runs / "base", character_tokenizer()
    finish(directory, tokenizer, lambda: train_base(BASE_SEED, tokenizer))
    return directory


def train_agents(seed: int, runs: Path = RUNS) -> Path:
    """Train what is missing of one seed's RL agents and SFT agents. Returns their directory."""
    base, tokenizer = train_base_once(runs), character_tokenizer()
    for kind, train in TRAININGS.items():
        for family in FAMILIES:
            finish(
                runs / f"seed{seed}" / f"{kind}_{family}",
                tokenizer,
                lambda train=train, family=family: train(
                    load(base), tokenizer, family, seed
                ),
            )
    return runs / f"seed{seed}"


def finish(directory: Path, tokenizer, train: Callable[[], Qwen2ForCausalLM]) -> None:
    """Train and save a model, unless that has been done."""
    if (directory / TRAINING_FILE).exists():
        return
    started = time.perf_counter()
    model = train()
    seconds = round(time.perf_counter() - started)
    save(model, tokenizer, directory, {"seconds": seconds})


@click.command()
@click.option("--seed", "seeds", type=int, multiple=True, default=range(5))
@click.option("--bundle", is_flag=True, help="Make the first seed's the demo's models.")
def main(seeds: tuple[int, ...], bundle: bool) -> None:
    """Train the base and the agents of the seeds; finished checkpoints are kept."""
    torch.set_num_threads(1)
    agents = [train_agents(seed) for seed in seeds]
    if bundle:
        copy_checkpoints(agents[0])


def copy_checkpoints(agents: Path) -> None:
    """Put the base and a seed's RL agents into the package."""
    sources = {"base": train_base_once()}
    sources |= {family: agents / f"rl_{family}" for family in FAMILIES}
    for name, source in sources.items():
        shutil.copytree(source, CHECKPOINTS / name, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
