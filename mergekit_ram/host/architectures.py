"""Architectures in a config.json, behind the name of a trainer's wrapper."""

from __future__ import annotations

import contextlib
import logging

import transformers
from mergekit.architecture.json_definitions import NAME_TO_ARCH
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ram.host.references import replaced

LOG = logging.getLogger(__name__)


def unwrapped_name(config: transformers.PretrainedConfig) -> str | None:
    """``Qwen2ForCausalLM`` of a Qwen2 that says ``FSDPQwen2ForCausalLM``; None if known."""
    names = config.architectures or ()
    if len(names) != 1 or names[0] in NAME_TO_ARCH or _model_type(names[0]):
        return None
    inner = (names[0][i:] for i, c in enumerate(names[0]) if i and c.isupper())
    return next((n for n in inner if _is_architecture_of(n, config.model_type)), None)


def _is_architecture_of(name: str, model_type: str) -> bool:
    described = NAME_TO_ARCH.get(name, ())
    return _model_type(name) == model_type or any(
        architecture.expected_model_type == model_type for architecture in described
    )


def _model_type(name: str) -> str | None:
    """The type of model that a class of transformers makes; None for other names."""
    config = getattr(getattr(transformers, name, None), "config_class", None)
    return getattr(config, "model_type", None)


def unwrap(config: MergeConfiguration, options: MergeOptions) -> MergeConfiguration:
    """The recipe with the architecture of models with a wrapper's name overridden.

    The merged model's config then has the architecture's own name. Warns of every such model.
    """
    wrapped = _wrapped_models(config, options)
    if not wrapped:
        return config
    for model, name in wrapped.items():
        LOG.warning(
            "%s: the architecture in its config.json is taken "
            "for %s, behind the name of a trainer's wrapper",
            model,
            name,
        )

    def overridden(model: ModelReference) -> ModelReference:
        name = wrapped.get(model, model.override_architecture)
        return model.model_copy(update={"override_architecture": name})

    return replaced(config, overridden)


def _wrapped_models(config: MergeConfiguration, options: MergeOptions) -> dict[ModelReference, str]:
    """The models whose config has a wrapper's name, each with its architecture's own."""
    found = {}
    for model in sorted(config.referenced_models(), key=str):
        with contextlib.suppress(Exception):  # of configs that the check refuses
            name = unwrapped_name(model.config(options.trust_remote_code))
            if name:
                found[model] = name
    return found
