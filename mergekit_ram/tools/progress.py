"""Progress of a pass over the tensors of a recipe, on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")


def progress(items: Iterable[T], total: int, description: str, *, quiet: bool) -> Iterator[T]:
    """The items, with a bar that counts them, unless quiet."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tensors"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        yield from bar.track(items, total=total, description=description)
