"""The output directory: whole, or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from mergekit_ram.report import FILE_NAME, Report

# Read before single files, so those of an older model would hide a new one.
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What makes a directory pass for a model is moved last.
_LAST = "config.json"


@contextlib.contextmanager
def staged_output(out_path: str) -> Iterator[str]:
    """A directory to write a model into that becomes ``out_path`` once the block ends without an error.

    It lies hidden beside ``out_path``, on the same file system. After an error it is removed and ``out_path`` is as
    it was; one that a killed process left behind is removed by the next merge to the same place. Files already in
    ``out_path`` are replaced where the new model has the same, and otherwise stay, but for an old model's index.
    """
    parent, name = os.path.split(os.path.abspath(out_path))
    staging = os.path.join(parent, f".{name}.mergekit-ram-partial")
    shutil.rmtree(staging, ignore_errors=True)
    os.makedirs(os.path.join(staging, name))
    try:
        yield os.path.join(staging, name)
        for entry in os.listdir(staging):
            _publish(os.path.join(staging, entry), os.path.join(parent, entry))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def add_card_section(directory: str) -> None:
    """Describe the agents in a written model's card, if it has both a card and a report."""
    card = os.path.join(directory, "README.md")
    report = os.path.join(directory, FILE_NAME)
    if os.path.exists(card) and os.path.exists(report):
        with open(report, encoding="utf-8") as file:
            section = Report.model_validate_json(file.read()).to_markdown()
        with open(card, "a", encoding="utf-8") as file:
            file.write("\n" + section)


def _publish(staged: str, final: str) -> None:
    if not os.path.isdir(staged) or not os.path.exists(final):
        os.replace(staged, final)
        return
    for stale in (_LAST, *_INDEXES):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(final, stale))
    for name in sorted(os.listdir(staged), key=lambda name: name == _LAST):
        target = os.path.join(final, name)
        if os.path.isdir(target) and not os.path.islink(target):
            shutil.rmtree(target)
        os.replace(os.path.join(staged, name), target)
