"""The whole benchmark: train agents from several seeds, merge by every method, score, tabulate.

    python benchmarks/agents/run.py --seeds 5 --jobs 2

Finished checkpoints in ``runs`` and finished seeds in ``results`` are kept, so a stopped run goes
on where it was; ``--fresh`` scores again.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
import torch
import transformers
from table import write_results
from tqdm import tqdm
from train import BASE, TRAININGS, finish, train_agents, train_base

from mergekit_ram.report.merge_report import FILE_NAME
from mergekit_ram.tools.demo.evaluate import score
from mergekit_ram.tools.demo.families import FAMILIES, Split
from mergekit_ram.tools.demo.merging import merge, recipe, write_recipe

RESULTS = Path(__file__).parent / "results"
# Tasks of each family.
COUNTS = {"test": 200, "validation": 100}

# What is tuned, four tries a method: the scale of the merged task vector where a method averages,
# the scale or the density where it sums, the agents' weights in FAMILIES' order for ``linear``.
SCALES = [{"lambda": scale} for scale in (1.0, 1.5, 2.0, 3.0)]
DENSITIES = [{"density": density} for density in (0.25, 0.5, 0.75, 1.0)]
TRIES: dict[str, list[dict]] = {
    "ram": SCALES,
    "ramplus": [{"r": 1.0, **scale} for scale in SCALES],
    "ramplus_tl": [{"r": 1.0, **scale} for scale in SCALES],
    "ties": SCALES,
    "dare_ties": DENSITIES,
    "dare_linear": DENSITIES,
    "task_arithmetic": [{"lambda": scale} for scale in (0.4, 0.7, 1.0, 1.3)],
    "linear": [{"weights": w} for w in ([1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2])],
}


def merge_and_score(
    models: Path, kind: str, method: str, setting: dict, split: Split, seed: int
) -> dict:
    """Merge a seed's agents of a kind; their scores, and their overlap from RAM methods."""
    agents = [(models / f"{kind}_{family}").resolve() for family in FAMILIES]
    parameters = {name: value for name, value in setting.items() if name != "weights"}
    contents = recipe(method, BASE.resolve(), agents, parameters, setting.get("weights"))
    with tempfile.TemporaryDirectory(prefix="mergekit-ram-agents-") as work:
        merged = Path(work) / "merged"
        merge(write_recipe(Path(work) / "recipe.yml", contents), merged)
        return {**measure(merged, split, seed), "overlap": overlap(merged / FILE_NAME)}


def measure(checkpoint: Path, split: Split, seed: int) -> dict:
    scores = score(checkpoint, split=split, count=COUNTS[split], seed=seed)
    return {"scores": scores, "mean": sum(scores.values()) / len(scores)}


def overlap(report_file: Path) -> dict | None:
    """What the paper's premise is about, of a ram_report.json: how few weights change and agree."""
    if not report_file.exists():
        return None
    report = json.loads(report_file.read_text())
    agents = report["agents"]
    names = ("changed", "unique", "shared", "rho")
    changed = [agent["changed"] for agent in agents]
    pairs = [(i, j) for i in range(len(agents)) for j in range(i)]
    shared, conflicts = (
        [report[f"pairwise_{what}"][i][j] for i, j in pairs] for what in ("shared", "conflicts")
    )
    return {
        "total": report["total"],
        "agents": {family: {n: a[n] for n in names} for family, a in zip(FAMILIES, agents)},
        "jaccard": [both / (changed[i] + changed[j] - both) for both, (i, j) in zip(shared, pairs)],
        "pairwise_shared": sum(shared),
        "pairwise_conflicts": sum(conflicts),
    }


def measure_method(agents: Path, method: str, seed: int) -> dict:
    """A method at its defaults and as the validation split likes it best."""
    tried = []
    for setting in tqdm(TRIES[method], desc=f"seed {seed}: {method}"):
        found = merge_and_score(agents, "rl", method, setting, "validation", seed)
        tried.append({"setting": setting, "mean": found["mean"]})
    best = max(tried, key=lambda one: one["mean"])["setting"]
    result: dict = {"tries": tried}
    for run, setting in (("default", {}), ("tuned", best)):
        found = merge_and_score(agents, "rl", method, setting, "test", seed)
        result[run] = {"setting": setting, **found}
    return result


def measure_seed(seed: int) -> dict:
    """Scores of one seed's models and merges on tasks that no training saw; its agents' overlap."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    agents = train_agents(seed)
    models = {"base": measure(BASE, "test", seed)}
    names = [f"{kind}_{family}" for kind in TRAININGS for family in FAMILIES]
    for name in tqdm(names, desc=f"seed {seed}: agents"):
        models[name] = measure(agents / name, "test", seed)
    merges = {k: merge_and_score(agents, k, "ram", {}, "test", seed) for k in TRAININGS}
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
    finish(BASE, train_base)
    # Not forked: a process that has used torch's threads is not safe to fork.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        results = list(pool.map(result_of, range(seeds), [fresh] * seeds))
    write_results(results, RESULTS)


if __name__ == "__main__":
    main()
