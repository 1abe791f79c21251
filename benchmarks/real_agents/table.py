"""What run.py has measured so far, as JSON, Markdown and plots.

Intervals are of a bootstrap that draws seeds and, for each family, test tasks, the same for every
entry, so differences are paired. With one seed they speak of that seed's agents alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from methods import DEFAULT, METHODS
from plots import plot_counts, plot_curves, plot_scores

RESAMPLES, COVERED = 2000, (2.5, 97.5)
Marks = np.ndarray  # [seed, family, task] of 0 and 1


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def read_all(directory: Path) -> dict[str, str]:
    """Marks of a model by family."""
    return {family: m for path in directory.glob("*.json") for family, m in read(path).items()}


def to_marks(results: Iterable[Mapping[str, str]], families: Sequence[str]) -> Marks:
    return np.array([[[int(mark) for mark in one[f]] for f in families] for one in results])


def resample(marks: Mapping[str, Marks]) -> dict[str, np.ndarray]:
    """Mean pass rates of resampled seeds and tasks, the same for all entries."""
    random = np.random.default_rng(0)
    seeds, families, tasks = next(iter(marks.values())).shape
    found: dict[str, list[float]] = {name: [] for name in marks}
    for _ in range(RESAMPLES):
        seed = random.integers(seeds, size=(seeds, 1, 1))
        task = random.integers(tasks, size=(1, families, tasks))
        family = np.arange(families)[None, :, None]
        for name, values in marks.items():
            found[name].append(values[seed, family, task].mean())
    return {name: np.array(values) for name, values in found.items()}


def interval(values: np.ndarray) -> list[float]:
    return np.percentile(values, COVERED).tolist()


def summarise_group(scores: Path, count: int, seeds: Sequence[int]) -> dict:
    """All entries of the merges of so many agents, over the seeds for which they are complete."""
    directories = [scores / f"{count}-agents-seed{seed}" for seed in seeds]
    overlaps = [read(directory / "overlap.json") for directory in directories]
    names = [overlap["agents"] for overlap in overlaps]
    families = [name.split("-")[0] for name in names[0]]
    models = {d.name: read_all(d) for d in (scores / "models").iterdir()}
    own = [{f: models[name][f] for f, name in zip(families, agents)} for agents in names]
    marks = {
        "base": to_marks([models["base"]] * len(seeds), families),
        "each specialist on its own": to_marks(own, families),
    }
    for family, *agents in zip(families, *names):
        if any(set(families) - set(models[name]) for name in agents):
            continue
        marks[f"specialist: {family}"] = to_marks([models[name] for name in agents], families)
    settings = {}
    for method in METHODS:
        for run, found in merges_of(method, directories).items():
            marks[f"{method}, {run}"] = to_marks([one["test"] for one in found], families)
            settings[method] = [one["setting"] for one in found]
    drawn = resample(marks)
    return {
        "agents": count,
        "seeds": list(seeds),
        "families": families,
        "entries": {name: entry(name, marks, drawn) for name in marks},
        "settings": settings,
        "overlap": [summarise_overlap(overlap) for overlap in overlaps],
    }


def entry(name: str, marks: Mapping[str, Marks], drawn: Mapping[str, np.ndarray]) -> dict:
    """Pass rates; of a merge also what the specialists' rates are kept and the lead over ram."""
    by_family = marks[name].mean((0, 2))
    found = {
        "rate": marks[name].mean(),
        "interval": interval(drawn[name]),
        "by_family": by_family.tolist(),
        "by_seed": marks[name].mean((1, 2)).tolist(),
    }
    method, _, run = name.partition(", ")
    if run:
        specialists = marks["each specialist on its own"]
        found["retention"] = (by_family / specialists.mean((0, 2))).tolist()
    if (ram := f"ram, {run}") in marks:
        found["minus_ram"] = marks[name].mean() - marks[ram].mean()
        found["minus_ram_interval"] = interval(drawn[name] - drawn[ram])
    return found


def summarise_overlap(overlap: Mapping[str, Any]) -> dict:
    """As shares: changed of all weights, unique of those changed, conflicts of pairs that share."""
    changed, unique = np.array(overlap["changed"]), np.array(overlap["unique"])
    shared = np.array(overlap["pairwise_shared"]).sum()
    return {
        "agents": overlap["agents"],
        "changed": (changed / overlap["elements"]).tolist(),
        "unique": (unique / changed).tolist(),
        "changed_by": (np.array(overlap["changed_by"]) / overlap["elements"]).tolist(),
        "conflicts": float(np.array(overlap["pairwise_conflicts"]).sum() / max(1, shared)),
    }


def merges_of(method: str, directories: Sequence[Path]) -> dict[str, list[dict]]:
    """A method's settings and marks, of every run which is there for all seeds."""
    found = {}
    defaults = [d / method / f"{DEFAULT.name}.test.json" for d in directories]
    if all(path.exists() for path in defaults):
        found["default"] = [{"setting": DEFAULT.name, "test": read(path)} for path in defaults]
    tuned = [d / f"{method}.json" for d in directories]
    if all(path.exists() for path in tuned):
        found["tuned"] = [read(path) for path in tuned]
    return found


def complete_seeds(scores: Path) -> dict[int, list[int]]:
    """For every number of agents the seeds for which as much is there as for the first one."""
    found: dict[int, dict[int, set[str]]] = {}
    for path in sorted(scores.glob("*-agents-seed*/overlap.json")):
        directory = path.parent
        count, seed = map(int, directory.name.split("-agents-seed"))
        there = {f"{m}, {run}" for m in METHODS for run in merges_of(m, [directory])}
        if {"ram, default"} <= there:
            found.setdefault(count, {})[seed] = there
    return {
        count: [seed for seed, there in seeds.items() if there >= next(iter(seeds.values()))]
        for count, seeds in sorted(found.items())
    }


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rules = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rules, *rows]) + "\n"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def group_markdown(group: Mapping[str, Any]) -> str:
    families = group["families"]
    rows, kept = [], []
    for name, found in group["entries"].items():
        low, high = map(percent, found["interval"])
        row = [name, percent(found["rate"]), f"{low} to {high}"]
        row += map(percent, found["by_family"])
        if "minus_ram" in found:
            low, high = map(percent, found["minus_ram_interval"])
            row += [f"{100 * found['minus_ram']:+.1f}", f"{low} to {high}"]
        if "retention" in found:
            kept.append([name, *map(percent, found["retention"])])
        rows.append(row if len(row) == len(families) + 5 else [*row, "", ""])
    seeds = ", ".join(map(str, group["seeds"]))
    parts = [
        f"## {group['agents']} agents, seeds {seeds}\n",
        "Test tasks answered rightly, in %, and the difference to `ram` with the same tuning.\n",
        markdown(["", "mean", "95 %", *families, "− ram", "95 %"], rows),
        "Kept of what each specialist does on its own family, in %.\n",
        markdown(["", *families], kept),
        "Chosen on the validation split, by seed.\n",
        markdown(["", *map(str, group["seeds"])], [[m, *s] for m, s in group["settings"].items()]),
        overlap_markdown(group),
    ]
    return "\n".join(parts)


def overlap_markdown(group: Mapping[str, Any]) -> str:
    rows = [
        [name, percent(changed), percent(unique)]
        for overlap in group["overlap"]
        for name, changed, unique in zip(*(overlap[k] for k in ("agents", "changed", "unique")))
    ]
    conflicts = ", ".join(percent(overlap["conflicts"]) for overlap in group["overlap"])
    return (
        f"Weights changed, and how many of these by this agent alone, in %. Changes that two agents"
        f" share have opposite signs in {conflicts} %.\n\n"
        + markdown(["agent", "changed", "unique of these"], rows)
    )


def write_table(results: Path) -> None:
    """Table, curves and plots of what is there."""
    scores = results / "scores"
    groups = [summarise_group(scores, n, seeds) for n, seeds in complete_seeds(scores).items()]
    curves = [read(path) for path in sorted((results / "training").glob("*.json"))]
    if curves:
        plot_curves(curves, results / "training.png")
    if not groups:
        return
    (results / "table.json").write_text(json.dumps(groups, indent=1) + "\n")
    (results / "table.md").write_text("\n".join(map(group_markdown, groups)))
    plot_scores(groups, results / "scores.png")
    plot_counts(groups, results / "counts.png")
