"""Whether models are of one architecture, which mergekit knows, and have the layers asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mergekit.architecture import ModelArchitecture, arch_info_for_config, get_architecture_info
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ram.check.combinations import Combination, combinations, without
from mergekit_ram.check.models import Models, at_hand
from mergekit_ram.check.problems import RAW_MERGE, RECIPE, reason
from mergekit_ram.errors import Problem
from mergekit_ram.host import merged_config


def architecture_problems(
    config: MergeConfiguration, options: MergeOptions, models: Models
) -> Iterator[Problem]:
    """What keeps models from being combined by a recipe; of models with a config alone."""
    configs = {reference: model.config for reference, model in models.items() if model.config}
    base = config.base_model if config.base_model in configs else next(iter(configs), None)
    if base is None:
        return
    expected = configs[base].architectures
    others = [model for model in configs if configs[model].architectures != expected]
    for model in others if not options.allow_crimes else ():
        yield _foreign(model, configs[model].architectures, expected)
    alike = {model: found for model, found in configs.items() if model not in others}
    try:
        known = without(config, {model for model in models if model not in alike})
        architecture = known_architecture(known, options, models)
    except Exception as error:  # mergekit's, of models that it does not know
        yield Problem(
            RECIPE,
            f"unknown architecture: {reason(error)}",
            f"update mergekit; {RAW_MERGE}",
        )
        return
    if architecture is None:
        return
    yield from _module_problems(config, architecture)
    for name, module in architecture.modules.items():
        try:
            layers = {m: module.architecture.num_layers(found) for m, found in alike.items()}
        except Exception as error:  # mergekit's, of configs of another make
            yield Problem(
                RECIPE,
                f"mergekit does not find the number of layers: {reason(error)}",
                f"this is a limit of mergekit, whatever the merge method; {RAW_MERGE}",
            )
            return
        for combination in combinations(config):
            if combination.place.startswith(f"modules.{name}.") or not config.modules:
                yield from _layer_problems(combination, layers)
    if len(alike) == len(models):
        yield from _config_problems(config, architecture, options)


def known_architecture(
    config: MergeConfiguration, options: MergeOptions, models: Models
) -> ModelArchitecture | None:
    """What mergekit knows of the architecture.

    None if only weights could show it and some are not at hand, or damaged.
    """
    named = config.referenced_models()
    described = all(
        arch_info_for_config(model.config(options.trust_remote_code)) is not None for model in named
    )
    usable = all(at_hand(m) and not models[m].checkpoint.faults for m in named)
    return get_architecture_info(config, options) if described or usable else None


def _foreign(
    model: ModelReference, found: Sequence[str] | None, expected: Sequence[str] | None
) -> Problem:
    return Problem(
        str(model),
        f"its architecture is {_listed(found)}, the base's {_listed(expected)}",
        "only models trained from the base can be merged; if it was, under another "
        "name, set its `override_architecture:` or allow any with --allow-crimes",
    )


def _module_problems(
    config: MergeConfiguration, architecture: ModelArchitecture
) -> Iterator[Problem]:
    unknown = [name for name in config.modules or () if name not in architecture.modules]
    if unknown:
        yield Problem(
            RECIPE,
            f"modules: the architecture has no {', '.join(unknown)}",
            f"its modules are {', '.join(architecture.modules)}",
        )


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


def _listed(names: Sequence[str] | None) -> str:
    return ", ".join(names or ["unknown"])
