"""Times ``inspect`` against the counting pass of ``ramplus``, and ``compare`` against the methods it runs, on real files.

    python benchmarks/inspection.py --json inspection.json

All passes run in one process, in turn, over checkpoints that are in the page cache.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import checkpoints
import click
import yaml
from mergekit.options import MergeOptions
from rich.table import Table
from rounds import Run, console, in_new_process, interleave, write_report

from mergekit_ram import inspection
from mergekit_ram.comparison import METHODS, compare
from mergekit_ram.recipe import Recipe

AGENTS = 3


def write_recipe(path: Path, directory: Path) -> None:
    content = {
        "merge_method": "ramplus",
        "base_model": str(directory / "base"),
        "models": [{"model": str(directory / f"agent-{i}")} for i in range(AGENTS)],
        "dtype": "bfloat16",
    }
    path.write_text(yaml.safe_dump(content))


def passes(recipe: Recipe, options: MergeOptions) -> dict[str, Callable[[], object]]:
    """The counting pass as a merge runs it, and those of ``inspect``. All are planned already."""
    planned = inspection.plan_inspection(recipe, options, {})

    def inspect(every: int) -> object:
        return list(inspection.count(planned, sample_every=every, description=""))

    return {
        "counting pass": planned.execute,
        "inspect": functools.partial(inspect, inspection.SAMPLE_EVERY),
        "inspect --exact": functools.partial(inspect, 1),
    }


def clock(function: Callable[[], object]) -> Run:
    start = time.perf_counter()
    function()
    return Run(time.perf_counter() - start)


def time_comparison(
    recipe: Recipe, options: MergeOptions, methods: tuple[str, ...]
) -> dict[str, float]:
    """Seconds of every method's own arithmetic, and of the whole comparison with loading and measuring."""
    start = time.perf_counter()
    found = compare(recipe, options, methods)
    whole = time.perf_counter() - start
    return {**{m.method: m.seconds for m in found.methods}, "whole": whole}


def passes_table(best: dict[str, Run]) -> Table:
    table = Table(title="passes over all agents, best seconds", title_justify="left")
    for column in ("", "seconds", "/ counting pass"):
        table.add_column(column, justify="right" if column else "left")
    for name, run in best.items():
        ratio = run.seconds / best["counting pass"].seconds
        table.add_row(name, f"{run.seconds:.2f}", f"{ratio:.2f}")
    return table


def comparison_table(seconds: dict[str, float]) -> Table:
    table = Table(title="compare, seconds", title_justify="left")
    own = sum(value for name, value in seconds.items() if name != "whole")
    for column in (*seconds, "whole / sum of methods"):
        table.add_column(column, justify="right")
    table.add_row(
        *(f"{value:.2f}" for value in seconds.values()), f"{seconds['whole'] / own:.2f}"
    )
    return table


@click.command()
@checkpoints.directory_option
@click.option(
    "--methods",
    default=",".join(METHODS),
    show_default=True,
    help="What to compare, separated by commas.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Runs of each pass; the best counts. The comparison runs once.",
)
@click.option(
    "--json",
    "report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write everything measured here.",
)
def main(directory, methods, repeats, report):
    """Time inspect and compare on three agents in bfloat16."""
    directory = directory.resolve()
    if not checkpoints.made(directory, AGENTS):
        click.echo(f"making checkpoints in {directory} …", err=True)
        in_new_process(checkpoints.make, directory, AGENTS)
    options = MergeOptions(quiet=True)
    file = directory / "inspected.yml"
    write_recipe(file, directory)
    recipe = Recipe.read(str(file))
    contenders = {
        name: functools.partial(clock, function)
        for name, function in passes(recipe, options).items()
    }
    contenders["counting pass"]()  # into the page cache
    best = interleave(contenders, least=repeats, most=repeats, patience=0)
    out = console()
    out.print(passes_table(best))
    seconds = time_comparison(recipe, options, tuple(methods.split(",")))
    out.print(comparison_table(seconds))
    if report:
        runs = {name: run.seconds for name, run in best.items()}
        write_report(report, passes=runs, comparison=seconds)


if __name__ == "__main__":
    main()
