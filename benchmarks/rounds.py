"""Running contenders in turn, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from rich.console import Console
from rich.table import Table

T = TypeVar("T")

_GLANCE_SECONDS = 0.01
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Run(NamedTuple):
    """One run of a contender. Runs order by time, so the best of several is their ``min``.

    ``peak_bytes`` is resident memory, ``peak_anonymous_bytes`` that without pages of mapped files.
    """

    seconds: float
    peak_bytes: int = 0
    peak_anonymous_bytes: int = 0


def interleave(
    contenders: Mapping[str, Callable[[], Run]],
    *,
    least: int,
    most: int,
    patience: float,
) -> dict[str, Run]:
    """The best run of every contender, one run each a round.

    Args:
        least: runs that every contender gets, however long they take.
        most: runs that none exceeds.
        patience: seconds after which a contender gets no more than the least runs.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for _ in range(most):
        for name, contender in contenders.items():
            spent = sum(run.seconds for run in runs[name])
            if len(runs[name]) < least or spent < patience:
                runs[name].append(contender())
    return {name: min(done) for name, done in runs.items()}


def in_new_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call the function in a process of its own, which starts without this one's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run_process(
    command: Sequence[str | Path], variables: Mapping[str, str] = {}
) -> Run:
    """Run a process to its end, and watch its memory."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    anonymous = 0
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while os.waitid(os.P_PID, process.pid, _ENDED) is None:
            anonymous = max(anonymous, _anonymous_bytes(process.pid))
            time.sleep(_GLANCE_SECONDS)
        seconds = time.perf_counter() - start
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise click.ClickException(f"{command} failed:\n{log.read()[-2000:]}")
    return Run(seconds, usage.ru_maxrss * 1024, anonymous)


def _anonymous_bytes(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def console() -> Console:
    """A console wide enough for the tables, also where the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def machine() -> dict[str, Any]:
    """What a report needs to say of where it was measured."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "mergekit", "mergekit-ram")},
    }


def write_report(path: Path, **report: Any) -> None:
    path.write_text(json.dumps({"machine": machine(), **report}, indent=2) + "\n")


Rows = Sequence[Sequence[str]]


def markdown(title: str, columns: Sequence[str], rows: Rows) -> str:
    """A section with one table, its first two columns text."""
    lines = [
        f"## {title}",
        "",
        f"| {' | '.join(columns)} |",
        "| --- | --- |" + " ---: |" * (len(columns) - 2),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def table(title: str, columns: Sequence[str], rows: Rows) -> Table:
    """The same for a terminal."""
    found = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        found.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found
