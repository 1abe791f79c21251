"""Reinforced Agent Merging (RAM, arXiv 2601.13572) for mergekit.

Importing this package makes ``ram``, ``ramplus`` and ``ramplus_tl`` available to mergekit; an
installed package does so by itself. Neither torch nor mergekit is imported before it is needed.
"""

from mergekit_ram import _autoload
from mergekit_ram._version import __version__

_PUBLIC = {
    "Agent": "method.rule",
    "Rule": "method.rule",
    "merge": "method.stream",
    "merge_and_count": "method.stream",
    "count": "method.stream",
    "OverlapCounts": "method.overlap",
    "overlap_ratio": "method.overlap",
    "rescaling_factor": "method.overlap",
    "rescaling_factors": "method.overlap",
    "total_counts": "method.overlap",
}

__all__ = [*_PUBLIC, "__version__"]  # noqa: PLE0604

_autoload.install()


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__():
    return sorted([*globals(), *_PUBLIC])
