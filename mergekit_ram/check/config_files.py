"""What is wrong with a model's ``config.json``, found before transformers makes an object of it."""

from __future__ import annotations

import os
from typing import Any

from mergekit.common import ModelReference

from mergekit_ram.check.problems import reason
from mergekit_ram.errors import Problem
from mergekit_ram.host.checkpoint.directories import weights_file
from mergekit_ram.host.checkpoint.files import read_json
from mergekit_ram.host.checkpoint.headers import UnreadableError
from mergekit_ram.host.references import misread, separator_hint

_BESIDE = "check the path; a model needs its config.json beside its weights"
_REMOTE_CODE = "it comes with Python code of its own, without which it cannot be read"
_TRUST = "look through that code, then allow it to run on this machine with --trust-remote-code"
_NAME = (
    'name it there, as in "architectures": ["LlamaForCausalLM"], or by '
    "`override_architecture:` in the recipe"
)


def read_config(model: ModelReference, trust_remote_code: bool) -> tuple[Any, Problem | None]:
    """A model's transformers config, or None and what is wrong with it."""
    where, path = str(model), model.model.path
    if misread(model):
        return None, Problem(where, f"it is read as {_parts(model)}", separator_hint(where))
    if path.startswith((".", "/", "~")) and not os.path.isdir(path):
        return None, Problem(where, "there is no such directory", _BESIDE)
    problem = _file_problem(model) if os.path.isdir(path) else None
    if problem:
        return None, problem
    try:
        config = model.config(trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises a dozen kinds
        if "trust_remote_code=True" in str(error):
            return None, Problem(where, _REMOTE_CODE, _TRUST)
        told = f"its config cannot be read: {reason(error)}"
        return None, Problem(where, told, _BESIDE)
    problem = _architecture_problem(model, config)
    return (None, problem) if problem else (config, None)


def _parts(model: ModelReference) -> str:
    revision = f" at revision {model.model.revision}" if model.model.revision else ""
    adapter = f" with the adapter {model.lora}" if model.lora else ""
    return f"the model {model.model.path}{revision}{adapter}"


def _file_problem(model: ModelReference) -> Problem | None:
    """What keeps the config of a local model from being read."""
    directory = model.model.path
    if is_adapter(directory):
        base = _adapted_model(directory)
        return Problem(
            str(model),
            "it is a LoRA adapter, not a model",
            f"name it behind the model that it adapts, `{base}+{directory}`",
        )
    path = os.path.join(directory, "config.json")
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise UnreadableError(f"a {kind} where a dictionary is expected")
    except UnreadableError as error:
        return Problem(str(model), f"{path}: {error}", _BESIDE)
    return None


def _architecture_problem(model: ModelReference, config: Any) -> Problem | None:
    """What keeps mergekit from telling a model's architecture by its config."""
    names = config.architectures
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return None
    path = os.path.join(model.model.path, "config.json")
    found = f"its architectures are {names}, not one name" if names else "it names no architecture"
    return Problem(str(model), f"{path}: {found}", _NAME)


def is_adapter(directory: str) -> bool:
    """Whether a directory holds a PEFT adapter and no model."""
    settings = os.path.join(directory, "adapter_config.json")
    return os.path.exists(settings) and weights_file(directory) is None


def _adapted_model(directory: str) -> str:
    """Name of the model that an adapter was trained on, as far as its settings tell."""
    try:
        settings = read_json(os.path.join(directory, "adapter_config.json"))
    except UnreadableError:
        settings = None
    named = isinstance(settings, dict) and settings.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else "base"
