"""``mergekit-evolve``."""

from __future__ import annotations

from types import ModuleType

from mergekit_ram.host.compatibility import require
from mergekit_ram.host.methods import METHODS


def extend(module: ModuleType) -> None:
    """Let ``mergekit-evolve`` search the agents' weights.

    Args:
        module: ``mergekit.evo.genome``.
    """
    maps = getattr(module, "METHOD_PARAM_MAPS", None)
    require(isinstance(maps, dict), "evo.genome.METHOD_PARAM_MAPS is not a dictionary")
    for name in METHODS:
        maps[name] = ["weight"]
