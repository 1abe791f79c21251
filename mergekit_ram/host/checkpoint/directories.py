"""What a checkpoint holds, be it a directory, a repository on the Hub or a single file."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import huggingface_hub
from mergekit.common import ModelReference

from mergekit_ram.host.checkpoint.files import read_content, read_json
from mergekit_ram.host.checkpoint.headers import TensorHeader, UnreadableError, some
from mergekit_ram.host.checkpoint.quantization import quantization

LOG = logging.getLogger(__name__)

_INDEX = ".index.json"
_DAMAGED = "download or save the checkpoint again"
_EAGER = "merge without --lazy-unpickle"
_ESCAPING = "get the checkpoint again, from a source that you trust"


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file.

    Attributes:
        what: names the file.
        remedy: what the user can do.
    """

    what: str
    remedy: str = _DAMAGED


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its files describe it.

    Attributes:
        tensors: by name.
        faults: what is wrong with its files.
        quantization: how its weights are quantized, None if they are not.
        others: names in a single pickle of what is no plain tensor.
    """

    tensors: Mapping[str, TensorHeader] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    quantization: str | None = None
    others: tuple[str, ...] = ()

    @property
    def float32(self) -> bool:
        """Whether weights are stored in more precision than 16 bits."""
        return any(header.dtype in ("F32", "F64") for header in self.tensors.values())

    @classmethod
    def of(cls, model: ModelReference, config: Any = None, *, lazy: bool = False) -> Checkpoint:
        """Describe a model's checkpoint, local or on the Hub. Of a model with a LoRA, the model's.

        Args:
            config: the model's transformers config, if it could be read.
            lazy: as mergekit reads pickles with ``--lazy-unpickle``.
        """
        path = model.model.path
        if os.path.isdir(path):
            return cls.of_directory(path, config, lazy=lazy)
        tensors, faults = _hub_tensors(path, model.model.revision)
        return cls(tensors, tuple(faults), quantization(tensors, config))

    @classmethod
    def of_directory(cls, path: str, config: Any = None, *, lazy: bool = False) -> Checkpoint:
        """Describe a local checkpoint."""
        tensors, faults = _local_tensors(path, lazy)
        return cls(tensors, tuple(faults), quantization(tensors, config))

    @classmethod
    def of_file(cls, path: str, *, lazy: bool = False) -> Checkpoint:
        """Describe a single safetensors or pickle file."""
        try:
            content = read_content(path, lazy=lazy)
        except UnreadableError as error:
            return cls(faults=(Fault(f"{path}: {error}", error.remedy or _DAMAGED),))
        refusal = content.refusal
        faults = (Fault(f"{path}: {refusal}", _EAGER),) if refusal else ()
        found = quantization(content.tensors)
        return cls(content.tensors, faults, found, content.others)


def weights_file(directory: str) -> str | None:
    """The file of weights, or the index of several, that mergekit looks up in a directory."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = os.path.join(directory, name)
        found = next(filter(os.path.exists, (path + _INDEX, path)), None)
        if found:
            return found
    return None


def _local_tensors(directory: str, lazy: bool) -> tuple[Mapping[str, TensorHeader], list[Fault]]:
    """Tensors and faults of a checkpoint directory."""
    path = weights_file(directory)
    if path is None:
        lacking = "no model.safetensors or pytorch_model.bin, nor an index"
        return {}, [Fault(f"{directory}: {lacking}")]
    if path.endswith(_INDEX):
        return _sharded_tensors(directory, path, lazy)
    file = Checkpoint.of_file(path, lazy=lazy)
    if file.tensors or file.faults:
        return file.tensors, list(file.faults)
    return {}, [Fault(f"{path}: it holds no tensors")]


def _sharded_tensors(
    directory: str, index: str, lazy: bool
) -> tuple[dict[str, TensorHeader], list[Fault]]:
    try:
        shard_of = _weight_map(index)
    except UnreadableError as error:
        return {}, [Fault(f"{index}: {error}")]
    found: dict[str, TensorHeader] = {}
    faults = []
    shards = sorted(set(shard_of.values()))
    outside = [shard for shard in shards if _leaves(shard)]
    if outside:
        places = f"places tensors outside the model's directory: {some(outside)}"
        faults.append(Fault(f"{index}: {places}", _ESCAPING))
    for shard in shards:
        listed = [name for name, its_shard in shard_of.items() if its_shard == shard]
        found |= dict.fromkeys(listed, TensorHeader())
        if shard in outside:
            continue
        path = os.path.join(directory, shard)
        file = Checkpoint.of_file(path, lazy=lazy)
        faults += file.faults
        absent = [name for name in listed if name not in file.tensors]
        if absent and not file.faults:
            lacking = f"lacks {some(absent)}, which the index places there"
            faults.append(Fault(f"{path}: {lacking}"))
        found |= {name: file.tensors[name] for name in listed if name in file.tensors}
    return found, faults


def _leaves(shard: str) -> bool:
    """Whether a file that an index names lies outside its directory.

    What links lead to is the user's choice.
    """
    place = PurePath(shard)
    return place.is_absolute() or ".." in place.parts


def _weight_map(index: str) -> dict[str, str]:
    """File by tensor, as an index says."""
    content = read_json(index)
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise UnreadableError("not an index: it has no weight_map")
    if not all(isinstance(shard, str) for shard in shard_of.values()):
        raise UnreadableError("not an index: its weight_map names no files")
    return shard_of


def _hub_tensors(repo: str, revision: str | None) -> tuple[dict[str, TensorHeader], list[Fault]]:
    """Tensors of a repository on the Hub, by remote headers; none where that cannot be done."""
    try:
        metadata = huggingface_hub.get_safetensors_metadata(repo, revision=revision)
    except Exception as error:  # of the Hub, of HTTP, of a repository without safetensors
        LOG.info("the headers of %s cannot be read remotely: %s", repo, error)
        return {}, []
    found: dict[str, TensorHeader] = {}
    faults = []
    for name, file in metadata.files_metadata.items():
        try:
            found |= {
                tensor: TensorHeader.checked(tensor, entry.shape, entry.dtype)
                for tensor, entry in file.tensors.items()
            }
        except UnreadableError as error:
            faults.append(Fault(f"{repo}/{name}: {error}"))
    return found, faults
