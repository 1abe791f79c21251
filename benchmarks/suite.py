"""Runs all benchmarks and writes what the README says: JSON, Markdown and plots.

    python benchmarks/suite.py --out results

Takes about an hour, 10 GB of memory and 12 GB of disk on two cores; ``--big-tensor`` adds 20 GB of each. Needs matplotlib.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import big_tensor
import click
import growth
from rounds import Rows, markdown

BENCHMARKS = ("kernel", "whole_merge", "growth", "big_tensor")
_LIMIT, _IMPORT = "read all, write one", "import mergekit"
_GB = 1e9
_OTHERS = (
    "count",
    "built-in ram",
    "mergekit's ties",
    "mergekit's dare_ties",
    "mergekit's task_arithmetic",
)


def run(name: str, out: Path) -> None:
    """Run one benchmark; its JSON is named as it is."""
    arguments = {
        "kernel": ["--json", out / "kernel.json"],
        "whole_merge": ["--all", "--json", out / "whole_merge.json"],
        "growth": ["--all", "--patience", "5", "--out", out],
        "big_tensor": ["--out", out],
    }
    script = Path(__file__).with_name(f"{name}.py")
    click.echo(f"=== {name}", err=True)
    subprocess.run([sys.executable, script, *arguments[name]], check=True)


def kernel_rows(report: dict) -> Rows:
    """Every tensor of every contender: seconds, and the ratios that count."""
    return [
        (
            f"{t['elements']:,} {t['dtype']}",
            f"{t['agents']} agents",
            f"{t['seconds']['copy']:.4f}",
            f"{t['seconds']['ram']:.4f}",
            f"{t['seconds']['ram'] / t['seconds']['copy']:.1f}",
            *(_over(t["seconds"], name, "ram") for name in _OTHERS),
        )
        for t in report["timings"]
    ]


def _over(seconds: dict[str, float], one: str, other: str) -> str:
    if one not in seconds or other not in seconds:
        return ""
    return f"{seconds[one] / seconds[other]:.1f}"


def whole_merge_rows(report: dict) -> Rows:
    runs = report["runs"]
    limit = runs[_LIMIT]["seconds"]
    rows = []
    for name, found in runs.items():
        own = found["seconds"] - (0 if name == _LIMIT else runs[_IMPORT]["seconds"])
        if name != _IMPORT:
            peak = found["peak_bytes"] / _GB
            rows.append((name, "", f"{own:.1f}", f"{own / limit:.1f}", f"{peak:.2f}"))
    return rows


def sections(out: Path) -> Iterator[str]:
    """Markdown of every benchmark that has been run."""
    for name, render in RENDERED.items():
        path = out / f"{name}.json"
        if path.exists():
            yield from render(json.loads(path.read_text()))


def _kernel(report: dict) -> Iterator[str]:
    columns = ("tensor", "", "copy s", "ram s", "ram / copy")
    others = (f"{name} / ram" for name in _OTHERS)
    yield markdown("Merge of one tensor", (*columns, *others), kernel_rows(report))


def _whole_merge(report: dict) -> Iterator[str]:
    columns = ("merge", "", "s beyond import", "times the limit", "peak GB")
    yield markdown("Whole merges", columns, whole_merge_rows(report))


def _growth(report: dict) -> Iterator[str]:
    points = [growth.Point(**point) for point in report["points"]]
    fits = [growth.Fit(**fit) for fit in report["fits"]]
    yield markdown("Growth", growth.COLUMNS, growth.rows(points))
    yield markdown("Growth of the seconds", growth.FIT_COLUMNS, growth.fit_rows(fits))


def _big_tensor(report: dict) -> Iterator[str]:
    merges = [big_tensor.Merge(**merge) for merge in report["merges"]]
    yield markdown("A big tensor", big_tensor.COLUMNS, big_tensor.rows(merges))


RENDERED: dict[str, Callable[[dict], Iterator[str]]] = {
    "kernel": _kernel,
    "whole_merge": _whole_merge,
    "growth": _growth,
    "big_tensor": _big_tensor,
}


def plot_whole_merges(report: dict, path: Path) -> None:
    from matplotlib import pyplot

    rows = [row for row in whole_merge_rows(report)][::-1]
    figure, panel = pyplot.subplots(figsize=(6, 0.4 * len(rows) + 1))
    bars = panel.barh([row[0] for row in rows], [float(row[2]) for row in rows])
    panel.bar_label(bars, padding=3)
    panel.set_xlabel("seconds beyond mergekit's import")
    panel.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def plot_kernel(report: dict, path: Path) -> None:
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 3.5))
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for timing in report["timings"]:
        if timing["agents"] == 3:
            for contender in ("copy", "ram", "built-in ram"):
                if contender in timing["seconds"]:
                    curve = curves.setdefault((contender, timing["dtype"]), [])
                    rate = timing["elements"] / timing["seconds"][contender] / 1e6
                    curve.append((timing["elements"], rate))
    for (contender, dtype), curve in curves.items():
        style = "o-" if dtype == "bfloat16" else "s--"
        panel.plot(*zip(*curve), style, label=f"{contender}, {dtype}", markersize=4)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("elements of the tensor, 3 agents")
    panel.set_ylabel("million elements a second")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Where JSON, results.md and plots are written.",
)
@click.option(
    "--only",
    type=click.Choice(BENCHMARKS),
    multiple=True,
    help="Run only this; repeat for several. Results of the others stay.",
)
@click.option(
    "--big-tensor",
    "with_big_tensor",
    is_flag=True,
    help="Also merge a tensor of 1.25 G elements.",
)
@click.option(
    "--render-only", is_flag=True, help="Run nothing, write Markdown and plots anew."
)
def main(out, only, with_big_tensor, render_only):
    """Run all benchmarks, ours and mergekit's methods in one run."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = only or BENCHMARKS[: 4 if with_big_tensor else 3]
    for name in chosen if not render_only else ():
        run(name, out)
    (out / "results.md").write_text("# Measured\n\n" + "\n".join(sections(out)))
    for name, plot in (("kernel", plot_kernel), ("whole_merge", plot_whole_merges)):
        path = out / f"{name}.json"
        if path.exists():
            plot(json.loads(path.read_text()), path.with_suffix(".png"))
    click.echo((out / "results.md").read_text())


if __name__ == "__main__":
    main()
