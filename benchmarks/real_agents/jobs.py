"""Work that is done once: each job has one result file, and a result that is there is kept.

Any number of processes may work through the same list, also at different times: a job is taken by
a lock which the system frees with its process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class Job:
    """Something to run which leaves its result at a path, once what it needs is there."""

    result: Path
    needs: Sequence[Path]
    run: Callable[[], object]

    @property
    def is_done(self) -> bool:
        return self.result.exists()

    @property
    def is_ready(self) -> bool:
        return all(path.exists() for path in self.needs)


def work(jobs: Iterable[Job], locks: Path) -> None:
    """Run what is left, first things first, until nothing is or others are at all of it."""
    locks.mkdir(parents=True, exist_ok=True)
    left = list(jobs)
    while left := [job for job in left if not job.is_done]:
        if not any(_run_alone(job, locks) for job in left if job.is_ready):
            time.sleep(WAIT_SECONDS)


def _run_alone(job: Job, locks: Path) -> bool:
    """Run it, unless another process does; whether it was run."""
    lock = locks / "-".join((job.result.parent.name, job.result.name, "lock"))
    try:
        with FileLock(lock, timeout=0):
            if job.is_done:
                return False
            start = time.perf_counter()
            print(f"{job.result}: begun {time.strftime('%H:%M:%S')}", flush=True)
            job.run()
            print(f"{job.result}: {time.perf_counter() - start:.0f} s", flush=True)
            return True
    except Timeout:
        return False


def write_json(path: Path, contents: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(contents, indent=1) + "\n")
    unfinished.rename(path)


def once(path: Path, make: Callable[[], Any]) -> Any:
    """What the file says, made and written first if it is not there."""
    if not path.exists():
        write_json(path, make())
    return json.loads(path.read_text())
