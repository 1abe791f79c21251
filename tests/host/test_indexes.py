"""Indexes and headers that cannot be read are refused by file."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from mergekit_ram.host.checkpoint import Checkpoint
from support.spoilt import merged, refused

# --- Indexes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        "/dev/zero",
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "ABSOLUTE",
        "fifo",
        "directory.safetensors",
        "link-to-device",
        "absent.safetensors",
    ],
)
def test_index_entry_that_is_no_file_of_the_model_is_refused(entry, models, tmp_path):
    agent = models[1]
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    os.mkfifo(agent / "fifo")
    (agent / "directory.safetensors").mkdir()
    (agent / "link-to-device").symlink_to("/dev/zero")
    if entry == "ABSOLUTE":
        entry = str(tmp_path / "secret.safetensors")
    index = agent / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = entry
    index.write_text(json.dumps(content))
    said = refused(tmp_path)
    assert entry in said
    assert str(agent) in said


def test_links_of_the_hubs_cache_to_its_blobs_are_files(models, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(models[1].iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(f"../blobs/{i}")
    assert not Checkpoint.of_directory(str(models[1])).faults
    assert merged(tmp_path).exit_code == 0


# --- Damaged headers ------------------------------------------------------------------------------


def safetensors_file(header, data=b"\0" * 8, length=None) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def tensor(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "empty": b"",
    "length beyond the file": safetensors_file({"a": tensor([2], 0, 8)}, length=10**6),
    "length of 2 to the 63": safetensors_file({"a": tensor([2], 0, 8)}, length=1 << 63),
    "negative offset": safetensors_file({"a": tensor([2], -8, 0)}),
    "offset beyond the file": safetensors_file({"a": tensor([200], 0, 800)}),
    "huge offset": safetensors_file({"a": tensor([2], 1 << 70, (1 << 70) + 8)}),
    "overlapping spans": safetensors_file({"a": tensor([2], 0, 8), "b": tensor([1], 4, 8)}),
    "size of 2 to the 63": safetensors_file({"a": tensor([1 << 63], 0, 8)}),
    "product over 2 to the 64": safetensors_file({"a": tensor([1 << 40, 1 << 40], 0, 8)}),
    "zero times 2 to the 63": safetensors_file({"a": tensor([0, 1 << 63], 0, 0)}, b""),
    "no JSON": safetensors_file(b"{" * 100),
    "a list": safetensors_file([1, 2]),
    "no text": safetensors_file(b"\xff" * 100),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_damaged_headers_are_refused_by_file(damage, models, tmp_path):
    file = models[1] / "model-00001-of-00002.safetensors"
    file.write_bytes(HEADERS[damage])
    assert str(file) in refused(tmp_path)


def test_header_of_200_megabytes_is_refused_without_reading_it(models, tmp_path):
    file = models[1] / "model-00001-of-00002.safetensors"
    with open(file, "wb") as sparse:
        sparse.write(struct.pack("<Q", 200_000_000))
        sparse.truncate(200_000_100)
    assert str(file) in refused(tmp_path)


def test_index_of_more_than_200_megabytes_is_refused_without_reading_it(models, tmp_path):
    index = models[1] / "model.safetensors.index.json"
    with open(index, "wb") as sparse:
        sparse.truncate(300_000_000)
    assert str(index) in refused(tmp_path)
