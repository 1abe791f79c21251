"""The job directory, where finished parts lie until the model is whole: what in it is ours."""

from __future__ import annotations

import contextlib
import os
import re
import shutil

from mergekit_ram.errors import MergeError
from mergekit_ram.host.checkpoint import some

# Names that a merge gives in its job directory: the partition, manifests, shards, and what a killed
# process left of them.
_OWN = re.compile(
    r"partition\.json|\d{5}\.(counted|written)\.json|\d{5}\.(pytorch_)?model\.(safetensors|bin)"
    r"|(partition|\d{5})\..*\.partial"
)


def require_own(directory: str) -> None:
    """Refuse a directory that holds anything else than what merges leave in one.

    Raises:
        MergeError: names some of it.
    """
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise MergeError(f"the job directory {directory} is no directory: name another")
    others = [name for name in _names(directory) if not _OWN.fullmatch(name)]
    if others:
        raise MergeError(
            f"the job directory {directory} holds {some(others)}, "
            "which no merge wrote: name an empty or a new one"
        )


def remove_own(directory: str) -> None:
    """Remove what a merge left in a job directory, and the directory if nothing else is in it."""
    for name in filter(_OWN.fullmatch, _names(directory)):
        path = os.path.join(directory, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    with contextlib.suppress(OSError):  # not empty, or not there
        os.rmdir(directory)


def _names(directory: str) -> list[str]:
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []
