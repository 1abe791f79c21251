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
from table import write_results
from tqdm import tqdm
from train import RUNS, train_seed

from mergekit_ram.demo.evaluate import score
from mergekit_ram.demo.families import FAMILIES, Split
from mergekit_ram.demo.merging import merge, recipe, write_recipe
from mergekit_ram.report import FILE_NAME

RESULTS = Path(__file__).parent / "results"
# Tasks of each family.
COUNTS = {"test": 300, "validation": 150}

# What is tuned, six tries a method. Weights, of ``linear`` only, are per agent and normalised by mergekit.
TRIES: dict[str, list[dict]] = {
    "ram": [{"lambda": scale} for scale in (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)],
    "ramplus": [{"r": r} for r in (0.1, 0.3, 0.6, 1.0, 2.0, 3.0)],
    "ramplus_tl": [{"r": r} for r in (0.1, 0.3, 0.6, 1.0, 2.0, 3.0)],
    "ties": [
        {"density": density, "lambda": scale}
        for density in (0.3, 0.6, 1.0)
        for scale in (1.0, 1.4)
    ],
    "dare_ties": [
        {"density": density, "lambda": scale}
        for density in (0.5, 0.8, 1.0)
        for scale in (0.7, 1.0)
    ],
    "dare_linear": [
        {"density": density, "lambda": scale}
        for density in (0.5, 0.8, 1.0)
        for scale in (0.7, 1.0)
    ],
    "task_arithmetic": [{"lambda": scale} for scale in (0.3, 0.5, 0.7, 0.8, 1.0, 1.2)],
    "linear": [
        {"weights": weights}
        for weights in (
            [1, 1, 1],
            [2, 1, 1],
            [1, 2, 1],
            [1, 1, 2],
            [2, 2, 1],
            [1, 2, 2],
        )
    ],
}


def merge_and_score(
    models: Path, kind: str, method: str, setting: dict, split: Split, seed: int
) -> dict:
    """Merge a seed's agents of a kind by mergekit-yaml; their scores, and RAM's report where there is one."""
    agents = [(models / f"{kind}_{family}").resolve() for family in FAMILIES]
    parameters = {name: value for name, value in setting.items() if name != "weights"}
    work = Path(tempfile.mkdtemp(prefix="mergekit-ram-agents-"))
    try:
        contents = recipe(
            method,
            (models / "base").resolve(),
            agents,
            parameters,
            setting.get("weights"),
        )
        merge(write_recipe(work / "recipe.yml", contents), work / "merged")
        result = measure(work / "merged", split, seed)
        report = work / "merged" / FILE_NAME
        if report.exists():
            result["report"] = json.loads(report.read_text())
        return result
    finally:
        shutil.rmtree(work)


def measure(checkpoint: Path, split: Split, seed: int) -> dict:
    scores = score(checkpoint, split=split, count=COUNTS[split], seed=seed)
    return {"scores": scores, "mean": sum(scores.values()) / len(scores)}


def overlap(report: dict) -> dict:
    """What the paper's premise is about, of a ram_report.json: how few weights change, and how few agents share."""
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


def measure_seed(seed: int) -> dict:
    """Scores of one seed's models and merges on tasks that no training saw, and how its agents overlap."""
    torch.set_num_threads(1)
    models = train_seed(seed, RUNS)
    names = ["base", *(f"{kind}_{family}" for kind in ("rl", "sft") for family in FAMILIES)]  # fmt: skip
    steps = tqdm(
        total=len(names) + sum(map(len, TRIES.values())) + 2 * len(TRIES) + 1,
        desc=f"seed {seed}: merges",
    )
    result: dict = {"seed": seed, "models": {}, "methods": {}, "overlap": {}}
    for name in names:
        result["models"][name] = measure(models / name, "test", seed)
        steps.update()
    for method, tries in TRIES.items():
        tried = []
        for setting in tries:
            found = merge_and_score(models, "rl", method, setting, "validation", seed)
            tried.append({"setting": setting, "mean": found["mean"]})
            steps.update()
        best = max(tried, key=lambda one: one["mean"])["setting"]
        runs = {}
        for name, setting in (("default", {}), ("tuned", best)):
            runs[name] = merge_and_score(models, "rl", method, setting, "test", seed)  # fmt: skip
            runs[name]["setting"] = setting
            steps.update()
        report = runs["default"].pop("report", None)
        runs["tuned"].pop("report", None)
        if method == "ram":
            result["overlap"]["rl"] = overlap(report)
        result["methods"][method] = {**runs, "tries": tried}
    imitators = merge_and_score(models, "sft", "ram", {}, "test", seed)
    result["overlap"]["sft"] = overlap(imitators.pop("report"))
    result["models"]["ram of the SFT agents"] = imitators
    steps.close()
    return result


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
    # Not forked: a process that has used torch's threads is not safe to fork.
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        results = list(pool.map(result_of, range(seeds), [fresh] * seeds))
    write_results(results, RESULTS)


if __name__ == "__main__":
    main()
