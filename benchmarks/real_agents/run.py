"""The whole benchmark: train agents of a real pretrained model, merge by every method, score.

    python benchmarks/real_agents/run.py --seeds 3 --jobs 2

What is finished is kept, agents in ``--work`` and scores in ``results``, so a stopped run goes on
where it was. Every process has one thread: on a shared machine several wait less than one of many.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import score
import torch
from families import FAMILIES
from jobs import Job, work
from methods import DEFAULT, METHODS
from policy import unpack_pretrained
from table import write_table
from train import Training, train_agent, train_base

RESULTS = Path(__file__).parent / "results"
# Learning rate and steps of every family, chosen by the rewards of training alone.
TRAININGS = {
    "recall": (1e-5, 90),
    "tool_call": (1e-5, 50),
    "sorting": (1e-5, 80),
    "program": (1e-5, 60),
    "date": (1e-5, 50),
    "reverse": (1e-5, 50),
}
# Trained and merged first, of every seed, are these families' agents.
FIRST, OTHERS = list(FAMILIES)[:4], list(FAMILIES)[4:]
COUNTS = (4, 3, 2, 6)  # of agents merged, the families' first ones
STAGES = ("train", "score")


def training(family: str, seed: int) -> Training:
    return Training(family, seed, *TRAININGS[family])


def train_jobs(directory: Path, seeds: int) -> Iterator[Job]:
    """The base, then four families' agents of every seed, then the other two's."""
    pretrained, base = directory / "pretrained", directory / "base"
    yield Job(pretrained, (), partial(unpack_pretrained, pretrained))
    log = RESULTS / "base.json"
    yield Job(base, (pretrained,), partial(train_base, pretrained, base, log))
    for families in (FIRST, OTHERS):
        for seed, family in itertools.product(range(seeds), families):
            one = training(family, seed)
            target, log = directory / one.name, RESULTS / "training" / f"{one.name}.json"
            yield Job(target, (base,), partial(train_agent, base, one, target, log))


def score_jobs(directory: Path, seeds: int) -> Iterator[Job]:
    """Agents on their own families and merges at their defaults; then tuned; then agents on others.

    All of this for one seed before the next.
    """
    base, scores = directory / "base", RESULTS / "scores"
    for family in FAMILIES:
        yield model_job("base", family, base, scores)
    for seed in range(seeds):
        agents = {family: training(family, seed) for family in FAMILIES}
        for family, agent in agents.items():
            yield model_job(agent.name, family, base, scores)
        groups = [
            score.Group(
                base,
                list(agents.values())[:count],
                directory,
                scores / f"{count}-agents-seed{seed}",
            )
            for count in COUNTS
        ]
        for group in groups:
            yield from default_jobs(group)
        for group in groups:
            yield from tuned_jobs(group)
        for agent, family in itertools.product(agents.values(), FIRST):
            yield model_job(agent.name, family, base, scores)


def model_job(name: str, family: str, base: Path, scores: Path) -> Job:
    path, result = base.with_name(name), scores / "models" / name / f"{family}.json"
    return Job(result, (path,), partial(score.score_checkpoint, path, base, family, result))


def default_jobs(group: score.Group) -> Iterator[Job]:
    result = group.results / "overlap.json"
    yield Job(result, group.paths, partial(score.measure_overlap, group, result))
    for method in METHODS:
        result = score.marks_path(group, method, DEFAULT, "test")
        yield Job(result, group.paths, partial(score.score_default, group, method))


def tuned_jobs(group: score.Group) -> Iterator[Job]:
    for method in METHODS:
        result = group.results / f"{method}.json"
        yield Job(result, group.paths, partial(score.score_tuned, group, method, result))


def work_through(directory: Path, seeds: int, stages: tuple[str, ...]) -> None:
    """One process's part."""
    torch.set_num_threads(1)
    jobs = {"train": train_jobs, "score": score_jobs}
    work([job for stage in stages for job in jobs[stage](directory, seeds)], directory / "locks")


@click.command()
@click.option("--seeds", default=3, show_default=True, help="How many seeds, from 0.")
@click.option("--jobs", default=2, show_default=True, help="Processes, of one thread each.")
@click.option(
    "--work",
    "directory",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    default=Path(tempfile.gettempdir()) / "real_agents",
    show_default=True,
    help="Where checkpoints are made and kept.",
)
@click.option(
    "--stage",
    "stages",
    type=click.Choice([*STAGES, "table"]),
    multiple=True,
    default=(*STAGES, "table"),
    show_default=True,
    help="What to do; repeat for several.",
)
def main(seeds: int, jobs: int, directory: Path, stages: tuple[str, ...]) -> None:
    """Train, merge, score; writes results/table.json, table.md and plots."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    directory.mkdir(parents=True, exist_ok=True)
    chosen = tuple(stage for stage in STAGES if stage in stages)
    if chosen:
        # Not forked: a process that has used torch's threads is not safe to fork.
        spawn = multiprocessing.get_context("spawn")
        processes = [
            spawn.Process(target=work_through, args=(directory, seeds, chosen)) for _ in range(jobs)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if "table" in stages:
        write_table(RESULTS)


if __name__ == "__main__":
    main()
