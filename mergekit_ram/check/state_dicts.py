"""What is wrong with a recipe of ``mergekit-pytorch``, which merges files without configs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mergekit.common import ModelReference

from mergekit_ram.check.combinations import Combination, agent_problems, no_agent
from mergekit_ram.check.problems import (
    NO_DTYPES,
    checkpoint_problems,
    dtype_problems,
    number,
    overwriting,
    place_problems,
    space_problems,
)
from mergekit_ram.errors import Problem, RecipeError
from mergekit_ram.host import publishing
from mergekit_ram.host.checkpoint import Checkpoint, some

if TYPE_CHECKING:
    from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig

_Files = Mapping[ModelReference, Checkpoint]


def raw_problems(
    config: RawPyTorchMergeConfig,
    *,
    tensor_union: bool,
    tensor_intersection: bool,
    out_path: str | None,
    lazy: bool = False,
) -> list[Problem]:
    """What is wrong with the files of a ``mergekit-pytorch`` recipe, but for their shapes.

    Args:
        tensor_union: merge every tensor that a model has.
        tensor_intersection: merge the tensors that all models have.
        out_path: where the merged file goes, for disk space and for not overwriting an input.
        lazy: whether pickles are read with ``--lazy-unpickle``.
    """
    models = tuple(_file_reference(model.model) for model in config.models)
    base = _file_reference(config.base_model) if config.base_model else None
    files = {
        reference: Checkpoint.of_file(reference.model.path, lazy=lazy)
        for reference in dict.fromkeys([*models, *([base] if base else [])])
    }
    combination = Combination("models", base, models, (None,) * len(models))
    problems = [
        *agent_problems(combination),
        *([] if combination.agents else [no_agent(combination)]),
        *dtype_problems(config.dtype, config.out_dtype),
    ]
    for reference, file in files.items():
        problems += checkpoint_problems(str(reference), file)
        problems += _other_problems(reference, files, tensor_intersection)
    if not (tensor_union or tensor_intersection):
        problems += _missing_problems(files)
    if out_path is not None:
        problems += _output_problems(config, files, base, out_path)
    return problems


def _other_problems(
    reference: ModelReference, files: _Files, tensor_intersection: bool
) -> Iterator[Problem]:
    """What is no tensor in a file, if mergekit would come upon it."""
    others = [
        name
        for name in files[reference].others
        if not tensor_intersection or _everywhere(name, files)
    ]
    if others:
        yield Problem(
            str(reference),
            f"{some(others)} is not a tensor; mergekit-pytorch "
            "merges plain dictionaries of tensors only",
            "save the tensors without it",
        )


def _missing_problems(files: _Files) -> Iterator[Problem]:
    """What not all files have: mergekit would drop what only the base has, without a word."""
    names = dict.fromkeys(n for file in files.values() for n in file.tensors)
    for reference, file in files.items():
        missing = [name for name in names if name not in file.tensors]
        if missing and not file.faults:
            yield Problem(
                str(reference),
                f"{number(missing)} missing: {some(missing)}",
                "get the file again, or merge what all files have with --tensor-intersection",
            )


def _output_problems(
    config: RawPyTorchMergeConfig, files: _Files, base: ModelReference | None, out_path: str
) -> Iterator[Problem]:
    yield from place_problems(out_path)
    for reference in files:
        folder, name = os.path.split(os.path.realpath(reference.model.path))
        if folder == os.path.realpath(out_path) and publishing.replaces(name):
            yield overwriting(out_path, str(reference))
    if base is not None:
        yield from space_problems(files[base], config.out_dtype or config.dtype, out_path)


def require_readable(config: RawPyTorchMergeConfig) -> None:
    """Refuse a recipe of ``mergekit-pytorch`` if a file of it cannot be read.

    Raises:
        RecipeError: with every such file.
    """
    paths = [config.base_model, *(model.model for model in config.models)]
    problems = [
        problem
        for path in dict.fromkeys(filter(None, paths))
        for problem in checkpoint_problems(path, Checkpoint.of_file(path))
    ]
    if problems:
        raise RecipeError(config.merge_method, problems)


def plannable_raw(config: RawPyTorchMergeConfig) -> RawPyTorchMergeConfig:
    """The recipe without what cannot be planned: dtypes, unusable files, second mentions."""
    usable = {}
    for model in reversed(config.models):
        file = Checkpoint.of_file(model.model)
        if not (file.faults or file.quantization):
            usable[model.model] = model
    models = [m for m in config.models if usable.get(m.model) is m]
    return config.model_copy(update={**NO_DTYPES, "models": models})


def _everywhere(name: str, files: _Files) -> bool:
    return all(name in file.tensors or name in file.others for file in files.values())


def _file_reference(path: str) -> ModelReference:
    return ModelReference.model_validate({"model": {"path": path}})
