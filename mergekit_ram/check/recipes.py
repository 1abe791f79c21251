"""What configs, indexes and headers show to be wrong with a recipe, before a weight is read.

Problems are gathered, not raised one by one, and come as one ``RecipeError``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner

from mergekit_ram.check.architecture import architecture_problems, known_architecture
from mergekit_ram.check.combinations import combination_problems, without
from mergekit_ram.check.models import Models, at_hand, model_problems, read_models
from mergekit_ram.check.problems import (
    RECIPE,
    dtype_problems,
    overwriting,
    place_problems,
    space_problems,
    unplannable,
)
from mergekit_ram.check.tensors import DescribedLoader
from mergekit_ram.errors import Problem, RecipeError, UnplannableError
from mergekit_ram.host.architectures import unwrap
from mergekit_ram.host.references import misread
from mergekit_ram.report.record import untold

_NO_LORA_CACHE = Problem(
    RECIPE,
    "a LoRA is merged into its model first, and there is no place for the result",
    "name a directory with --lora-merge-cache",
)


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
    models = read_models(config, options, pending)
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
    models = read_models(config, options)
    problems = _recipe_problems(config, options, models, out_path)
    adapted = any(model.lora and not misread(model) for model in models)
    if adapted and not options.lora_merge_cache:
        problems.append(_NO_LORA_CACHE)
    if problems or not all(map(at_hand, models)):
        with untold():
            problems += _planned_problems(config, options, models, problems)
    if problems:
        raise RecipeError(config.merge_method, problems)


def _recipe_problems(
    config: MergeConfiguration,
    options: MergeOptions,
    models: Models,
    out_path: str | None,
) -> list[Problem]:
    """What is wrong with a recipe's models and their combination, but for their tensors."""
    return [
        *combination_problems(config),
        *(problem for model in models.values() for problem in model_problems(model)),
        *architecture_problems(config, options, models),
        *dtype_problems(config.dtype, config.out_dtype),
        *_output_problems(config, models, out_path),
    ]


def _planned_problems(
    config: MergeConfiguration,
    options: MergeOptions,
    models: Models,
    known: Sequence[Problem],
) -> list[Problem]:
    """Problems of parameters and tensors, as far as the known ones let the recipe be planned."""
    base = config.base_model or next(iter(config.referenced_models()), None)
    if base not in models or models[base].config is None:
        return []
    apart = {p.where for p in architecture_problems(config, options, models)}
    unplanned = {
        reference
        for reference, model in models.items()
        if reference != base and (model.config is None or str(reference) in apart)
    }
    config = without(config, unplanned)
    try:
        with _described_loaders(models, options):
            architecture = known_architecture(config, options, models)
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


@contextlib.contextmanager
def _described_loaders(models: Models, options: MergeOptions) -> Iterator[None]:
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


def _output_problems(
    config: MergeConfiguration, models: Models, out_path: str | None
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
