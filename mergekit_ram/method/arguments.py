"""Refusals of values that no merge can use: a ``ValueError`` that names the
argument and the value.
"""

from __future__ import annotations

import math
from numbers import Integral, Real


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def require_number(name: str, value: object, *, least: float = -math.inf) -> None:
    number = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    require(math.isfinite(number), name, value, "a finite number")
    require(float(number) >= least, name, value, f"{least} or greater")


def require_count(name: str, value: object, *, least: int = 0) -> None:
    whole = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else least - 1
    require(whole >= least, name, value, f"an integer, {least} or greater")


def require_bool(name: str, value: object) -> None:
    require(isinstance(value, bool), name, value, "True or False")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    require(value in choices, name, value, f"one of {', '.join(choices)}")
