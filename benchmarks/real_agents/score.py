"""Pass rates of the base, of agents and of merges, every one kept in a small file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import merges
import policy
import torch
from families import Split, draw
from jobs import once, write_json
from methods import DEFAULT, METHODS, Setting
from safetensors.torch import load_file
from torch import Tensor
from train import Training
from transformers import LlamaForCausalLM

COUNTS: dict[Split, int] = {"validation": 60, "test": 300}
# Tasks answered at once.
BATCH = 100


@dataclass(frozen=True)
class Group:
    """Agents that are merged; their merges are scored on their own families."""

    base: Path
    agents: Sequence[Training]
    directory: Path  # of agents
    results: Path

    @property
    def families(self) -> list[str]:
        return sorted({agent.family for agent in self.agents})

    @property
    def paths(self) -> list[Path]:
        return [self.directory / agent.name for agent in self.agents]

    @cached_property
    def base_weights(self) -> dict[str, Tensor]:
        return load_file(self.base / "model.safetensors")


def answered(
    model: LlamaForCausalLM, base: Path, families: Sequence[str], split: Split
) -> dict[str, str]:
    """For every family a string with 1 for each task answered rightly, 0 for the others."""
    tokenizer = policy.load_tokenizer(base)
    found = {}
    for family in families:
        tasks = draw(family, split, COUNTS[split])
        batches = [tasks[i : i + BATCH] for i in range(0, len(tasks), BATCH)]
        marks = [mark for batch in batches for mark in policy.marks(model, tokenizer, batch)]
        found[family] = "".join(str(int(mark)) for mark in marks)
    return found


def score_checkpoint(checkpoint: Path, base: Path, family: str, result: Path) -> None:
    """A base's or an agent's answers to a family's test tasks."""
    write_json(result, answered(policy.load(checkpoint), base, [family], "test"))


def mean_rate(marks: dict[str, str]) -> float:
    """The families' mean pass rate."""
    return sum(text.count("1") / len(text) for text in marks.values()) / len(marks)


class Scorer:
    """Merges by one method and scores what comes out; only the last merge is kept in memory."""

    def __init__(self, group: Group, method: str):
        self._group, self._method = group, method
        self._merged: tuple[Setting, dict[str, Tensor]] | None = None

    @cached_property
    def _model(self) -> LlamaForCausalLM:
        return policy.load(self._group.base)

    def score(self, setting: Setting, split: Split) -> dict[str, str]:
        path = marks_path(self._group, self._method, setting, split)
        return once(path, lambda: self._make(setting, split))

    @torch.inference_mode()
    def _make(self, setting: Setting, split: Split) -> dict[str, str]:
        group, unscaled = self._group, setting._replace(scale=1.0)
        if self._merged is None or self._merged[0] != unscaled:
            self._merged = None
            merged = merges.merge(self._method, unscaled, group.base, group.paths)
            self._merged = unscaled, merged
        weights = merges.scaled(self._merged[1], group.base_weights, setting.scale)
        self._model.load_state_dict(weights, strict=False)  # tied weights are stored once
        return answered(self._model, group.base, group.families, split)


def marks_path(group: Group, method: str, setting: Setting, split: Split) -> Path:
    return group.results / method / f"{setting.name}.{split}.json"


def score_default(group: Group, method: str) -> None:
    Scorer(group, method).score(DEFAULT, "test")


def score_tuned(group: Group, method: str, result: Path) -> None:
    """Tune a method on the validation split, then test what was chosen."""
    scorer = Scorer(group, method)
    tried = {s: mean_rate(scorer.score(s, "validation")) for s in METHODS[method]}
    best = max(tried, key=lambda setting: tried[setting])
    write_json(
        result,
        {
            "method": method,
            "tried": {setting.name: rate for setting, rate in tried.items()},
            "setting": best.name,
            "test": scorer.score(best, "test"),
        },
    )


def measure_overlap(group: Group, result: Path) -> None:
    """How many weights the agents changed, alone and together, and in which direction."""
    base = group.base_weights
    agents = [load_file(path / "model.safetensors") for path in group.paths]
    count = len(agents)
    changed, unique = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    shared = torch.zeros(count, count, dtype=torch.long)
    conflicts = torch.zeros_like(shared)
    per_count = torch.zeros(count + 1, dtype=torch.long)
    for name, start in base.items():
        signs = torch.stack([_signs(agent[name], start) for agent in agents])
        touched = signs != 0
        number = touched.sum(0)
        changed += touched.sum(1)
        unique += (touched & (number == 1)).sum(1)
        per_count += number.bincount(minlength=count + 1)
        for i in range(count):
            for j in range(i):
                product = signs[i] * signs[j]
                shared[i, j] += product.count_nonzero()
                conflicts[i, j] += (product < 0).sum()
    write_json(
        result,
        {
            "agents": [agent.name for agent in group.agents],
            "elements": sum(tensor.numel() for tensor in base.values()),
            "changed": changed.tolist(),
            "unique": unique.tolist(),
            "changed_by": per_count.tolist(),
            "pairwise_shared": shared.tolist(),
            "pairwise_conflicts": conflicts.tolist(),
        },
    )


def _signs(agent: Tensor, base: Tensor, epsilon: float = 1e-5) -> Tensor:
    """+1, -1, or 0 where RAM counts an element as not changed; flat."""
    difference = (agent.float() - base.float()).flatten()
    return (difference.sign() * (difference.abs() > epsilon)).to(torch.int8)
