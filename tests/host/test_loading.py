"""Tensors are loaded as mergekit loads them, and the operating system is asked to read ahead what
it has not read.
"""

from __future__ import annotations

import os

import pytest
import torch
from mergekit.io.lazy_tensor_loader import ShardedTensorIndex
from safetensors.torch import save_file

from mergekit_ram.host import loading

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")

SIZE = 300_000  # bytes of a tensor, no multiple of an advice


@pytest.fixture
def weights(tmp_path):
    weights = {f"t{i}": torch.full((SIZE // 4,), float(i)) for i in range(6)}
    save_file(weights, tmp_path / "model.safetensors")
    return weights


@pytest.fixture
def advised(monkeypatch):
    """Spans of the files that the system was asked to read."""
    spans = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, start, length, __: spans.append((start, length))
    )
    return spans


def load(directory, names, asked):
    index = ShardedTensorIndex.from_disk(str(directory))
    loader = loading.StreamingLoader(index, names)
    loaded = {name: loader.get_tensor(name) for name in asked}
    loading._READER.submit(lambda: None).result()  # all advice is given
    return loaded


def test_what_comes_next_is_read_ahead_once_and_within_bounds(
    weights, advised, tmp_path, monkeypatch
):
    monkeypatch.setattr(loading, "_cached", lambda *_: False)
    monkeypatch.setattr(loading, "_AHEAD_BYTES", 2 * SIZE)
    order = ["t3", "t0", "t5", "t1", "t4"]
    spans = loading.spans(str(tmp_path / "model.safetensors"))
    for asked, reached in ((order[:1], 3), (order[:2], 4), (order, 5)):
        advised.clear()
        loaded = load(tmp_path, order, asked)
        assert all(torch.equal(loaded[name], weights[name]) for name in asked)
        wanted = set()
        for name in order[:reached]:
            start, length = spans[name]
            wanted |= set(range(start, start + length))
        covered = [byte for start, n in advised for byte in range(start, start + n)]
        assert wanted <= set(covered)
        beyond = len(set(covered) - wanted)
        assert beyond < reached * loading._ADVICE_BYTES  # an advice may end in the next


def test_what_is_in_the_page_cache_needs_no_advice(weights, advised, tmp_path):
    path = tmp_path / "model.safetensors"
    path.read_bytes()
    with path.open("rb") as file:
        if not loading._cached(file.fileno(), 0):
            pytest.skip("the file system does not tell what is cached")
    load(tmp_path, list(weights), list(weights))
    assert advised == []


def test_a_system_that_does_not_tell_what_is_cached_gets_all_advice(
    weights, advised, tmp_path, monkeypatch
):
    def unsupported(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "preadv", unsupported)
    load(tmp_path, list(weights), list(weights)[:1])
    assert sum(length for _, length in advised) >= 6 * SIZE
