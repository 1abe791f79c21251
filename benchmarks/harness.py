"""What every benchmark is made of: contenders run in turn, processes of their own, memory, reports.

Linux only: memory is read from /proc.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import rich.progress
from matplotlib.figure import Figure
from rich.console import Console

T = TypeVar("T")
MB, GB = 1e6, 1e9
_GLANCE_SECONDS = 0.01
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Run(NamedTuple):
    """One run of a contender. Runs order by time, so the best of several is their ``min``.

    ``peak_bytes`` is resident memory, ``anonymous_bytes`` its peak without pages of mapped files.
    """

    seconds: float
    peak_bytes: int = 0
    anonymous_bytes: int = 0


def clock(function: Callable[[], object], timer: Callable[[], float] = time.perf_counter) -> Run:
    start = timer()
    function()
    return Run(timer() - start)


def interleave(
    contenders: Mapping[str, Callable[[], Run]],
    *,
    least: int,
    most: int,
    patience: float = 0.0,
    description: str = "",
) -> dict[str, Run]:
    """The best run of every contender, one run each a round, so that disturbances meet all alike.

    Args:
        least: runs that every contender gets, however long they take.
        most: runs that none exceeds.
        patience: seconds of runs after which a contender gets no more than the least.
        description: of a progress bar; none without it.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    turns = [(number, name) for number in range(most) for name in contenders]
    for number, name in track(turns, description):
        if number < least or sum(run.seconds for run in runs[name]) < patience:
            runs[name].append(contenders[name]())
    return {name: min(done) for name, done in runs.items()}


def track(items: Sequence[T], description: str) -> Iterable[T]:
    """The items, with a bar on standard error, drawn between them only: no thread disturbs."""
    settings = {"console": Console(stderr=True), "auto_refresh": False, "disable": not description}
    return rich.progress.track(items, description, **settings)


def in_new_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call the function in a process of its own, which starts without this one's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run_process(command: Sequence[str | Path], variables: Mapping[str, str] = {}) -> Run:
    """Run a process to its end, and watch its memory."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    anonymous = 0
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while os.waitid(os.P_PID, process.pid, _ENDED) is None:
            anonymous = max(anonymous, _proc_bytes(f"/proc/{process.pid}/status", "RssAnon"))
            time.sleep(_GLANCE_SECONDS)
        seconds = time.perf_counter() - start
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise click.ClickException(f"{command} failed:\n{log.read()[-2000:]}")
    return Run(seconds, usage.ru_maxrss * 1024, anonymous)


def peak_scratch(merge: Callable[[], Any]) -> int:
    """Bytes that a merge takes at its peak beyond its resident inputs and its output."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not serve as scratch
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _proc_bytes("/proc/self/status", "VmRSS")
    merged = merge()
    return _proc_bytes("/proc/self/status", "VmHWM") - before - merged.nbytes


def free_bytes() -> int:
    return _proc_bytes("/proc/meminfo", "MemAvailable")


def _proc_bytes(path: str, field: str) -> int:
    """0 where the field is not there, as of a process that has ended."""
    lines = Path(path).read_text().splitlines()
    found = (line.split()[1] for line in lines if line.startswith(field + ":"))
    return int(next(found, 0)) * 1024


@dataclass(frozen=True)
class Table:
    """What was measured.

    Attributes:
        columns: heading → format of the values below it, "" for text.
        rows: a value for every column; None was not measured.
        plot: columns of x, of y and, for a curve each, of labels. Without labels x has bars.
    """

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]
    plot: Sequence[str] = ()

    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def cells(self) -> list[list[str]]:
        return [
            ["" if row[name] is None else format(row[name], f) for name, f in self.columns.items()]
            for row in self.records()
        ]

    def markdown(self) -> str:
        rules = ["---:" if form else "---" for form in self.columns.values()]
        lines = [f"| {' | '.join(line)} |" for line in [self.columns, rules, *self.cells()]]
        return "\n".join([f"## {self.title}\n", *lines]) + "\n"

    def draw(self, panel: Any) -> None:
        x, y, *labels = self.plot
        curves: dict[str, list[tuple[Any, float]]] = {}
        for row in self.records():
            if row[y] is not None:
                label = ", ".join(row[name] for name in labels)
                curves.setdefault(label, []).append((row[x], row[y]))
        for i, (label, curve) in enumerate(curves.items()):
            if labels:  # linear growth has a slope of 1; the colours repeat after ten
                style = "o-" if i < 10 else "s--"
                panel.loglog(*zip(*curve), style, label=label, markersize=4)
                panel.legend(fontsize=7)
            else:
                panel.bar_label(panel.barh(*zip(*curve[::-1])), fmt="%.1f", padding=3)
        panel.set(title=self.title, xlabel=x if labels else y, ylabel=y if labels else None)


def publish(tables: Sequence[Table], report: Path | None) -> None:
    """Print the tables; with a report, write them as JSON, Markdown and plots, side by side."""
    text = "\n".join(table.markdown() for table in tables)
    click.echo(text)
    if report:
        report.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "tables": {t.title: t.records() for t in tables}}
        report.write_text(json.dumps(content, indent=2) + "\n")
        report.with_suffix(".md").write_text(text)
        plotted = [table for table in tables if table.plot]
        if plotted:
            plot(plotted, report.with_suffix(".png"))


def machine() -> dict[str, Any]:
    """What a report needs to say of where it was measured."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "mergekit", "mergekit-ram")},
    }


def plot(tables: Sequence[Table], path: Path) -> None:
    """A panel for every table."""
    figure = Figure(figsize=(6 * len(tables), 4.5), layout="constrained")
    for panel, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables):
        table.draw(panel)
    figure.savefig(path, dpi=150)


def option(flag: str, *names: str, **settings: Any) -> Callable:
    return click.option(flag, *names, show_default=True, **settings)


def several(flag: str, name: str, **settings: Any) -> Callable:
    """An option that may be repeated."""
    settings["help"] += "; repeat for several."
    return option(flag, name, multiple=True, **settings)


def repeats_option(default: int, least: int = 1) -> Callable:
    at_least = click.IntRange(min=least)
    text = "Most runs of each contender; the best counts."
    return option("--repeats", type=at_least, default=default, help=text)


def patience_option(default: float) -> Callable:
    text = "Seconds of runs after which a contender gets no more than it must."
    return option("--patience", default=default, help=text)


json_option = option(
    "--json",
    "report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write everything measured here, and beside it as Markdown and plots.",
)
directory_option = option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    default=Path(tempfile.gettempdir()) / "mergekit-ram-benchmark",
    help="Where checkpoints are made and kept, and models written.",
)
tiny_option = option("--tiny", is_flag=True, help="Small checkpoints, to see that it runs.")
