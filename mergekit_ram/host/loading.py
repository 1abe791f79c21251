"""Loading tensors in a known order, the operating system reading ahead of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.loader import TensorLoader
from mergekit.io.tasks import GatherTensors, LoaderCache
from mergekit.merge_methods.task_adapter import (
    ExecuteMergeMethodTask,
    TensorDictWrapper,
)

from mergekit_ram.host.checkpoint.files import spans

# Per model, beyond the tensor at hand: what a disk reads in a fraction of a second.
_AHEAD_BYTES = 64 << 20
# Linux reads no more than this of a longer advice, where not set to more.
_ADVICE_BYTES = 128 << 10
# What is in the page cache needs no advice, which would cost as much as reading it. Its first byte
# stands for so much.
_PROBE_BYTES = 4 << 20
# Advice waits for the disk once its queue is full.
_READER = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")


class StreamingLoader(LazyTensorLoader):
    """Loads tensors of safetensors files as mergekit does, listing a file's names only once.

    Args:
        index: of a checkpoint in safetensors files.
        order: names of its tensors in the order in which they will be asked for, as far as that is
            known.
    """

    def __init__(self, index: ShardedTensorIndex, order: Sequence[str] = ()):
        super().__init__(index, lazy_unpickle=False)
        self._current: tuple[str, str] | None = None
        self._reader = _ReadAhead(index, order)

    def get_tensor(
        self,
        key: str,
        device: str = "cpu",
        aliases: list[str] | None = None,
        raise_on_missing: bool = True,
    ) -> torch.Tensor | None:
        names = (name for name in (key, *(aliases or ())) if name in self.index.tensor_paths)
        name = next(names, None)
        if name is None:
            if raise_on_missing:
                raise KeyError(key)
            return None
        wanted = (self.index.tensor_paths[name], device)
        with self.lock:
            self._reader.reach(name)
            if wanted != self._current or self.current_shard is None:
                path = os.path.join(self.index.base_path, wanted[0])
                self.current_shard = TensorLoader.get(path, device=device)
                self._current = wanted
            return self.current_shard.get_tensor(name).to(device)


class _ReadAhead:
    """Has the operating system read what will be asked for next, where it takes advice."""

    def __init__(self, index: ShardedTensorIndex, order: Sequence[str]):
        self._index = index
        self._order = order
        self._place = {name: i for i, name in enumerate(order)}
        self._spans: dict[str, dict[str, tuple[int, int]]] = {}
        # What is advised: from the tensor at hand up to this place in the order, so many bytes.
        self._reached = self._advised = self._ahead = 0

    def reach(self, name: str) -> None:
        """A tensor is asked for."""
        place = self._place.get(name)
        if place is None or not hasattr(os, "posix_fadvise"):
            return
        if place < self._reached or place >= self._advised:
            self._advised, self._ahead = place, 0
        else:
            passed = self._order[self._reached : place]
            self._ahead -= sum(self._span(name)[1] for name in passed)
        self._reached = place
        size = self._span(name)[1]
        while self._advised < len(self._order) and self._ahead < size + _AHEAD_BYTES:
            self._ahead += self._advise(self._order[self._advised])
            self._advised += 1

    def _advise(self, name: str) -> int:
        start, length = self._span(name)
        path = os.path.join(self._index.base_path, self._index.tensor_paths[name])
        _READER.submit(_advise, path, start, length)
        return length

    def _span(self, name: str) -> tuple[int, int]:
        """Where in its file a tensor starts, and its bytes."""
        file = self._index.tensor_paths[name]
        if file not in self._spans:
            self._spans[file] = spans(os.path.join(self._index.base_path, file))
        return self._spans[file].get(name, (0, 0))


def _advise(path: str, start: int, length: int) -> None:
    with open(path, "rb", buffering=0) as file:
        for probed in range(start, start + length, _PROBE_BYTES):
            if _cached(file.fileno(), probed):
                continue
            end = min(probed + _PROBE_BYTES, start + length)
            for offset in range(probed, end, _ADVICE_BYTES):
                os.posix_fadvise(file.fileno(), offset, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)


def _cached(file: int, offset: int) -> bool:
    """Whether a byte of a file can be had without the disk; False where the system cannot tell."""
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False


def stream(merges: Iterable[ExecuteMergeMethodTask]) -> None:
    """Have the models of the merges loaded in the order in which mergekit will run them."""
    order: dict[ModelReference, list[str]] = {}
    cache = LoaderCache()
    for merge in sorted(merges, key=lambda merge: merge.group_label() or ""):
        gather = merge.gather_tensors
        if isinstance(gather, TensorDictWrapper):
            continue  # mergekit-pytorch has a loader of its own
        if not isinstance(gather, GatherTensors):
            gather = gather.gather_tensors
        for load in gather.arguments().values():
            name = load.group_label()
            if name is not None:
                order.setdefault(load.model, []).append(name)
    for model, names in order.items():
        index = cache.get(model).index
        if index.is_safetensors:
            cache.loaders[model] = StreamingLoader(index, list(dict.fromkeys(names)))
