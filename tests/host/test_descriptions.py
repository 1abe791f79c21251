"""Descriptions of files of tensors: the same whatever their format, and of no file a hang or an
allocation.
"""

from __future__ import annotations

import json
import os
import struct

import huggingface_hub
import pytest
import torch
from mergekit.common import ModelReference
from safetensors.torch import save_file

from mergekit_ram.host.checkpoint import Checkpoint, TensorHeader, stored_bytes
from mergekit_ram.host.checkpoint.files import spans

# torch reads its old format of the first ones only.
OLD = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.complex64,
]
DTYPES = [
    *OLD,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("zipped", [True, False])
def test_description_does_not_depend_on_the_format(zipped, tmp_path):
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in (DTYPES if zipped else OLD)}
    tensors |= {"empty": torch.zeros(0, 3), "number": torch.tensor(1.0)}
    files = [tmp_path / "a.safetensors", tmp_path / "a.bin"]
    save_file(tensors, files[0])
    torch.save(tensors, files[1], _use_new_zipfile_serialization=zipped)
    safe, pickled = (Checkpoint.of_file(str(file)) for file in files)
    assert safe.tensors == pickled.tensors
    assert safe.quantization == pickled.quantization
    assert not safe.faults
    assert stored_bytes(safe.tensors, None) == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
@pytest.mark.parametrize("index", [False, True])
def test_what_is_no_file_is_not_read(index, kind, name, tmp_path):
    path = tmp_path / (name + (".index.json" if index else ""))
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
    }[kind]()
    (fault,) = Checkpoint.of_directory(str(tmp_path)).faults
    assert fault.what.startswith(f"{path}: not a file but")


def test_checkpoint_without_tensors_is_refused(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    (fault,) = Checkpoint.of_directory(str(tmp_path)).faults
    assert "no tensors" in fault.what


def header(content, length=None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        header({}, length=1 << 63),
        header({}, length=(1 << 64) - 1),
        header({}, length=99_000_000),
        header(b"{"),
        header(b'{"a":' * 100_000),
        header([1]),
        header({"a": 1}),
        header({"a": {}}),
        header({"a": {"data_offsets": [1]}}),
        header({"a": {"data_offsets": ["a", "b"]}}),
        header({"a": {"data_offsets": [-8, 0]}}),
        header({"a": {"data_offsets": [0, 1 << 63]}}),
        header({"a": {"data_offsets": [8, 0]}}),
    ],
)
def test_nothing_is_read_ahead_of_a_damaged_file(content, tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    assert spans(str(file)) == {}


@pytest.mark.parametrize("shape", [[-1], [1 << 63], [1 << 40, 1 << 40], [1] * 100])
def test_impossible_shapes_on_the_hub_are_a_fault(shape, monkeypatch):
    info = huggingface_hub.utils._safetensors
    tensor = info.TensorInfo(dtype="F32", shape=shape, data_offsets=(0, 0))
    file = info.SafetensorsFileMetadata(metadata={}, tensors={"a": tensor})
    metadata = info.SafetensorsRepoMetadata(
        metadata=None, sharded=False, weight_map={}, files_metadata={"m": file}
    )
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_, **__: metadata)
    (fault,) = Checkpoint.of(ModelReference.parse("org/model")).faults
    assert "org/model/m: a has the impossible shape" in fault.what


def test_bytes_of_fewer_bits_than_eight_are_rounded_up():
    assert stored_bytes({"a": TensorHeader((3,), "F4")}, None) == 2
