"""What the plugin relies on in mergekit, and a clear refusal where that has changed."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Sequence
from typing import Any

from mergekit_ram._autoload import SUPPORTED
from mergekit_ram.errors import IncompatibleMergekitError

_FIRST, _BEYOND = (0, 1, 5), (0, 2, 0)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise IncompatibleMergekitError(
            f"this version of mergekit-ram works with mergekit {SUPPORTED}, and mergekit "
            f"{installed_version() or 'of unknown version'} differs: {what}"
        )


def require_version() -> None:
    version = installed_version()
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    if found:
        numbers = tuple(int(part or 0) for part in found.groups())
        require(_FIRST <= numbers < _BEYOND, "its version is outside that range")


def require_parameters(owner: Any, name: str, expected: Sequence[str]) -> None:
    function = getattr(owner, name, None)
    require(callable(function), f"{owner.__name__}.{name} is gone")
    parameters = inspect.signature(function).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return  # another plugin's, which hands on what it is given
    missing = [parameter for parameter in expected if parameter not in parameters]
    require(not missing, f"{owner.__name__}.{name} takes no {', '.join(missing)}")


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("mergekit")
    except importlib.metadata.PackageNotFoundError:
        return None
