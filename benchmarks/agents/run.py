"""The whole benchmark: train agents from several seeds, merge them by every method, score, and tabulate.

    python benchmarks/agents/run.py --seeds 5 --jobs 2

Finished checkpoints in ``runs`` and finished seeds in ``results`` are kept, so a stopped run goes on where it was;
``--fresh`` scores again.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
import torch
import transformers
from table import write_results
from tqdm import tqdm
from train import RUNS, TRAININGS, train_agents, train_base_once

from mergekit_ram.demo.evaluate import score
from mergekit_ram.demo.families import FAMILIES, Split
from mergekit_ram.demo.merging import merge, recipe, write_recipe
from mergekit_ram.report import FILE_NAME

BASE = RUNS / "base"
RESULTS = Path(__file__).parent / "results"
# Tasks of each family.
COUNTS = {"test": 200, "validation": 100}

# What is tuned, four tries a method: the scale of the merged task vector where a method averages, the scale or the
# density where it sums, the weights of the agents in FAMILIES' order for ``linear``.
SCALES = (1.0, 1.5, 2.0, 3.0)
DENSITIES = (0.25, 0.5, 0.75, 1.0)
TRIES: dict[str, list[dict]] = {
    "ram": [{"lambda": scale} for scale in SCALES],
    "ramplus": [{"r": 1.0, "lambda": scale} for scale in SCALES],
    "ramplus_tl": [{"r": 1.0, "lambda": scale} for scale in SCALES],
    "ties": [{"lambda": scale} for scale in SCALES],
    "dare_ties": [{"density": density} for density in DENSITIES],
    "dare_linear": [{"density": density} for density in DENSITIES],
    "task_arithmetic": [{"lambda": scale} for scale in (0.4, 0.7, 1.0, 1.3)],
    "linear": [
        {"weights": weights} for weights in ([1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2])
    ],
}


def merge_and_score(
    models: Path, kind: str, method: str, setting: dict, split: Split, seed: int
) -> dict:
    """Merge a seed's agents of a kind by mergekit-yaml; their scores, and their overlap from RAM methods."""
    agents = [(models / f"{kind}_{family}").resolve() for family in FAMILIES]
    parameters = {name: value for name, value in setting.items() if name != "weights"}
    work = Path(tempfile.mkdtemp(prefix="mergekit-ram-agents-"))
    try:
        contents = recipe(
            method,
            BASE.resolve(),
            agents,
            parameters,
            setting.get("weights"),
        )
        merge(write_recipe(work / "recipe.yml", contents), work / "merged")
        return {
            **measure(work / "merged", split, seed),
            "overlap": overlap(work / "merged" / FILE_NAME),
        }
    finally:
        shutil.rmtree(work)


def measure(checkpoint: Path, split: Split, seed: int) -> dict:
    scores = score(checkpoint, split=split, count=COUNTS[split], seed=seed)
    return {"scores": scores, "mean": sum(scores.values()) / len(scores)}


def overlap(report_file: Path) -> dict | None:
    """What the paper's premise is about, of a ram_report.json: how few weights change, and how few agents share."""
    if not report_file.exists():
        return None
    report = json.loads(report_file.read_text())
    changed = [agent["changed"] for agent in report["agents"]]
    pairs = [(i, j) for i in range(len(changed)) for j in range(i)]
    return {
        "total": report["total"],
        "agents": {
            family: {
                name: agent[name] for name in ("changed", "unique", "shared", "rho")
            }
            for family, agent in zip(FAMILIES, report["agents"])
        },
        "jaccard": [
            report["pairwise_shared"][i][j]
            / (changed[i] + changed[j] - report["pairwise_shared"][i][j])
            for i, j in pairs
        ],
        "pairwise_shared": sum(report["pairwise_shared"][i][j] for i, j in pairs),
        "pairwise_conflicts": sum(report["pairwise_conflicts"][i][j] for i, j in pairs),
    }


def measure_method(agents: Path, method: str, seed: int) -> dict:
    """A method at its defaults and as the validation split likes it best."""
    tried = [
        {
            "setting": setting,
            "mean": merge_and_score(agents, "rl", method, setting, "validation", seed)[
                "mean"
            ],
        }
        for setting in tqdm(TRIES[method], desc=f"seed {seed}: {method}")
    ]
    best = max(tried, key=lambda one: one["mean"])["setting"]
    result: dict = {"tries": tried}
    for run, setting in (("default", {}), ("tuned", best)):
        found = merge_and_score(agents, "rl", method, setting, "test", seed)
        result[run] = {"setting": setting, **found}
    return result


def measure_seed(seed: int) -> dict:
    """Scores of one seed's models and merges on tasks that no training saw, and how its agents overlap."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    agents = train_agents(seed)
    models = {"base": measure(BASE, "test", seed)}
    for kind in TRAININGS:
        for family in tqdm(FAMILIES, desc=f"seed {seed}: {kind} agents"):
            name = f"{kind}_{family}"
            models[name] = measure(agents / name, "test", seed)
    merges = {
        kind: merge_and_score(agents, kind, "ram", {}, "test", seed)
        for kind in TRAININGS
    }
    return {
        "seed": seed,
        "overlap": {kind: merges[kind].pop("overlap") for kind in TRAININGS},
        "models": models | {f"ram of {kind}": merges[kind] for kind in TRAININGS},
        "methods": {method: measure_method(agents, method, seed) for method in TRIES},
    }


def result_of(seed: int, fresh: bool) -> dict:
    path = RESULTS / f"seed{seed}.json"
    if fresh or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure_seed(seed), indent=1) + "\n")
    return json.loads(path.read_text())


@click.command()
@click.option("--seeds", default=5, show_default=True, help="How many seeds, from 0.")
@click.option("--jobs", default=2, show_default=True, help="Seeds worked on at a time.")
@click.option("--fresh", is_flag=True, help="Merge and score again what is in results.")
def main(seeds: int, jobs: int, fresh: bool) -> None:
    """Train, merge, score; writes results/agents.json, agents.md and plots."""
    train_base_once()
    # Not forked: a process that has used torch's threads is not safe to fork.
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        results = list(pool.map(result_of, range(seeds), [fresh] * seeds))
    write_results(results, RESULTS)


if __name__ == "__main__":
    main()
