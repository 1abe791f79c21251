"""What a checkpoint holds, from its config, index and safetensors headers alone: no weight is read."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import re
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

_QUANTIZED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight.absmax",
    ".weight.quant_map",
    ".SCB",
    ".weight_packed",
)
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
    """

    tensors: Mapping[str, TensorHeader] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    quantization: str | None = None

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
        return cls(tensors, (), _quantization(tensors, config))

    @classmethod
    def of_directory(cls, path: str, config: Any = None) -> Checkpoint:
        """Describe a local checkpoint."""
        tensors, faults = _local_tensors(path)
        return cls(tensors, tuple(faults), _quantization(tensors, config))

    @classmethod
    def of_file(cls, path: str) -> Checkpoint:
        """Describe a single safetensors or pickle file."""
        try:
            tensors = _file_tensors(path)
        except _UnreadableError as error:
            return cls(faults=(f"{path}: {error}",))
        return cls(tensors, (), _quantization(tensors, None))


class _UnreadableError(Exception):
    """A file of weights that cannot be read; the message says why, and leaves the file to be named."""


def _file_tensors(path: str) -> dict[str, TensorHeader]:
    try:
        # The system's reasons are clearer than what safetensors and torch make of them.
        with open(path, "rb"):
            pass
    except OSError as error:
        raise _UnreadableError(error.strerror) from None
    if path.lower().endswith(".safetensors"):
        return _safetensors_tensors(path)
    return _pickled_tensors(path)


def _safetensors_tensors(path: str) -> dict[str, TensorHeader]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(tuple(view.get_shape()), view.get_dtype())
                for name, view in views.items()
            }
    except (OSError, safetensors.SafetensorError) as error:
        raise _UnreadableError(f"{error}; it is damaged or incomplete") from None


def _pickled_tensors(path: str) -> dict[str, TensorHeader]:
    """Tensors of a pickle, by mergekit's own loaders, which build nothing but tensors."""
    try:
        stored = _unpickled(path)
    except Exception as error:  # pickles fail in any way their bytes can be wrong
        reason = str(error).split("\n")[0].split(". ")[0] or type(error).__name__
        raise _UnreadableError(
            f"not a pickle of tensors, or damaged ({reason})"
        ) from None
    tensors = {}
    for name, tensor in stored.items():
        if not isinstance(getattr(tensor, "dtype", None), torch.dtype):
            raise _UnreadableError(
                f"{name} is not a tensor; mergekit reads plain dictionaries of tensors only"
            )
        dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        tensors[name] = TensorHeader(tuple(tensor.shape), dtype)
    return tensors


def _unpickled(path: str) -> Mapping[str, Any]:
    """What a pickle holds, without its weights where the format allows that."""
    if zipfile.is_zipfile(path):
        try:
            return TensorLoader.get(path, use_lazy_unpickle=True).index
        except pickle.UnpicklingError:
            pass  # The lazy loader knows fewer classes than torch's weights-only one.
    return TensorLoader.get(path, device="meta").tensors


def _local_tensors(directory: str) -> tuple[dict[str, TensorHeader], list[str]]:
    """Tensors and faults of a checkpoint directory, looked up as mergekit looks it up."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = os.path.join(directory, name)
        if os.path.exists(path + ".index.json"):
            return _sharded_tensors(directory, path + ".index.json")
        if os.path.exists(path):
            header = Checkpoint.of_file(path)
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
        header = Checkpoint.of_file(os.path.join(directory, shard))
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


def _quantization(tensors: Mapping[str, TensorHeader], config: Any) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        if not isinstance(settings, Mapping):
            settings = vars(settings)
        method = settings.get("quant_method")
        return str(getattr(method, "value", method) or "quantized")
    for name, header in tensors.items():
        if header.dtype and header.dtype.startswith("F8"):
            return f"{header.dtype} weights"
        if name.endswith(_QUANTIZED_SUFFIXES) or ".quant_state." in name:
            return f"quantized weights ({name})"
    return None


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
