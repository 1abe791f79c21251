"""What configs, indexes and headers show to be wrong with a recipe, before a weight is read.

Problems are gathered, not raised one by one, and come as one ``RecipeError``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mergekit.architecture import (
    ModelArchitecture,
    arch_info_for_config,
    get_architecture_info,
)
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner

from mergekit_ram.check.combinations import (
    Combination,
    combination_problems,
    combinations,
)
from mergekit_ram.check.config_files import is_adapter, read_config
from mergekit_ram.check.problems import (
    NO_DTYPES,
    RAW_MERGE,
    RECIPE,
    checkpoint_problems,
    dtype_problems,
    overwriting,
    place_problems,
    reason,
    space_problems,
    unplannable,
)
from mergekit_ram.check.tensors import DescribedLoader
from mergekit_ram.errors import Problem, RecipeError, UnplannableError
from mergekit_ram.host import merged_config
from mergekit_ram.host.architectures import unwrap
from mergekit_ram.host.checkpoint import Checkpoint
from mergekit_ram.host.references import misread
from mergekit_ram.report.record import untold


@dataclass(frozen=True)
class _Model:
    """A model of the recipe: its checkpoint, and its config if that could be read."""

    reference: ModelReference
    checkpoint: Checkpoint
    config: Any
    config_problem: Problem | None

    @property
    def quantized(self) -> bool:
        return self.checkpoint.quantization is not None

    @classmethod
    def read(cls, reference: ModelReference, options: MergeOptions) -> _Model:
        path = reference.model.path
        config, problem = read_config(reference, options.trust_remote_code)
        missing = path.startswith((".", "/", "~")) and not os.path.isdir(path)
        if missing or misread(reference) or (os.path.isdir(path) and is_adapter(path)):
            return cls(reference, Checkpoint(), None, problem)
        lazy = options.lazy_unpickle
        checkpoint = Checkpoint.of(reference, config, lazy=lazy)
        return cls(reference, checkpoint, config, problem)


def check(
    config: MergeConfiguration,
    options: MergeOptions,
    out_path: str | None = None,
    *,
    pending: Collection[str] = (),
) -> list[Problem]:
    """Everything wrong with a recipe that can be found without reading a weight.

    Nothing is written or downloaded.

    Args:
        out_path: where the merged model would go, for disk space and for not overwriting an input.
        pending: paths of models that other merges make first, of which nothing can be known yet.
    """
    config = unwrap(config, options)
    models = _read_models(config, options, pending)
    problems = _recipe_problems(config, options, models, out_path)
    problems += _planned_problems(config, options, models, problems)
    return list(dict.fromkeys(problems))


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


def require_mergeable(config: MergeConfiguration, options: MergeOptions, out_path: str) -> None:
    """Refuse a recipe before its models are downloaded, its LoRAs merged and its tensors planned.

    What only a plan shows is left to the plan itself, which is made once, where nothing else is
    wrong and every model is at hand.

    Raises:
        RecipeError: with all problems.
    """
    models = _read_models(config, options)
    problems = _recipe_problems(config, options, models, out_path)
    adapted = any(model.lora and not misread(model) for model in models)
    if adapted and not options.lora_merge_cache:
        problems.append(_NO_LORA_CACHE)
    if problems or not all(map(_at_hand, models)):
        with untold():
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
        else _Model.read(reference, options)
        for reference in sorted(config.referenced_models(), key=str)
    }


def _recipe_problems(
    config: MergeConfiguration,
    options: MergeOptions,
    models: _Models,
    out_path: str | None,
) -> list[Problem]:
    """What is wrong with a recipe's models and their combination, but for their tensors."""
    return [
        *combination_problems(config),
        *(problem for model in models.values() for problem in _model_problems(model)),
        *_architecture_problems(config, options, models),
        *dtype_problems(config.dtype, config.out_dtype),
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
            architecture = _architecture(config, options, models)
            if architecture is None:
                return []
            MergePlanner(config, architecture, options, models[base].config).plan_in_memory()
    except UnplannableError as error:
        return [] if known else list(error.problems)
    except RecipeError as error:
        # A quantized model has other tensors; that is said already.
        quantized = {str(m.reference) for m in models.values() if m.quantized}
        return [p for p in error.problems if p.where not in quantized]
    except Exception as error:  # mergekit's, of a recipe that it cannot plan
        return [] if known else [unplannable(error)]
    return []


def _without(config: MergeConfiguration, unplanned: set[ModelReference]) -> MergeConfiguration:
    """A copy of a recipe that can be planned.

    It lacks some of its models, the second mention of any, and dtypes, which may be unusable.
    """
    config = config.model_copy(update=NO_DTYPES, deep=True)
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


@contextlib.contextmanager
def _described_loaders(models: _Models, options: MergeOptions) -> Iterator[None]:
    """Have this thread plan with described checkpoints: none is downloaded, unpickled or merged."""
    cache = LoaderCache()
    cache.setup(options)
    # An attribute of its own hides the one that the caches of all threads share.
    cache.loaders = {
        model.reference: DescribedLoader(model.checkpoint) for model in models.values()
    }
    try:
        yield
    finally:
        del cache.loaders


def _model_problems(model: _Model) -> Iterator[Problem]:
    where = str(model.reference)
    if model.config_problem:
        yield model.config_problem
    lora = model.reference.lora
    if lora and os.path.isdir(lora.path):
        adapter = os.path.join(lora.path, "adapter_config.json")
        if not os.path.exists(adapter):
            yield Problem(where, f"{adapter} is missing", "name the directory of a PEFT adapter")
    yield from checkpoint_problems(where, model.checkpoint)


def _architecture_problems(
    config: MergeConfiguration,
    options: MergeOptions,
    models: _Models,
) -> Iterator[Problem]:
    configs = {reference: model.config for reference, model in models.items() if model.config}
    base = config.base_model if config.base_model in configs else next(iter(configs), None)
    if base is None:
        return
    expected = configs[base].architectures
    others = [model for model in configs if configs[model].architectures != expected]
    for model in others if not options.allow_crimes else ():
        yield Problem(
            str(model),
            f"its architecture is {_listed(configs[model].architectures)}, "
            f"the base's {_listed(expected)}",
            "only models trained from the base can be merged; if it was, under another "
            "name, set its `override_architecture:` or allow any with --allow-crimes",
        )
    alike = [model for model in configs if model not in others]
    try:
        known = _without(config, {model for model in models if model not in alike})
        architecture = _architecture(known, options, models)
    except Exception as error:  # mergekit's, of models that it does not know
        yield Problem(
            RECIPE,
            f"unknown architecture: {reason(error)}",
            f"update mergekit; {RAW_MERGE}",
        )
        return
    if architecture is None:
        return
    unknown = [name for name in config.modules or () if name not in architecture.modules]
    if unknown:
        yield Problem(
            RECIPE,
            f"modules: the architecture has no {', '.join(unknown)}",
            f"its modules are {', '.join(architecture.modules)}",
        )
    for name, module in architecture.modules.items():
        try:
            layers = {m: module.architecture.num_layers(configs[m]) for m in alike}
        except Exception as error:  # mergekit's, of configs of another make
            yield Problem(
                RECIPE,
                f"mergekit does not find the number of layers: {reason(error)}",
                f"this is a limit of mergekit, whatever the merge method; {RAW_MERGE}",
            )
            return
        for combination in combinations(config):
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
    """What keeps mergekit from saving the merged model's config when all else is done."""
    try:
        merged = merged_config.expected(config, architecture, options)
        getattr(merged, "validate", lambda: None)()
    except Exception as error:  # transformers raises a dozen kinds
        yield Problem(
            RECIPE,
            f"the merged model's config is not valid: {reason(error)}",
            "keep the base's number of layers, which mergekit cannot change for every architecture",
        )


def _architecture(
    config: MergeConfiguration, options: MergeOptions, models: _Models
) -> ModelArchitecture | None:
    """What mergekit knows of the architecture.

    None if only weights could show it and some are not at hand, or damaged.
    """
    named = config.referenced_models()
    described = all(
        arch_info_for_config(model.config(options.trust_remote_code)) is not None for model in named
    )
    usable = all(_at_hand(m) and not models[m].checkpoint.faults for m in named)
    return get_architecture_info(config, options) if described or usable else None


def _at_hand(model: ModelReference) -> bool:
    return os.path.isdir(model.model.path) and not model.lora


def _layer_problems(
    combination: Combination, layers: Mapping[ModelReference, int]
) -> Iterator[Problem]:
    whole = [model for model, taken in zip(combination.models, combination.layers) if taken is None]
    if whole and combination.base in layers:
        expected = layers[combination.base]
        for model in whole:
            if layers.get(model, expected) != expected:
                yield Problem(
                    str(model),
                    f"it has {layers[model]} layers, the base {expected}",
                    "only models trained from the base can be "
                    "merged; to combine some layers, use `slices:`",
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


def _output_problems(
    config: MergeConfiguration, models: _Models, out_path: str | None
) -> Iterator[Problem]:
    if out_path is None:
        return
    yield from place_problems(out_path)
    for model in models:
        if os.path.realpath(model.model.path) == os.path.realpath(out_path):
            yield overwriting(out_path, str(model))
    base = models.get(config.base_model)
    if base is not None:
        dtype = config.out_dtype or config.dtype
        yield from space_problems(base.checkpoint, dtype, out_path)


def _listed(names: Sequence[str] | None) -> str:
    return ", ".join(names or ["unknown"])
