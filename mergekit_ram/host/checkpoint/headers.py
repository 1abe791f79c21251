"""A stored tensor as its file describes it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_FLOATING = ("F64", "F32", "F16", "BF16")
# Of safetensors, where they do not follow from torch's.
_DTYPE_NAMES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
_KINDS = {"float": "F", "int": "I", "uint": "U", "complex": "C"}
# torch has no tensor of more elements, nor of more axes.
_MOST_ELEMENTS = 2**63 - 1
_MOST_AXES = 64


class UnreadableError(Exception):
    """A file that cannot be read; the message says why, and leaves the file to be named.

    Attributes:
        remedy: what the user can do; None where the file is damaged.
    """

    def __init__(self, message: str, remedy: str | None = None):
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype of a stored tensor, both None where unknown.

    Attributes:
        dtype: by safetensors' name, as ``BF16``.
        readable: whether mergekit reads it, in the way it was asked to, as it is stored.
    """

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    readable: bool = True

    @property
    def floating(self) -> bool:
        return self.dtype in _FLOATING

    @classmethod
    def checked(cls, name: str, shape: Sequence[int], dtype: str) -> TensorHeader:
        """The header that a file gives a tensor.

        Raises:
            UnreadableError: no tensor has such a shape.
        """
        possible = len(shape) <= _MOST_AXES and all(
            isinstance(length, int) and length >= 0 for length in shape
        )
        if not possible or math.prod(max(n, 1) for n in shape) > _MOST_ELEMENTS:
            shown = ", ".join(map(str, shape[:8]))
            raise UnreadableError(f"{name} has the impossible shape [{shown}]; it is damaged")
        return cls(tuple(shape), dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """``BF16`` of ``torch.bfloat16``: safetensors' name, or torch's where it has none."""
    name = str(dtype).removeprefix("torch.")
    if name in _DTYPE_NAMES:
        return _DTYPE_NAMES[name]
    found = re.fullmatch(r"(float|int|uint|complex)(\d.*)", name)
    return f"{_KINDS[found[1]]}{found[2].upper()}" if found else name


def stored_bytes(tensors: Mapping[str, TensorHeader], dtype: str | None) -> int:
    """Bytes of the tensors, floating ones as ``dtype``, a torch name without prefix, if given."""
    total = 0
    for header in tensors.values():
        stored_as = dtype if dtype and header.floating else header.dtype or ""
        bits = re.search(r"\d+", stored_as)
        elements = 0 if header.shape is None else math.prod(header.shape)
        total += math.ceil(elements * (int(bits[0]) if bits else 8) / 8)
    return total


def some(names: Sequence[str]) -> str:
    """The first few of them, and how many more."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
