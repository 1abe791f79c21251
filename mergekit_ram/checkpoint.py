"""What a checkpoint holds, from its config, index and safetensors headers alone: no weight is read."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import huggingface_hub
import safetensors
import torch
from mergekit.common import ModelReference
from mergekit.io.loader import TensorLoader

LOG = logging.getLogger("mergekit_ram")

# Of tensors that hold what quantized weights beside them are scaled by, or quantized weights themselves.
_QUANTIZED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight.absmax",
    ".weight.quant_map",
    ".SCB",
    ".weight_packed",
    ".weight_scale_2",
    ".weight_zero_point",
    ".weight.nested_absmax",
    ".scale_inv",
    ".scale_weight",
    ".input_scale",
    ".g_idx",
    ".qzeros",
    "_scale_inv",
)
# Names of float8 dtypes, as safetensors and as torch calls them, and of integers that only quantized weights have.
_EIGHT_BITS = re.compile(r"F8_.*|F4|F6_.*|torch\.float(8|4).*")
_INTEGERS = re.compile(r"[IU](8|16)|torch\.u?int(8|16)")
# What an index of a million tensors takes; more is no index.
_LARGEST_INDEX = 200_000_000
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_FLOATING = frozenset(_DTYPE_NAMES.values())


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype of a stored tensor, both None where unknown. The dtype by safetensors' name, as ``BF16``."""

    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def floating(self) -> bool:
        return self.dtype in _FLOATING


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its files describe it.

    Attributes:
        tensors: by name.
        faults: what is wrong with its files, each naming the file.
        quantization: how its weights are quantized, None if they are not.
        leftover: the quantization that its config speaks of although its weights are plain floats, None if it does not.
    """

    tensors: Mapping[str, TensorHeader] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    quantization: str | None = None
    leftover: str | None = None

    @property
    def float32(self) -> bool:
        """Whether weights are stored in more precision than 16 bits."""
        return any(header.dtype in ("F32", "F64") for header in self.tensors.values())

    @classmethod
    def of(cls, model: ModelReference, config: Any = None) -> Checkpoint:
        """Describe a model's checkpoint, local or on the Hub. Of a model with a LoRA, the model's.

        Args:
            config: the model's transformers config, if it could be read.
        """
        path = model.model.path
        if os.path.isdir(path):
            return cls.of_directory(path, config)
        tensors = _hub_tensors(path, model.model.revision)
        return cls._judged(tensors, (), getattr(config, "quantization_config", None))

    @classmethod
    def of_directory(cls, path: str, config: Any = None) -> Checkpoint:
        """Describe a local checkpoint."""
        tensors, faults = _local_tensors(path)
        if config is None:
            settings = _quantization_settings(os.path.join(path, "config.json"))
        else:
            settings = getattr(config, "quantization_config", None)
        return cls._judged(tensors, tuple(faults), settings)

    @classmethod
    def _judged(
        cls, tensors: Mapping[str, TensorHeader], faults: tuple[str, ...], settings: Any
    ) -> Checkpoint:
        """Judge by the headers whether weights are quantized, by the config's settings only where there are none."""
        found, said = _quantization(tensors), _quantization_method(settings)
        if said is None or found:
            return cls(tensors, faults, found and (said or found))
        if not tensors:
            return cls(tensors, faults, said)
        return cls(tensors, faults, leftover=said)

    @classmethod
    def of_file(cls, path: str, *, strict: bool = True) -> Checkpoint:
        """Describe a single safetensors or pickle file.

        Args:
            strict: what is no tensor is a fault, as to ``mergekit-pytorch``; False leaves it out, as mergekit does that
                loads a model's tensors by their names.
        """
        try:
            tensors = _file_tensors(path, strict)
        except _UnreadableError as error:
            return cls(faults=(f"{path}: {error}",))
        return cls(tensors, (), _quantization(tensors))


class _UnreadableError(Exception):
    """A file of weights that cannot be read; the message says why, and leaves the file to be named."""


def _file_tensors(path: str, strict: bool) -> dict[str, TensorHeader]:
    _require_regular(path)
    if path.lower().endswith(".safetensors"):
        return _safetensors_tensors(path)
    return _pickled_tensors(path, strict)


def _safetensors_tensors(path: str) -> dict[str, TensorHeader]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(tuple(view.get_shape()), view.get_dtype())
                for name, view in views.items()
            }
    except (OSError, OverflowError, ValueError, safetensors.SafetensorError) as error:
        raise _UnreadableError(f"{error}; it is damaged or incomplete") from None


def _pickled_tensors(path: str, strict: bool) -> dict[str, TensorHeader]:
    """Tensors of a pickle, by mergekit's own loaders, which build nothing but tensors."""
    try:
        stored = _unpickled(path)
    except Exception as error:  # pickles fail in any way their bytes can be wrong
        reason = str(error).split("\n")[0].split(". ")[0] or type(error).__name__
        raise _UnreadableError(
            f"not a pickle of tensors, or damaged ({reason})"
        ) from None
    tensors = {}
    if not isinstance(stored, Mapping):
        raise _UnreadableError(
            f"a {type(stored).__name__}, not a dictionary of tensors"
        )
    others = []
    for name, tensor in stored.items():
        if not isinstance(getattr(tensor, "dtype", None), torch.dtype):
            others.append(name)
            continue
        dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        tensors[name] = TensorHeader(tuple(tensor.shape), dtype)
    if others and (strict or not tensors):
        raise _UnreadableError(
            f"{some(others)} is not a tensor, and mergekit reads plain dictionaries of tensors only: if the weights lie "
            "in a dictionary of their own, save the one that holds the weights alone"
        )
    return tensors


def _unpickled(path: str) -> Mapping[str, Any]:
    """What a pickle holds, without its weights where the format allows that."""
    if zipfile.is_zipfile(path):
        try:
            return TensorLoader.get(path, use_lazy_unpickle=True).index
        except (pickle.UnpicklingError, TypeError, ValueError):
            pass  # The lazy loader knows fewer classes and dtypes than torch's weights-only one.
    return TensorLoader.get(path, device="meta").tensors


def _local_tensors(directory: str) -> tuple[dict[str, TensorHeader], list[str]]:
    """Tensors and faults of a checkpoint directory, looked up as mergekit looks it up."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = os.path.join(directory, name)
        if os.path.exists(path + ".index.json"):
            return _sharded_tensors(directory, path + ".index.json")
        if os.path.exists(path):
            header = Checkpoint.of_file(path, strict=False)
            return dict(header.tensors), list(header.faults)
    return {}, [f"{directory}: no model.safetensors or pytorch_model.bin, nor an index"]


def _sharded_tensors(
    directory: str, index: str
) -> tuple[dict[str, TensorHeader], list[str]]:
    try:
        shard_of = _weight_map(index)
    except _UnreadableError as error:
        return {}, [f"{index}: {error}"]
    shards = sorted(set(shard_of.values()))
    found: dict[str, TensorHeader] = {}
    faults = []
    for shard in shards:
        if os.path.isabs(shard) or os.pardir in shard.replace("\\", "/").split("/"):
            faults.append(
                f"{index}: it names {shard}, which lies outside the model's directory"
            )
            continue
        header = Checkpoint.of_file(os.path.join(directory, shard), strict=False)
        faults += header.faults
        listed = [name for name, its_shard in shard_of.items() if its_shard == shard]
        if header.tensors:
            absent = [name for name in listed if name not in header.tensors]
            if absent:
                faults.append(
                    f"{os.path.join(directory, shard)}: lacks {some(absent)}, which the index places there"
                )
        found |= {name: header.tensors.get(name, TensorHeader()) for name in listed}
    return found, faults


def _weight_map(index: str) -> dict[str, str]:
    """File by tensor, as an index says."""
    _require_regular(index)
    if os.path.getsize(index) > _LARGEST_INDEX:
        raise _UnreadableError(f"not an index: it has {os.path.getsize(index)} bytes")
    try:
        with open(index, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise _UnreadableError(error.strerror) from None
    except ValueError as error:  # not JSON, not even text
        raise _UnreadableError(f"not a readable index ({error})") from None
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise _UnreadableError("not an index: it has no weight_map")
    if not all(isinstance(shard, str) for shard in shard_of.values()):
        raise _UnreadableError("not an index: its weight_map names no files")
    return shard_of


def _hub_tensors(repo: str, revision: str | None) -> dict[str, TensorHeader]:
    """Tensors of a repository on the Hub, by reading the headers remotely; none where that cannot be done."""
    try:
        metadata = huggingface_hub.get_safetensors_metadata(repo, revision=revision)
    except (
        Exception
    ) as error:  # of the Hub, of HTTP, of a repository without safetensors
        LOG.info("the headers of %s cannot be read remotely: %s", repo, error)
        return {}
    return {
        name: TensorHeader(tuple(tensor.shape), tensor.dtype)
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


def _require_regular(path: str) -> None:
    """Refuse what is no file, before reading it hangs, and one that cannot be opened.

    A link is what it points to, as the files of the Hub's cache are.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise _UnreadableError("it is no regular file")
        # The system's reasons are clearer than what safetensors and torch make of them.
        with open(path, "rb"):
            pass
    except OSError as error:
        raise _UnreadableError(error.strerror) from None


def _quantization(tensors: Mapping[str, TensorHeader]) -> str | None:
    """How weights are quantized, by their dtypes and by the tensors that go with quantized ones."""
    for name, header in tensors.items():
        if _EIGHT_BITS.fullmatch(header.dtype or ""):
            return f"{header.dtype.removeprefix('torch.')} weights"
        if name.endswith(_QUANTIZED_SUFFIXES) or ".quant_state." in name:
            return f"quantized weights ({name})"
        if name.endswith(".weight") and _INTEGERS.fullmatch(header.dtype or ""):
            return f"{header.dtype.removeprefix('torch.')} weights ({name})"
    return None


def _quantization_settings(config_path: str) -> Any:
    """What a config.json says of quantization, None if it cannot be read."""
    try:
        with open(config_path, encoding="utf-8") as file:
            return json.load(file).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None


def _quantization_method(settings: Any) -> str | None:
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        settings = vars(settings)
    method = settings.get("quant_method")
    return str(getattr(method, "value", method) or "quantized")


def stored_bytes(tensors: Mapping[str, TensorHeader], dtype: str | None) -> int:
    """Bytes of the tensors, floating ones taken as ``dtype`` (a torch name without prefix) unless None."""
    total = 0
    for header in tensors.values():
        stored_as = dtype if dtype and header.floating else header.dtype or ""
        bits = re.search(r"\d+", stored_as)
        total += math.prod((0,) if header.shape is None else header.shape) * (
            int(bits[0]) // 8 if bits else 1
        )
    return total


def some(names: Sequence[str]) -> str:
    """The first few of them, and how many more."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
