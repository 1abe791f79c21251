"""Reinforced Agent Merging (RAM, arXiv 2601.13572) for mergekit.

Importing this package makes ``ram``, ``ramplus`` and ``ramplus_tl`` available to mergekit; an installed package
does so by itself. Neither torch nor mergekit is imported before it is needed.
"""

from mergekit_ram import _autoload

__version__ = "0.1.0"

_PUBLIC = {
    "Agent": "kernel",
    "Rule": "kernel",
    "merge": "kernel",
    "merge_and_count": "kernel",
    "count": "kernel",
    "OverlapCounts": "overlap",
    "overlap_ratio": "overlap",
    "rescaling_factor": "overlap",
    "rescaling_factors": "overlap",
    "total_counts": "overlap",
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
