"""The tensors that a plan is going to load, compared by their headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference, dtype_from_name
from mergekit.io import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import LoaderCache, LoadTensor
from mergekit.merge_methods.task_adapter import (
    ExecuteMergeMethodTask,
    TensorDictWrapper,
)
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary

from mergekit_ram.check.problems import (
    RAW_MERGE,
    RECIPE,
    checkpoint_problems,
    number,
)
from mergekit_ram.errors import Problem
from mergekit_ram.host.checkpoint import Checkpoint, TensorHeader, some, stored_bytes
from mergekit_ram.host.checkpoint.quantization import quantizer_of


class DescribedLoader(LazyTensorLoader):
    """Stands in for the loader of a checkpoint that is only planned with."""

    def __init__(self, checkpoint: Checkpoint):
        paths = dict.fromkeys(checkpoint.tensors, "")
        super().__init__(ShardedTensorIndex("", True, paths, []))
        self.checkpoint = checkpoint


def rounding_warnings(
    agents: Iterable[ModelReference],
    checkpoints: PlannedCheckpoints,
    dtype: str | None,
) -> list[str]:
    """Warn of a 16-bit ``dtype``: it rounds float32 agents before they meet the base."""
    rounding = dtype_from_name(dtype)
    if rounding is None or rounding.itemsize > 2:
        return []
    stored = [str(agent) for agent in agents if checkpoints.of(agent).float32]
    if not stored:
        return []
    return [
        f"dtype: {dtype} rounds {some(stored)}, stored in float32, before they are compared "
        "with the base: updates smaller than the rounding vanish. To keep them, use dtype: float32 "
        f"with out_dtype: {dtype}"
    ]


# What can be wrong with tensors, in the order in which it is told.
_MISREAD = "{tensors} misread: {names}"
_NOWHERE = "no model has {tensors} that mergekit expects of this architecture: {names}"
_OTHER_TYPE = "{tensors} of another type: {names}"
_MISSING = "{tensors} missing: {names}"
_OTHER_SHAPE = "{tensors} of another shape: {names}"
_ORDER = (_MISREAD, _NOWHERE, _OTHER_TYPE, _MISSING, _OTHER_SHAPE)

_EAGER = (
    "merge without --lazy-unpickle, which reads neither single numbers nor views with gaps right"
)
_UNMAPPED = f"this is a limit of mergekit, whatever the merge method; {RAW_MERGE}"
_BUFFER = "save the checkpoint again with floating weights as the base's"
_INCOMPLETE = "the checkpoint is incomplete, or of another architecture than the base; get it again"
_OTHER_SIZE = "only models of the base's size, trained from the base, can be merged"
_OTHER_VOCABULARY = (
    "align the vocabularies: add `tokenizer: {source: base}` (or union) to the recipe"
)


class _Fault(NamedTuple):
    """One thing that is wrong with tensors of a model, or of the recipe: which is told at once."""

    where: str
    told: str
    remedy: str


def tensor_problems(
    merges: Sequence[ExecuteMergeMethodTask], checkpoints: PlannedCheckpoints
) -> list[Problem]:
    """What is wrong with the tensors that a plan is going to load: missing, or differing."""
    faults: dict[_Fault, list[str]] = {}
    for merge in merges:
        for fault, tensor in _tensor_faults(merge, checkpoints):
            faults.setdefault(fault, []).append(tensor)
    problems = list(checkpoints.problems())
    for fault in sorted(faults, key=lambda fault: _ORDER.index(fault.told)):
        tensors = faults[fault]
        told = fault.told.format(tensors=number(tensors), names=some(tensors))
        problems.append(Problem(fault.where, told, fault.remedy))
    return problems


def _tensor_faults(
    merge: ExecuteMergeMethodTask, checkpoints: PlannedCheckpoints
) -> Iterator[tuple[_Fault, str]]:
    """What is wrong with the inputs of one merge, each with the tensor as it is told of."""
    inputs, aligned = _inputs(merge)
    found = [wanted for wanted in inputs if checkpoints.holds(wanted)]
    if not found and len(inputs) > 1 and not all(w.optional for w in inputs):
        yield _Fault(RECIPE, _NOWHERE, _UNMAPPED), inputs[0].names[0]
        return
    for wanted in inputs:
        needed = not wanted.optional or (wanted.model == merge.base_model and found)
        if needed and wanted not in found:
            yield _Fault(str(wanted.model), _MISSING, _INCOMPLETE), wanted.names[0]
        header = checkpoints.header(wanted)
        if header and not header.readable:
            yield _Fault(str(wanted.model), _MISREAD, _EAGER), wanted.names[0]
    name, axis = merge.output_weight.name, merge.output_weight.vocabulary_axis
    base = next((wanted for wanted in found if wanted.model == merge.base_model), None)
    if base is None:
        return
    for wanted in found:
        shape, expected = checkpoints.shape(wanted), checkpoints.shape(base)
        if not _same_shape(shape, expected, axis if aligned else None):
            remedy = _OTHER_SIZE if axis is None else _OTHER_VOCABULARY
            told = f"{name} {list(shape)} for the base's {list(expected)}"
            yield _Fault(str(wanted.model), _OTHER_SHAPE, remedy), told
        kind, expected = checkpoints.buffer_dtype(wanted), checkpoints.buffer_dtype(base)
        if kind != expected:
            told = f"{name} {kind or 'floats'} for the base's {expected or 'floats'}"
            yield _Fault(str(wanted.model), _OTHER_TYPE, _BUFFER), told


@dataclass(frozen=True)
class _Wanted:
    """A tensor that a plan loads.

    Attributes:
        names: the names it may have.
        optional: whether the plan can do without.
        cast: whether it becomes a floating tensor, whatever it was.
    """

    model: ModelReference
    names: tuple[str, ...]
    optional: bool
    cast: bool = False


class PlannedCheckpoints:
    """The checkpoints of a planned merge, each described once.

    Args:
        lazy_unpickle: whether pickles of ``mergekit-pytorch`` are read lazily.
    """

    def __init__(self, *, lazy_unpickle: bool) -> None:
        self._lazy_unpickle = lazy_unpickle
        self._described: dict[ModelReference, Checkpoint] = {}
        self._configs: dict[ModelReference, Any] = {}

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the files themselves, downloaded ones among them."""
        for model, checkpoint in self._described.items():
            yield from checkpoint_problems(str(model), checkpoint)

    def quantization_warnings(self) -> list[str]:
        """Warn of configs that call plain weights quantized, as some dequantizers leave them."""
        return [
            f"{model}: its config.json has a quantization_config "
            f"(quant_method {quantizer}), but its weights are plain; they "
            "are merged as they are, and the merged config.json has none"
            for model, checkpoint in self._described.items()
            if checkpoint.tensors
            and not os.path.isfile(model.model.path)
            and (quantizer := quantizer_of(self._config(model)))
        ]

    def header(self, wanted: _Wanted) -> TensorHeader | None:
        tensors = self.of(wanted.model).tensors
        name = next((name for name in wanted.names if name in tensors), None)
        return tensors[name] if name else None

    def shape(self, wanted: _Wanted) -> tuple[int, ...] | None:
        header = self.header(wanted)
        return header.shape if header else None

    def buffer_dtype(self, wanted: _Wanted) -> str | None:
        """The dtype the tensor is loaded as if that is not a floating one."""
        header = self.header(wanted)
        if header is None or header.dtype is None or header.floating or wanted.cast:
            return None
        return header.dtype

    def holds(self, wanted: _Wanted) -> bool:
        """Whether the checkpoint has the tensor, or what mergekit can make it of."""
        tensors = self.of(wanted.model).tensors
        if not tensors or any(name in tensors for name in wanted.names):
            return True
        if wanted.optional:
            return False
        return can_convert_checkpoint_keys(
            self._config(wanted.model).model_type, set(tensors), wanted.names[0]
        )

    def of(self, model: ModelReference) -> Checkpoint:
        if model not in self._described:
            self._described[model] = self._describe(model)
        return self._described[model]

    def _describe(self, model: ModelReference) -> Checkpoint:
        path = model.model.path
        if os.path.isfile(path):
            return Checkpoint.of_file(path, lazy=self._lazy_unpickle)
        loader = LoaderCache().get(model)
        if isinstance(loader, DescribedLoader):
            return loader.checkpoint
        return Checkpoint.of_directory(loader.index.base_path, lazy=loader.lazy_unpickle)

    def _config(self, model: ModelReference) -> Any:
        if model not in self._configs:
            trusted = LoaderCache().trust_remote_code
            self._configs[model] = model.config(trust_remote_code=trusted)
        return self._configs[model]


def output_bytes(
    merge: ExecuteMergeMethodTask, dtype: str | None, checkpoints: PlannedCheckpoints
) -> int:
    """What a merge's output takes as ``dtype``, as stored if None.

    0 if it has no inputs or they are pickled.
    """
    inputs, _ = _inputs(merge)
    headers = (checkpoints.header(wanted) for wanted in inputs)
    found = next((header for header in headers if header), TensorHeader())
    return stored_bytes({"": found}, dtype)


def _inputs(merge: ExecuteMergeMethodTask) -> tuple[list[_Wanted], bool]:
    """What a merge loads, and whether its vocabularies are aligned on the way."""
    gather = merge.gather_tensors
    aligned = isinstance(gather, (PermutedVocabulary, TruncatedVocabulary))
    if aligned:
        gather = gather.gather_tensors
    if isinstance(gather, TensorDictWrapper):
        # mergekit-pytorch has compared the names already, by its own options.
        wanted = [
            _Wanted(model, (load.tensor_name,), optional=True)
            for model, load in gather.tensors.items()
        ]
        return wanted, aligned
    loads: list[LoadTensor] = list(gather.arguments().values())
    wanted = [
        _Wanted(
            load.model,
            (load.tensor, *(load.aliases or ()), *(load.tied_names or ())),
            load.optional,
            cast=bool(load.dtype),
        )
        for load in loads
    ]
    return wanted, aligned


def _same_shape(
    shape: tuple[int, ...] | None,
    expected: tuple[int, ...] | None,
    aligned_axis: int | None,
) -> bool:
    """Whether shapes agree, as far as known, but for an axis that is aligned before merging."""
    if shape is None or expected is None:
        return True
    if len(shape) != len(expected):
        return False
    return all(
        length == other or axis == aligned_axis
        for axis, (length, other) in enumerate(zip(shape, expected))
    )
