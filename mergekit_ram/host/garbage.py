"""Python's garbage collector, in a process that ends with the merge."""

from __future__ import annotations

import gc
import os
import sys

# Those that merge and end. mergekit-evolve merges for days.
_COMMANDS = (
    "mergekit-ram",
    "mergekit-yaml",
    "mergekit-multi",
    "mergekit-pytorch",
    "mergekit-legacy",
    "mergekit-layershuffle",
)


def spare_imports() -> None:
    """In a command's own process, exempt what is there by now from garbage collection.

    That is half a million objects of mergekit's imports. Visiting them takes 0.3 s while merging
    and 1.3 s when Python ends. In any other process the collector is the caller's and stays as it
    is.
    """
    command, _ = os.path.splitext(os.path.basename(sys.argv[0]))
    if command in _COMMANDS and not gc.get_freeze_count():
        gc.freeze()
