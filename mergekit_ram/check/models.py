"""The models of a recipe, as their configs, indexes and headers describe them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ram.check.config_files import is_adapter, read_config
from mergekit_ram.check.problems import checkpoint_problems
from mergekit_ram.errors import Problem
from mergekit_ram.host.checkpoint import Checkpoint
from mergekit_ram.host.references import misread


@dataclass(frozen=True)
class Model:
    """A model of the recipe: its checkpoint, and its config if that could be read."""

    reference: ModelReference
    checkpoint: Checkpoint
    config: Any
    config_problem: Problem | None

    @property
    def quantized(self) -> bool:
        return self.checkpoint.quantization is not None

    @classmethod
    def read(cls, reference: ModelReference, options: MergeOptions) -> Model:
        path = reference.model.path
        config, problem = read_config(reference, options.trust_remote_code)
        missing = path.startswith((".", "/", "~")) and not os.path.isdir(path)
        if missing or misread(reference) or (os.path.isdir(path) and is_adapter(path)):
            return cls(reference, Checkpoint(), None, problem)
        lazy = options.lazy_unpickle
        checkpoint = Checkpoint.of(reference, config, lazy=lazy)
        return cls(reference, checkpoint, config, problem)


Models = Mapping[ModelReference, Model]


def read_models(
    config: MergeConfiguration, options: MergeOptions, pending: Collection[str] = ()
) -> Models:
    return {
        reference: Model(reference, Checkpoint(), None, None)
        if reference.model.path in pending
        else Model.read(reference, options)
        for reference in sorted(config.referenced_models(), key=str)
    }


def at_hand(model: ModelReference) -> bool:
    return os.path.isdir(model.model.path) and not model.lora


def model_problems(model: Model) -> Iterator[Problem]:
    where = str(model.reference)
    if model.config_problem:
        yield model.config_problem
    lora = model.reference.lora
    if lora and os.path.isdir(lora.path):
        adapter = os.path.join(lora.path, "adapter_config.json")
        if not os.path.exists(adapter):
            yield Problem(where, f"{adapter} is missing", "name the directory of a PEFT adapter")
    yield from checkpoint_problems(where, model.checkpoint)
