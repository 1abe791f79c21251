"""Everything that configs, indexes and safetensors headers can show to be wrong with a recipe, before a weight is read.

Problems are gathered, not raised one by one, and come as one ``RecipeError``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml
from mergekit.architecture import (
    ModelArchitecture,
    arch_info_for_config,
    get_architecture_info,
)
from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.io import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import LoaderCache, LoadTensor
from mergekit.merge_methods.task_adapter import (
    ExecuteMergeMethodTask,
    TensorDictWrapper,
)
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary

from mergekit_ram import output
from mergekit_ram.checkpoint import Checkpoint, TensorHeader, some, stored_bytes
from mergekit_ram.methods import MergeError

if TYPE_CHECKING:
    from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig

RECIPE = "recipe"


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a recipe from being merged.

    Attributes:
        where: the model, or ``recipe``.
        what: what is wrong, with the tensors it is wrong with.
        remedy: what the user can do.
    """

    where: str
    what: str
    remedy: str


class RecipeError(MergeError):
    """A recipe that cannot be merged. The message lists every problem found.

    Attributes:
        problems: the same, one by one.
    """

    def __init__(self, method: str, problems: Iterable[Problem]):
        self.method = method
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        number = len(self.problems)
        yield (
            f"merge_method {self.method} cannot merge this recipe: "
            f"{number} problem{'s' if number != 1 else ''}"
        )
        for where in dict.fromkeys(problem.where for problem in self.problems):
            yield where
            for problem in self.problems:
                if problem.where == where:
                    yield f"  - {problem.what}"
                    yield f"    {problem.remedy}"


@dataclass(frozen=True)
class _Model:
    """A model of the recipe: its checkpoint, and its config if that could be read."""

    reference: ModelReference
    checkpoint: Checkpoint
    config: Any
    config_fault: str | None

    @property
    def quantized(self) -> bool:
        return self.checkpoint.quantization is not None

    @classmethod
    def read(cls, reference: ModelReference, trust_remote_code: bool) -> _Model:
        path = reference.model.path
        if path.startswith((".", "/", "~")) and not os.path.isdir(path):
            return cls(reference, Checkpoint(), None, "there is no such directory")
        try:
            config, fault = reference.config(trust_remote_code=trust_remote_code), None
        except Exception as error:  # transformers raises a dozen kinds
            config, fault = None, textwrap.shorten(str(error), 300)
        return cls(reference, Checkpoint.of(reference, config), config, fault)


def check(
    config: MergeConfiguration,
    options: MergeOptions,
    out_path: str | None = None,
    *,
    pending: Collection[str] = (),
) -> list[Problem]:
    """Everything wrong with a recipe that can be found without reading a weight. Nothing is written or downloaded.

    Args:
        out_path: where the merged model would go, for disk space and for not overwriting an input.
        pending: paths of models that other merges make first, of which nothing can be known yet.
    """
    models = _read_models(config, options, pending)
    problems = _recipe_problems(config, options, models, out_path)
    return [*problems, *_planned_problems(config, options, models, problems)]


def check_steps(
    steps: Mapping[str | None, MergeConfiguration],
    options: MergeOptions,
    *,
    pending: Collection[str] = (),
) -> list[Problem]:
    """Everything wrong with the recipes of ``mergekit-multi``, by name, None for the one without.

    Args:
        pending: paths of the models that the steps make.
    """
    problems = []
    for name, config in steps.items():
        for problem in check(config, options, pending=pending):
            if problem.where == RECIPE:
                problem = replace(problem, where=f"{RECIPE} {name or 'without name'}")
            problems.append(problem)
    return problems


def require_mergeable(
    config: MergeConfiguration, options: MergeOptions, out_path: str
) -> None:
    """Refuse a recipe before its models are downloaded, its LoRAs merged and its tensors planned.

    What only a plan shows is left to the plan itself, which is made once, where nothing else is wrong and every
    model is at hand.

    Raises:
        RecipeError: with all problems.
    """
    models = _read_models(config, options)
    problems = _recipe_problems(config, options, models, out_path)
    if any(model.lora for model in models) and not options.lora_merge_cache:
        problems.append(_NO_LORA_CACHE)
    if problems or not all(map(_at_hand, models)):
        problems += _planned_problems(config, options, models, problems)
    if problems:
        raise RecipeError(config.merge_method, problems)


_NO_LORA_CACHE = Problem(
    RECIPE,
    "a LoRA is merged into its model first, and there is no place for the result",
    "name a directory with --lora-merge-cache",
)

_Models = Mapping[ModelReference, _Model]


def _read_models(
    config: MergeConfiguration, options: MergeOptions, pending: Collection[str] = ()
) -> _Models:
    return {
        reference: _Model(reference, Checkpoint(), None, None)
        if reference.model.path in pending
        else _Model.read(reference, options.trust_remote_code)
        for reference in sorted(config.referenced_models(), key=str)
    }


def _recipe_problems(
    config: MergeConfiguration,
    options: MergeOptions,
    models: _Models,
    out_path: str | None,
) -> list[Problem]:
    """What is wrong with a recipe's models and with how it combines them. Tensors are compared once planned."""
    return [
        *_combination_problems(config),
        *(problem for model in models.values() for problem in _model_problems(model)),
        *_architecture_problems(config, options, models),
        *_dtype_problems(config.dtype, config.out_dtype),
        *_output_problems(config, models, out_path),
    ]


def _planned_problems(
    config: MergeConfiguration,
    options: MergeOptions,
    models: _Models,
    known: Sequence[Problem],
) -> list[Problem]:
    """Problems of parameters and tensors, as far as the known ones let the recipe be planned."""
    base = config.base_model or next(iter(config.referenced_models()), None)
    if base not in models or models[base].config is None:
        return []
    apart = {p.where for p in _architecture_problems(config, options, models)}
    unplanned = {
        reference
        for reference, model in models.items()
        if reference != base and (model.config is None or str(reference) in apart)
    }
    config = _without(config, unplanned)
    try:
        with _described_loaders(models, options):
            architecture = _architecture(config, options)
            if architecture is None:
                return []
            MergePlanner(
                config, architecture, options, models[base].config
            ).plan_in_memory()
    except RecipeError as error:
        # A quantized model has other tensors; that is said already.
        quantized = {str(m.reference) for m in models.values() if m.quantized}
        return [p for p in error.problems if p.where not in quantized]
    except Exception as error:  # mergekit's, of a recipe that it cannot plan
        if known:
            return []
        remedy = "see mergekit's documentation of recipes"
        return [Problem(RECIPE, f"it cannot be planned: {error}", remedy)]
    return []


def _without(
    config: MergeConfiguration, unplanned: set[ModelReference]
) -> MergeConfiguration:
    """A copy of a recipe without some of its models, the second mention of any, and dtypes, which may be unusable."""
    config = config.model_copy(update=_NO_DTYPES, deep=True)
    if config.base_model in unplanned:
        config.base_model = None

    def kept(sources: list[Any]) -> list[Any]:
        first = {source.model: source for source in reversed(sources)}
        return [s for s in sources if first[s.model] is s and s.model not in unplanned]

    for module in (config.modules or {"": config}).values():
        if module.models:
            module.models = kept(module.models)
        for merged in module.slices or ():
            merged.sources = kept(merged.sources)
    return config


_NO_DTYPES = {"dtype": None, "out_dtype": None}


class _DescribedLoader(LazyTensorLoader):
    """Stands in for the loader of a checkpoint that is only planned with."""

    def __init__(self, checkpoint: Checkpoint):
        paths = dict.fromkeys(checkpoint.tensors, "")
        super().__init__(ShardedTensorIndex("", True, paths, []))
        self.checkpoint = checkpoint


@contextlib.contextmanager
def _described_loaders(models: _Models, options: MergeOptions) -> Iterator[None]:
    """Have this thread plan with checkpoints that are described, so that none is downloaded, unpickled or merged."""
    cache = LoaderCache()
    cache.setup(options)
    # An attribute of its own hides the one that the caches of all threads share.
    cache.loaders = {
        model.reference: _DescribedLoader(model.checkpoint) for model in models.values()
    }
    try:
        yield
    finally:
        del cache.loaders


def parameter_problem(refusal: str) -> Problem:
    return Problem(RECIPE, refusal, "see the parameters table in mergekit-ram's README")


def rounding_warnings(
    agents: Iterable[ModelReference],
    checkpoints: PlannedCheckpoints,
    dtype: str | None,
) -> list[str]:
    """Warn of a 16-bit ``dtype`` that rounds float32 agents before they are compared with the base."""
    rounding = dtype_from_name(dtype)
    if rounding is None or rounding.itemsize > 2:
        return []
    stored = [str(agent) for agent in agents if checkpoints.of(agent).float32]
    if not stored:
        return []
    return [
        f"dtype: {dtype} rounds {some(stored)}, stored in float32, before they are compared with the base: updates "
        "smaller than the rounding vanish. To keep them, use dtype: float32 with out_dtype: "
        + str(dtype)
    ]


def tensor_problems(
    merges: Sequence[ExecuteMergeMethodTask], checkpoints: PlannedCheckpoints
) -> list[Problem]:
    """What is wrong with the tensors that a plan is going to load: missing ones, and shapes that differ."""
    missing: dict[str, list[str]] = {}
    differing: dict[tuple[str, str], list[str]] = {}
    buffers: dict[str, list[str]] = {}
    for merge in merges:
        inputs, aligned = _inputs(merge)
        found = {
            wanted.model: checkpoints.shape(wanted)
            for wanted in inputs
            if checkpoints.holds(wanted)
        }
        for wanted in inputs:
            needed = not wanted.optional or (wanted.model == merge.base_model and found)
            if needed and wanted.model not in found:
                missing.setdefault(str(wanted.model), []).append(wanted.names[0])
        axis = merge.output_weight.vocabulary_axis
        expected = found.get(merge.base_model)
        for model, shape in found.items():
            if not _same_shape(shape, expected, axis if aligned else None):
                remedy = _OTHER_SIZE if axis is None else _OTHER_VOCABULARY
                differing.setdefault((str(model), remedy), []).append(
                    f"{merge.output_weight.name} {list(shape)} for the base's {list(expected)}"
                )
        kinds = {
            wanted.model: checkpoints.buffer_dtype(wanted)
            for wanted in inputs
            if wanted.model in found
        }
        for model, kind in kinds.items():
            if kind != kinds.get(merge.base_model, kind):
                kind, expected_kind = kind or "floats", kinds[merge.base_model]
                buffers.setdefault(str(model), []).append(
                    f"{merge.output_weight.name} {kind} for the base's {expected_kind or 'floats'}"
                )
    return [
        *(
            Problem(model, f"{_number(kinds)} of another type: {some(kinds)}", _BUFFER)
            for model, kinds in buffers.items()
        ),
        *(
            Problem(model, f"{_number(names)} missing: {some(names)}", _INCOMPLETE)
            for model, names in missing.items()
        ),
        *(
            Problem(
                model, f"{_number(shapes)} of another shape: {some(shapes)}", remedy
            )
            for (model, remedy), shapes in differing.items()
        ),
    ]


_BUFFER = "save the checkpoint again with floating weights as the base's"
_INCOMPLETE = "the checkpoint is incomplete, or of another architecture than the base; get it again"
_OTHER_SIZE = "only models of the base's size, trained from the base, can be merged"
_OTHER_VOCABULARY = (
    "align the vocabularies: add `tokenizer: {source: base}` (or union) to the recipe"
)


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
    """The checkpoints of a planned merge, each described once."""

    def __init__(self) -> None:
        self._described: dict[ModelReference, Checkpoint] = {}
        self._model_types: dict[ModelReference, str] = {}

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
        """Whether the checkpoint has the tensor, or mergekit can make it of others, as of an older layout."""
        tensors = self.of(wanted.model).tensors
        if not tensors or any(name in tensors for name in wanted.names):
            return True
        if wanted.optional:
            return False
        return can_convert_checkpoint_keys(
            self._model_type(wanted.model), set(tensors), wanted.names[0]
        )

    def of(self, model: ModelReference) -> Checkpoint:
        if model not in self._described:
            self._described[model] = self._describe(model)
        return self._described[model]

    def _describe(self, model: ModelReference) -> Checkpoint:
        path = model.model.path
        if os.path.isfile(path):
            return Checkpoint.of_file(path)
        loader = LoaderCache().get(model)
        if isinstance(loader, _DescribedLoader):
            return loader.checkpoint
        return Checkpoint.of_directory(loader.index.base_path)

    def _model_type(self, model: ModelReference) -> str:
        if model not in self._model_types:
            config = model.config(trust_remote_code=LoaderCache().trust_remote_code)
            self._model_types[model] = config.model_type
        return self._model_types[model]


def output_bytes(
    merge: ExecuteMergeMethodTask, dtype: str | None, checkpoints: PlannedCheckpoints
) -> int:
    """What a merge's output takes as ``dtype``, as stored if None; 0 if it has no inputs or they are pickled."""
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
    """Whether shapes agree, as far as they are known, but for an axis that is aligned before merging."""
    if shape is None or expected is None:
        return True
    if len(shape) != len(expected):
        return False
    return all(
        length == other or axis == aligned_axis
        for axis, (length, other) in enumerate(zip(shape, expected))
    )


def _number(tensors: Sequence[str]) -> str:
    return f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"


@dataclass(frozen=True)
class _Combination:
    """Models that a recipe merges with each other, and the layers it takes of each."""

    place: str
    base: ModelReference | None
    models: tuple[ModelReference, ...]
    layers: tuple[tuple[int, int] | None, ...]


def _combinations(config: MergeConfiguration) -> Iterator[_Combination]:
    modules = config.modules or {"": config}
    for name, module in modules.items():
        prefix = f"modules.{name}." if name else ""
        if module.models:
            models = tuple(source.model for source in module.models)
            yield _Combination(
                f"{prefix}models", config.base_model, models, (None,) * len(models)
            )
        for i, merged in enumerate(module.slices or ()):
            yield _Combination(
                f"{prefix}slices[{i}]",
                merged.base_model or config.base_model,
                tuple(source.model for source in merged.sources),
                tuple(tuple(source.layer_range) for source in merged.sources),
            )


def _combination_problems(config: MergeConfiguration) -> Iterator[Problem]:
    for combination in _combinations(config):
        yield from _agent_problems(combination)


def _agent_problems(combination: _Combination) -> Iterator[Problem]:
    place, base = combination.place, combination.base
    if base is None:
        yield Problem(
            RECIPE,
            f"{place}: no base_model",
            "add `base_model:`, the model that all agents were trained from",
        )
    elif None not in combination.layers and base not in combination.models:
        yield Problem(
            RECIPE,
            f"{place}: the base {base} is not among the sources",
            "list it as a source, with the layers it contributes",
        )
    agents = [model for model in combination.models if model != base]
    if not agents:
        yield Problem(
            RECIPE,
            f"{place}: no agent besides the base",
            "list the models to merge under `models:`",
        )
    seen: dict[str, ModelReference] = {} if base is None else {_place(base): base}
    for agent in agents:
        twin = seen.setdefault(_place(agent), agent)
        if twin is not agent:
            role = "the base" if twin == base else "listed before"
            yield Problem(
                RECIPE,
                f"{place}: {agent} is the same model as {twin}, {role}",
                "list every agent once, and the base only as `base_model:`",
            )


def _place(model: ModelReference) -> str:
    """Where a model really is, so that two spellings of one directory are one model."""
    path = model.model.path
    if not os.path.exists(path):
        return str(model)
    lora = model.lora and (
        os.path.realpath(model.lora.path)
        if os.path.exists(model.lora.path)
        else str(model.lora)
    )
    return f"{os.path.realpath(path)}+{lora}"


def _model_problems(model: _Model) -> Iterator[Problem]:
    where = str(model.reference)
    if model.config_fault:
        yield Problem(
            where,
            f"its config cannot be read: {model.config_fault}",
            "check the path; a model needs its config.json beside its weights",
        )
    lora = model.reference.lora
    if lora and os.path.isdir(lora.path):
        adapter = os.path.join(lora.path, "adapter_config.json")
        if not os.path.exists(adapter):
            yield Problem(
                where, f"{adapter} is missing", "name the directory of a PEFT adapter"
            )
    yield from _checkpoint_problems(where, model.checkpoint)


def _checkpoint_problems(where: str, checkpoint: Checkpoint) -> Iterator[Problem]:
    for fault in checkpoint.faults:
        yield Problem(where, fault, "download or save the checkpoint again")
    if checkpoint.quantization:
        yield Problem(
            where,
            f"it is quantized: {checkpoint.quantization}",
            "dequantize it first and save float weights; differences of quantized weights mean nothing",
        )


def _architecture_problems(
    config: MergeConfiguration,
    options: MergeOptions,
    models: _Models,
) -> Iterator[Problem]:
    configs = {
        reference: model.config for reference, model in models.items() if model.config
    }
    base = (
        config.base_model if config.base_model in configs else next(iter(configs), None)
    )
    if base is None:
        return
    expected = configs[base].architectures
    others = [model for model in configs if configs[model].architectures != expected]
    for model in others if not options.allow_crimes else ():
        yield Problem(
            str(model),
            f"its architecture is {_listed(configs[model].architectures)}, the base's {_listed(expected)}",
            "only models trained from the base can be merged",
        )
    alike = [model for model in configs if model not in others]
    try:
        known = _without(config, {model for model in models if model not in alike})
        architecture = _architecture(known, options)
    except Exception as error:  # mergekit's, of models that it does not know
        yield Problem(RECIPE, f"unknown architecture: {error}", "update mergekit")
        return
    if architecture is None:
        return
    for name, module in architecture.modules.items():
        layers = {
            model: module.architecture.num_layers(configs[model]) for model in alike
        }
        for combination in _combinations(config):
            if combination.place.startswith("modules.") and (
                not combination.place.startswith(f"modules.{name}.")
            ):
                continue
            yield from _layer_problems(combination, layers)
    if len(alike) == len(models):
        yield from _config_problems(config, architecture, options)


def _config_problems(
    config: MergeConfiguration, architecture: ModelArchitecture, options: MergeOptions
) -> Iterator[Problem]:
    """What keeps the merged model's config from being saved, which mergekit does when all else is done."""
    from mergekit_ram.planning import output_config

    try:
        merged = output_config(config, architecture, options)
        getattr(merged, "validate", lambda: None)()
    except Exception as error:  # transformers raises a dozen kinds
        yield Problem(
            RECIPE,
            f"the merged model's config is not valid: {textwrap.shorten(str(error), 300)}",
            "keep the base's number of layers, which mergekit cannot change for every architecture",
        )


def _architecture(
    config: MergeConfiguration, options: MergeOptions
) -> ModelArchitecture | None:
    """What mergekit knows of the architecture; None if only weights could show it and some are not at hand."""
    models = config.referenced_models()
    described = all(
        arch_info_for_config(model.config(options.trust_remote_code)) is not None
        for model in models
    )
    if not described and not all(map(_at_hand, models)):
        return None
    return get_architecture_info(config, options)


def _at_hand(model: ModelReference) -> bool:
    return os.path.isdir(model.model.path) and not model.lora


def _layer_problems(
    combination: _Combination, layers: Mapping[ModelReference, int]
) -> Iterator[Problem]:
    whole = [
        model
        for model, taken in zip(combination.models, combination.layers)
        if taken is None
    ]
    if whole and combination.base in layers:
        expected = layers[combination.base]
        for model in whole:
            if layers.get(model, expected) != expected:
                yield Problem(
                    str(model),
                    f"it has {layers[model]} layers, the base {expected}",
                    "only models trained from the base can be merged; to combine some layers, use `slices:`",
                )
    for model, taken in zip(combination.models, combination.layers):
        if taken is None or model not in layers:
            continue
        if not 0 <= taken[0] <= taken[1] <= layers[model]:
            yield Problem(
                str(model),
                f"{combination.place} takes layers {list(taken)} of its {layers[model]}",
                "a layer_range is [first, last + 1], within the model's layers",
            )
    lengths = {taken[1] - taken[0] for taken in combination.layers if taken is not None}
    if len(lengths) > 1:
        yield Problem(
            RECIPE,
            f"{combination.place}: its sources contribute {sorted(lengths)} layers",
            "every source of a slice contributes the same number of layers",
        )


def _dtype_problems(dtype: str | None, out_dtype: str | None) -> Iterator[Problem]:
    for name, value in (("dtype", dtype), ("out_dtype", out_dtype)):
        try:
            parsed = dtype_from_name(value)
            usable = parsed is None or parsed.is_floating_point
        except RuntimeError:
            usable = False
        if not usable:
            yield Problem(
                RECIPE,
                f"{name}: {value}",
                "use bfloat16, float16, float32 or float64",
            )


def _output_problems(
    config: MergeConfiguration, models: _Models, out_path: str | None
) -> Iterator[Problem]:
    if out_path is None:
        return
    for model in models:
        if os.path.realpath(model.model.path) == os.path.realpath(out_path):
            yield _overwriting(out_path, str(model))
    base = models.get(config.base_model)
    if base is not None:
        dtype = config.out_dtype or config.dtype
        yield from _space_problems(base.checkpoint, dtype, out_path)


def _overwriting(out_path: str, model: str) -> Problem:
    return Problem(
        RECIPE,
        f"the output {out_path} is the input {model}",
        "write the merged model to another directory",
    )


def _space_problems(
    base: Checkpoint, dtype: str | None, out_path: str
) -> Iterator[Problem]:
    needed = stored_bytes(base.tensors, dtype)
    existing = os.path.abspath(out_path)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        yield Problem(
            RECIPE,
            f"the output {out_path} cannot be made: {existing} is a file",
            "write the merged model to another directory",
        )
        return
    free = shutil.disk_usage(existing).free
    if needed > free:
        yield Problem(
            RECIPE,
            f"the merged model takes {_size(needed)}, {_size(free)} are free at {out_path}",
            "free some space or write it elsewhere",
        )


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def raw_problems(
    config: RawPyTorchMergeConfig,
    *,
    tensor_union: bool,
    tensor_intersection: bool,
    out_path: str | None,
) -> list[Problem]:
    """What is wrong with the files of a ``mergekit-pytorch`` recipe. Shapes are compared once planned.

    Args:
        tensor_union: merge every tensor that a model has.
        tensor_intersection: merge the tensors that all models have.
        out_path: where the merged file goes, for disk space and for not overwriting an input.
    """
    models = tuple(_file_reference(model.model) for model in config.models)
    base = _file_reference(config.base_model) if config.base_model else None
    files = {
        reference: Checkpoint.of_file(reference.model.path)
        for reference in dict.fromkeys([*models, *([base] if base else [])])
    }
    problems = [
        *_agent_problems(_Combination("models", base, models, (None,) * len(models))),
        *_dtype_problems(config.dtype, config.out_dtype),
    ]
    for reference, file in files.items():
        problems += _checkpoint_problems(str(reference), file)
    if not (tensor_union or tensor_intersection):
        # mergekit would drop what only the base has, without a word.
        names = dict.fromkeys(n for file in files.values() for n in file.tensors)
        for reference, file in files.items():
            missing = [name for name in names if name not in file.tensors]
            if missing and not file.faults:
                problems.append(
                    Problem(
                        str(reference),
                        f"{_number(missing)} missing: {some(missing)}",
                        "get the file again, or merge what all files have with --tensor-intersection",
                    )
                )
    if out_path is not None:
        for reference in files:
            folder, name = os.path.split(os.path.realpath(reference.model.path))
            if folder == os.path.realpath(out_path) and output.replaces(name):
                problems.append(_overwriting(out_path, str(reference)))
        if base is not None:
            dtype = config.out_dtype or config.dtype
            problems += _space_problems(files[base], dtype, out_path)
    return problems


def require_readable(recipe_path: str) -> None:
    """Refuse a recipe of ``mergekit-pytorch`` if a file of it cannot be read.

    Raises:
        RecipeError: with every such file.
    """
    with open(recipe_path, encoding="utf-8") as file:
        recipe = yaml.safe_load(file)
    paths = [recipe.get("base_model"), *(m["model"] for m in recipe["models"])]
    problems = [
        problem
        for path in dict.fromkeys(filter(None, paths))
        for problem in _checkpoint_problems(path, Checkpoint.of_file(path))
    ]
    if problems:
        raise RecipeError(recipe["merge_method"], problems)


def plannable_raw(config: RawPyTorchMergeConfig) -> RawPyTorchMergeConfig:
    """The recipe as far as it can be planned: without dtypes, unreadable files and the second mention of any."""
    readable = {
        model.model: model
        for model in reversed(config.models)
        if not Checkpoint.of_file(model.model).faults
    }
    models = [m for m in config.models if readable.get(m.model) is m]
    return config.model_copy(update={**_NO_DTYPES, "models": models})


def _file_reference(path: str) -> ModelReference:
    return ModelReference.model_validate({"model": {"path": path}})


def _listed(names: Sequence[str] | None) -> str:
    return ", ".join(names or ["unknown"])
