"""The tensors of one file.

Whatever the file is, describing it neither hangs nor allocates what it claims.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import safetensors
import torch
from mergekit.io.lazy_unpickle import DeferredLoad
from mergekit.io.loader import TensorLoader

from mergekit_ram.host.checkpoint.headers import TensorHeader, UnreadableError, dtype_name

# safetensors refuses longer headers; indexes hold less.
_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Content:
    """What a file holds.

    Attributes:
        tensors: by name.
        others: names of what is no plain tensor, in a pickle.
        refusal: why mergekit cannot read it lazily, if that was asked for.
    """

    tensors: Mapping[str, TensorHeader] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    refusal: str | None = None


def read_content(path: str, *, lazy: bool = False) -> Content:
    """Describe a file of tensors.

    Args:
        lazy: as mergekit reads pickles with ``--lazy-unpickle``.

    Raises:
        UnreadableError: it is no such file, or damaged.
    """
    require_file(path)
    if path.lower().endswith(".safetensors"):
        return Content(_safetensors_tensors(path))
    return _pickled(path, lazy)


def read_json(path: str) -> Any:
    """Content of a JSON file.

    Raises:
        UnreadableError: it is no such file.
    """
    require_file(path)
    try:
        if os.path.getsize(path) > _HEADER_BYTES:
            raise UnreadableError("too long for a config or an index")
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise UnreadableError(error.strerror) from None
    except (ValueError, RecursionError) as error:  # not JSON, not even text
        raise UnreadableError(f"not JSON ({error})") from None


def require_file(path: str) -> None:
    """Refuse what is no file or link to one: opening a pipe waits, reading a device never ends.

    Raises:
        UnreadableError: with the system's reason, clearer than what safetensors and torch make of
            it.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "a device or pipe"
            raise UnreadableError(f"not a file but {kind}")
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UnreadableError(error.strerror) from None
    except ValueError as error:  # a zero byte in the path
        raise UnreadableError(str(error)) from None


def spans(path: str) -> dict[str, tuple[int, int]]:
    """First byte and bytes of every tensor in a safetensors file; none of a damaged one."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _HEADER_BYTES):
                return {}
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= size - 8 - length:
                return {}
            found[name] = (8 + length + start, end - start)
        return found
    except (
        OSError,
        struct.error,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ):
        return {}


def _safetensors_tensors(path: str) -> dict[str, TensorHeader]:
    try:
        # Checks lengths, offsets and overlaps before it allocates anything.
        with safetensors.safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorHeader.checked(name, view.get_shape(), view.get_dtype())
                for name, view in views.items()
            }
    except (OSError, safetensors.SafetensorError) as error:
        raise UnreadableError(f"{error}; it is damaged or incomplete") from None


def _pickled(path: str, lazy: bool) -> Content:
    """Tensors of a pickle, read as torch and mergekit do: tensors and plain data alone."""
    stored = _attempt(
        lambda: torch.load(path, map_location="meta", weights_only=True),
        "not a pickle of tensors, or damaged",
    )
    if not isinstance(stored, Mapping):
        raise UnreadableError("not a dictionary of tensors")
    tensors = {
        name: TensorHeader.checked(name, tensor.shape, dtype_name(tensor.dtype))
        for name, tensor in stored.items()
        if isinstance(name, str) and _is_plain(tensor)
    }
    if not tensors:
        _point_to_tensors(stored)
    content = Content(tensors, tuple(str(n) for n in stored if n not in tensors))
    return _lazily(path, content) if lazy else content


def _attempt(read: Callable[[], Any], refusal: str) -> Any:
    try:
        return read()
    except Exception as error:  # pickles fail in any way their bytes can be wrong
        reason = str(error).split("\n")[0].split(". ")[0] or type(error).__name__
        raise UnreadableError(f"{refusal} ({reason})") from None


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, torch.Tensor) and entry.layout is torch.strided


def _point_to_tensors(stored: Mapping[Any, Any]) -> None:
    """Say where the tensors of a pickle are that are not where mergekit looks for them."""
    for name, entry in stored.items():
        if isinstance(entry, Mapping) and any(map(_is_plain, entry.values())):
            raise UnreadableError(
                f"{name} is not a tensor but a dictionary of them, where mergekit does not look",
                f"save the weights alone: torch.save(torch.load(file)[{name!r}], file)",
            )


def _lazily(path: str, content: Content) -> Content:
    """The same content, with what of it ``--lazy-unpickle`` cannot read."""
    try:
        index = _attempt(
            lambda: TensorLoader.get(path, use_lazy_unpickle=True).index,
            "--lazy-unpickle cannot read it",
        )
    except UnreadableError as error:
        return replace(content, refusal=str(error))
    tensors = {
        name: replace(header, readable=_is_read_lazily(index.get(name)))
        for name, header in content.tensors.items()
    }
    return replace(content, tensors=tensors)


def _is_read_lazily(entry: Any) -> bool:
    """Whether mergekit gets all that a tensor spans.

    It reads as many elements as the tensor has, from its first on.
    """
    if not isinstance(entry, DeferredLoad) or not entry.shape:
        return False
    if 0 in entry.shape:
        return True
    reach = sum((n - 1) * step for n, step in zip(entry.shape, entry.stride))
    return reach < math.prod(entry.shape)
