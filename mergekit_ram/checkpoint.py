"""What a checkpoint holds, from its config, index and safetensors headers alone: no weight is read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import huggingface_hub
import safetensors
from mergekit.common import ModelReference

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
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype of a stored tensor, both None in a pickle. The dtype by safetensors' name, as ``BF16``."""

    shape: tuple[int, ...] | None = None
    dtype: str | None = None


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
        except (OSError, safetensors.SafetensorError) as error:
            return cls(faults=(f"{path}: {error}",))
        return cls(tensors, (), _quantization(tensors, None))


def _file_tensors(path: str) -> dict[str, TensorHeader]:
    if not path.lower().endswith(".safetensors"):
        os.stat(path)
        return {}
    with safetensors.safe_open(path, framework="pt") as file:
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: TensorHeader(tuple(view.get_shape()), view.get_dtype())
            for name, view in views.items()
        }


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
        with open(index, encoding="utf-8") as file:
            shard_of = json.load(file)["weight_map"]
        shards = sorted(set(shard_of.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"{index}: not a readable index ({type(error).__name__}: {error})"]
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
    as_stored = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
    total = 0
    for header in tensors.values():
        elements = 1
        for length in header.shape or (0,):
            elements *= length
        stored = _FLOAT_BYTES.get(header.dtype or "", 0)
        total += elements * (as_stored.get(dtype or "", stored) if stored else 8)
    return total


def some(names: Sequence[str]) -> str:
    """The first few of them, and how many more."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
