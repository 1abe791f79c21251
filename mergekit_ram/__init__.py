"""Reinforced Agent Merging (RAM, arXiv 2601.13572) for mergekit.

Importing this package makes ``ram``, ``ramplus`` and ``ramplus_tl`` available to mergekit; an
installed package does so by itself. Neither torch nor mergekit is imported before it is needed.

``merge``, ``check``, ``inspect`` and ``compare`` are the commands of the same names, see ``api``.
Tensors themselves are merged by the functions of ``mergekit_ram.method``.
"""

from typing import TYPE_CHECKING, Any

from mergekit_ram import _autoload
from mergekit_ram._version import __version__

if TYPE_CHECKING:
    from mergekit_ram.api import check, compare, inspect, merge
    from mergekit_ram.errors import MergeError, Problem, RecipeError
    from mergekit_ram.host.recipe import Recipe
    from mergekit_ram.report.checked import CheckResult
    from mergekit_ram.report.findings import Comparison, Inspection
    from mergekit_ram.report.merge_report import Report
    from mergekit_ram.report.plots import write_plots

__all__ = [
    "CheckResult",
    "Comparison",
    "Inspection",
    "MergeError",
    "Problem",
    "Recipe",
    "RecipeError",
    "Report",
    "__version__",
    "check",
    "compare",
    "inspect",
    "merge",
    "write_plots",
]

# Where the names are that are imported once they are asked for.
_PUBLIC = {
    "check": "api",
    "compare": "api",
    "inspect": "api",
    "merge": "api",
    "MergeError": "errors",
    "Problem": "errors",
    "RecipeError": "errors",
    "Recipe": "host.recipe",
    "CheckResult": "report.checked",
    "Comparison": "report.findings",
    "Inspection": "report.findings",
    "write_plots": "report.plots",
    "Report": "report.merge_report",
}

_autoload.install()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # start-up

    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
