"""The base by a few steps of imitation, and from it agents by reinforcement learning (GRPO).

A checkpoint that is there is not trained again. Everything is drawn from the seed. Parameters are
kept in float32 and trained there; the model that answers and is differentiated is their bfloat16
copy, which is also what is saved.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import policy
import torch
from families import FAMILIES, stream
from jobs import write_json
from torch import Tensor
from transformers import LlamaForCausalLM

CLIP_NORM = 1.0
SFT_STEPS, SFT_TASKS, SFT_LR = 20, 4, 3e-5  # tasks of each family a step
PROMPTS, SAMPLES = 8, 8  # a step of GRPO


@dataclass(frozen=True)
class Training:
    """How an agent is trained."""

    family: str
    seed: int
    lr: float
    steps: int

    @property
    def name(self) -> str:
        return f"{self.family}-lr{self.lr:g}-steps{self.steps}-seed{self.seed}"


class Learner:
    """A bfloat16 model which float32 parameters, updated by AdamW, stand behind."""

    def __init__(self, model: LlamaForCausalLM, lr: float):
        self.model = model
        self._rounded = list(model.parameters())
        self._exact = [p.detach().float().requires_grad_() for p in self._rounded]
        self._optimizer = torch.optim.AdamW(
            self._exact, lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )

    def step(self, loss: Tensor) -> float:
        """Descend; the gradient's norm before it was clipped."""
        loss.backward()
        for exact, rounded in zip(self._exact, self._rounded):
            assert rounded.grad is not None
            exact.grad, rounded.grad = rounded.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._exact, CLIP_NORM)
        self._optimizer.step()
        with torch.no_grad():
            for exact, rounded in zip(self._exact, self._rounded):
                rounded.copy_(exact)
                exact.grad = None
        return norm.item()


def train_base(pretrained: Path, target: Path, log: Path) -> None:
    """Teach the form of all answers and little more, so that reinforcement has what to elicit."""
    tokenizer, model = policy.load_tokenizer(pretrained), policy.load(pretrained)
    learner = Learner(model, SFT_LR)
    tasks = {family: stream(family, "sft") for family in FAMILIES}
    losses = []
    for step in range(SFT_STEPS):
        batch = [task for source in tasks.values() for task in islice(source, SFT_TASKS)]
        prompts = policy.encode_prompts(tokenizer, [task.prompt for task in batch])
        answers = [[a] for a in policy.encode_answers(tokenizer, [task.answer for task in batch])]
        loss = -policy.log_likelihood(model, prompts, answers)[0].mean()
        learner.step(loss)
        losses.append(round(loss.item(), 3))
        print(f"base: step {step + 1} of {SFT_STEPS}, loss {losses[-1]}", flush=True)
    write_json(log, {"lr": SFT_LR, "tasks": SFT_TASKS, "losses": losses})
    policy.save(model, tokenizer, target)


def train_agent(base: Path, training: Training, target: Path, log: Path) -> None:
    """Reinforce right answers; the curve goes into the log."""
    tokenizer, model = policy.load_tokenizer(base), policy.load(base)
    learner = Learner(model, training.lr)
    random = torch.Generator().manual_seed(training.seed)
    tasks = stream(training.family, "train", training.seed)
    curve = []
    start = time.perf_counter()
    for step in range(training.steps):
        batch = list(islice(tasks, PROMPTS))
        prompts = policy.encode_prompts(tokenizer, [task.prompt for task in batch])
        answers = policy.generate(model, prompts, SAMPLES, random)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        groups = [range(i * SAMPLES, (i + 1) * SAMPLES) for i in range(PROMPTS)]
        rewards = [[float(task.is_right(texts[i])) for i in g] for task, g in zip(batch, groups)]
        loss = grpo_loss(model, prompts, [[answers[i] for i in g] for g in groups], rewards)
        norm = learner.step(loss) if loss is not None else 0.0
        reward = sum(map(sum, rewards)) / len(answers)
        curve.append({"reward": reward, "norm": norm, "seconds": time.perf_counter() - start})
        print(f"{training.name}: step {step + 1} of {training.steps}, {curve[-1]}", flush=True)
    write_json(log, {**asdict(training), "curve": curve})
    policy.save(model, tokenizer, target)


def grpo_loss(
    model: LlamaForCausalLM,
    prompts: list[policy.Tokens],
    answers: list[list[policy.Tokens]],
    rewards: list[list[float]],
) -> Tensor | None:
    """GRPO's loss on samples of the policy itself; None where no group has a right and a wrong one.

    Groups of equal rewards have no gradient and are left out; equal answers are read once.
    """
    kept, distinct, advantages = [], [], []
    for prompt, group, reward in zip(prompts, answers, rewards):
        mean = sum(reward) / len(reward)
        deviation = math.sqrt(mean * (1 - mean))
        if deviation:
            counts = Counter(map(tuple, group))
            advantage = {tuple(a): (r - mean) / deviation for a, r in zip(group, reward)}
            kept.append(prompt)
            distinct.append([list(answer) for answer in counts])
            advantages += [counts[answer] * advantage[answer] for answer in counts]
    if not kept:
        return None
    found, owners = policy.log_likelihood(model, kept, distinct)
    tokens = sum(len(answer) for group in answers for answer in group)
    return -(torch.tensor(advantages)[owners] * found).sum() / tokens
