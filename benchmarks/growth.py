"""How whole merges grow with elements, agents and tensors: time, memory, and the planning alone.

    python benchmarks/growth.py --out growth

Every merge is a ``mergekit-yaml`` of its own. Checkpoints are made as they are needed, at most 7 GB of them at a time,
and removed. Needs matplotlib for the plots.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import checkpoints
import click
import yaml
from checkpoints import Sizes
from rounds import (
    Run,
    console,
    in_new_process,
    markdown,
    run_process,
    table,
    write_report,
)

AXES = ("elements", "agents", "tensors")
OURS = ("ram", "ramplus")
METHODS = (
    *OURS,
    "built-in ram",
    "built-in ramplus_tl",
    "ties",
    "dare_ties",
    "task_arithmetic",
)
_BUILT_IN = "built-in "
_GB = 1e9


@dataclass(frozen=True)
class Case:
    """What is merged: sizes of the models, and how many agents."""

    axis: str
    sizes: Sizes
    agents: int = 3

    @property
    def x(self) -> int:
        """Where it stands on its axis."""
        counted = {
            "elements": self.sizes.parameters(),
            "agents": self.agents,
            "tensors": self.sizes.tensors(),
        }
        return counted[self.axis]


def cases(axis: str) -> Iterator[Case]:
    if axis == "elements":
        for hidden in (256, 512, 1024, 2048):
            yield Case(axis, Sizes(12, hidden, 7 * hidden // 2))
    elif axis == "agents":
        for agents in (1, 2, 3, 5, 8):
            yield Case(axis, Sizes(12, 512, 1792), agents)
    else:
        for layers in (27, 111, 555, 2222):
            yield Case(axis, Sizes(layers, 16, 32, 64))


@dataclass(frozen=True)
class Point:
    """A measured merge.

    ``seconds`` are beyond mergekit's import; ``plan_seconds``, among them, are known where the tensors grow.
    """

    axis: str
    x: int
    method: str
    seconds: float
    plan_seconds: float | None
    peak_bytes: int
    peak_anonymous_bytes: int


@dataclass(frozen=True)
class Fit:
    """Least squares line y = constant + slope · x, and the power of x by which y grew from the last point but one.

    A power of 1 is linear growth; below 1, the constant still counts.
    """

    axis: str
    method: str
    constant: float
    slope: float
    power: float


def measure(
    case: Case, methods: Sequence[str], directory: Path, import_seconds: float
) -> Iterator[Point]:
    """Merge by every method."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        models, config = Path(place) / "models", Path(place) / "recipe.yml"
        in_new_process(checkpoints.make, models, case.agents, case.sizes)
        for method in methods:
            config.write_text(yaml.safe_dump(recipe(method, models, case.agents)))
            click.echo(f"{case.axis} {case.x:,}: {method} …", err=True)
            disabled = method.startswith(_BUILT_IN)
            planning = case.axis == "tensors"
            plan_seconds = in_new_process(plan, config, disabled) if planning else None
            run = _merge(config, Path(place) / "merged", disabled)
            seconds = run.seconds - import_seconds
            click.echo(f"  {seconds:.1f} s", err=True)
            yield Point(case.axis, case.x, method, seconds, plan_seconds, *run[1:])


def recipe(method: str, models: Path, agents: int) -> dict:
    parameters = {} if method.startswith(_BUILT_IN) else {"weight": 1.0}
    if "ties" in method:
        parameters["density"] = 0.5
    return {
        "merge_method": method.removeprefix(_BUILT_IN),
        "base_model": str(models / "base"),
        "models": [
            {"model": str(models / f"agent-{i}"), "parameters": parameters}
            for i in range(agents)
        ],
        "dtype": "bfloat16",
    }


def plan(config: Path, disabled: bool) -> float:
    """Seconds to check and to plan a merge, without our plugin if disabled. For a process of its own."""
    if disabled:
        os.environ["MERGEKIT_RAM_DISABLE"] = "1"
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions
    from mergekit.plan import MergePlanner

    class Planned(Exception):
        pass

    plan_to_disk = MergePlanner.plan_to_disk

    def plan_only(self, out_path):
        plan_to_disk(self, out_path)
        raise Planned

    MergePlanner.plan_to_disk = plan_only
    merge = MergeConfiguration.model_validate(yaml.safe_load(config.read_text()))
    start = time.perf_counter()
    try:
        run_merge(merge, str(config.with_name("planned")), MergeOptions(quiet=True))
    except Planned:
        return time.perf_counter() - start
    raise RuntimeError("nothing was planned")


def _merge(config: Path, output: Path, disabled: bool) -> Run:
    shutil.rmtree(output, ignore_errors=True)
    program = Path(sys.executable).with_name("mergekit-yaml")
    options = ("--no-copy-tokenizer", "--quiet", "--out-shard-size", "500M")
    variables = {"MERGEKIT_RAM_DISABLE": "1"} if disabled else {}
    return run_process([program, config, output, *options], variables)


def import_mergekit() -> Run:
    return run_process([sys.executable, "-c", "import mergekit.scripts.run_yaml"])


def fit(points: Sequence[Point]) -> Fit:
    n = len(points)
    xs, ys = [p.x for p in points], [p.seconds for p in points]
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys))
    slope = covariance / sum((x - mean_x) ** 2 for x in xs)
    power = math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2])
    return Fit(points[0].axis, points[0].method, mean_y - slope * mean_x, slope, power)


def curves(points: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """Points by axis and method."""
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.axis, point.method), []).append(point)
    return found


COLUMNS = ("", "method", "seconds", "planning", "peak GB", "anonymous GB")
FIT_COLUMNS = ("", "method", "constant s", "seconds per unit", "last power")


def rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    return [
        (
            f"{p.x:,} {p.axis}",
            p.method,
            f"{p.seconds:.2f}",
            "" if p.plan_seconds is None else f"{p.plan_seconds:.2f}",
            f"{p.peak_bytes / _GB:.2f}",
            f"{p.peak_anonymous_bytes / _GB:.2f}",
        )
        for p in points
    ]


def fit_rows(fits: Sequence[Fit]) -> list[tuple[str, ...]]:
    return [
        (
            f.axis,
            f.method,
            f"{f.constant:.2f}",
            f"{f.slope:.3g}",
            f"{f.power:.2f}",
        )
        for f in fits
    ]


def plot(points: Sequence[Point], path: Path) -> None:
    from matplotlib import pyplot

    axes = [axis for axis in AXES if any(p.axis == axis for p in points)]
    figure, panels = pyplot.subplots(
        2, len(axes), figsize=(3.6 * len(axes), 5), squeeze=False
    )
    for column, axis in enumerate(axes):
        time_panel, memory_panel = panels[:, column]
        for (its_axis, method), curve in curves(points).items():
            if its_axis != axis:
                continue
            xs = [p.x for p in curve]
            style = "o-" if method in OURS else "s--"
            time_panel.plot(xs, [p.seconds for p in curve], style, label=method)
            memory = [p.peak_anonymous_bytes / _GB for p in curve]
            memory_panel.plot(xs, memory, style, label=method)
        for panel in (time_panel, memory_panel):
            panel.set_xlim(left=0)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        memory_panel.set_xlabel(axis)
    panels[0][0].set_ylabel("seconds beyond import")
    panels[1][0].set_ylabel("peak anonymous memory, GB")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


@click.command()
@click.option(
    "--axis",
    "axes",
    type=click.Choice(AXES),
    multiple=True,
    default=AXES,
    show_default=True,
    help="What to vary; repeat for several.",
)
@click.option(
    "--method",
    "methods",
    type=click.Choice(METHODS),
    multiple=True,
    default=OURS,
    show_default=True,
    help="Merge method; repeat for several.",
)
@click.option("--all", "everything", is_flag=True, help="Merge by every method.")
@click.option(
    "--patience",
    default=math.inf,
    help="Seconds of a merge after which mergekit's method is left out of what is larger on the axis.",
)
@click.option("--most", type=int, help="Leave out what is larger on its axis.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=tempfile.gettempdir(),
    show_default=True,
    help="Where checkpoints and models are written meanwhile.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write growth.json, growth.md and growth.png here.",
)
def main(axes, methods, everything, patience, most, directory, out):
    """Measure how whole merges grow with elements, agents and tensors."""
    import_mergekit()  # into the page cache
    import_seconds = min(import_mergekit() for _ in range(2)).seconds
    points = []
    for axis in axes:
        patient = list(METHODS if everything else methods)
        for case in cases(axis):
            if most is None or case.x <= most:
                found = list(measure(case, patient, directory, import_seconds))
                points += found
                patient = [
                    p.method for p in found if p.method in OURS or p.seconds <= patience
                ]
    fits = [fit(curve) for curve in curves(points).values() if len(curve) > 1]
    tables = [
        ("whole merges", COLUMNS, rows(points)),
        ("growth of the seconds", FIT_COLUMNS, fit_rows(fits)),
    ]
    for parts in tables:
        console().print(table(*parts))
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_report(
            out / "growth.json",
            points=list(map(asdict, points)),
            fits=list(map(asdict, fits)),
        )
        (out / "growth.md").write_text("\n".join(markdown(*parts) for parts in tables))
        plot(points, out / "growth.png")


if __name__ == "__main__":
    main()
