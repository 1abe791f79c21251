"""Extending a module of mergekit once, whatever other plugins do to it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

MARK = "_extended_by_mergekit_ram"


def once(extend: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Extend a module once, until it is reloaded, whatever others make of it meanwhile."""

    @functools.wraps(extend)
    def extend_once(module: ModuleType) -> None:
        if not getattr(module, MARK, False):
            extend(module)
            setattr(module, MARK, True)

    return extend_once


def is_extended(function: Any) -> bool:
    """Whether a function is ours, or wraps one of ours by ``functools.wraps``."""
    return getattr(function, MARK, False)


def marked(function: Any) -> Any:
    setattr(function, MARK, True)
    return function


def replace_everywhere(name: str, function: Any, extended: Any) -> None:
    """Replace a function also in modules that took it by name before this was imported."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is function:
            setattr(module, name, extended)
