"""An output directory with an old model and a new one to come."""

from __future__ import annotations

import os
from pathlib import Path

from mergekit_ram.host import output

OLD = {
    "config.json": "old",
    "model.safetensors.index.json": "old",
    "model-00001-of-00002.safetensors": "old 1",
    "model-00002-of-00002.safetensors": "old 2",
    "README.md": "old",
    "notes.txt": "mine",
}
NEW = {
    "config.json": "new",
    "model.safetensors": "new",
    "README.md": "new",
    "ram_report.json": "new",
}
AFTER = {**NEW, "notes.txt": "mine"}


def write(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(content)


def read(directory: Path) -> dict[str, str]:
    """Files by their path in the directory."""
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def merge(out: Path, files: dict[str, str] = NEW) -> None:
    with output.staged_output(str(out)) as staging:
        write(Path(staging), files)


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if "mergekit-ram" in path.name]


def fail_at(monkeypatch, name: str, call: int, number: int) -> list[int]:
    """Have a function of ``os`` fail at one call; the number of calls so far."""
    function, calls = getattr(os, name), []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise OSError(number, os.strerror(number))
        return function(*arguments, **options)

    monkeypatch.setattr(os, name, failing)
    return calls


def fail_from(monkeypatch, name: str, call: int, number: int) -> None:
    """Have a function of ``os`` fail at one call and at all that follow."""
    function, calls = getattr(os, name), []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) >= call:
            raise OSError(number, os.strerror(number))
        return function(*arguments, **options)

    monkeypatch.setattr(os, name, failing)
