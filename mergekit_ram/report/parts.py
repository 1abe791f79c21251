"""The parts of a model that a report speaks of, by the names of their tensors."""

from __future__ import annotations

import re

_NUMBERED = re.compile(r"(.*?\.\d+)\.(.+)")
_KIND = re.compile(r"\.(weight|bias)$")


def layer_of(tensor: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp.up_proj.weight``; else the tensor's module."""
    found = _NUMBERED.fullmatch(tensor)
    return found.group(1) if found else _KIND.sub("", tensor)


def module_type_of(tensor: str) -> str:
    """``mlp.up_proj`` of ``model.layers.3.mlp.up_proj.weight``; inner numbers become ``*``."""
    found = _NUMBERED.fullmatch(tensor)
    inner = found.group(2) if found else tensor
    return re.sub(r"\b\d+\b", "*", _KIND.sub("", inner))


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
