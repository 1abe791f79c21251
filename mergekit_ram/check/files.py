"""Recipe files, of ``mergekit-yaml``, ``mergekit-multi`` and ``mergekit-pytorch`` alike, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from mergekit.scripts import merge_raw_pytorch, multimerge

from mergekit_ram.check.recipes import check, check_steps
from mergekit_ram.errors import MergeError, Problem, RecipeError
from mergekit_ram.methods import METHODS

# What reading, parsing and validating a file that is something else raises.
_NOT_A_RECIPE = (
    OSError,
    yaml.YAMLError,
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
    LookupError,
)
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def check_file(
    path: str,
    options: MergeOptions,
    out_path: str | None = None,
    *,
    tensor_union: bool = False,
    tensor_intersection: bool = False,
) -> tuple[str, list[Problem]]:
    """The merge methods a recipe file uses, and everything that is wrong with it, found without reading a weight.

    A file of several recipes is taken for one of ``mergekit-multi``, one that merges files of weights for one of
    ``mergekit-pytorch``, whose options the last two arguments are.

    Args:
        out_path: where the merged model would go, for disk space and for not overwriting an input.

    Raises:
        MergeError: the file is no recipe, or not for one of our methods.
    """
    recipes = _parsed(path)
    names = [method.spec.name for method in METHODS]
    ours = {
        name: config for name, config in recipes.items() if config.merge_method in names
    }
    if not ours:
        methods = ", ".join(config.merge_method for config in recipes.values())
        raise MergeError(
            f"{path} uses merge_method {methods}; this checks {', '.join(names)}"
        )
    methods = ", ".join(dict.fromkeys(config.merge_method for config in ours.values()))
    config = ours.get(None)
    if len(recipes) > 1 or config is None:
        # Where the steps lie makes no difference, so that their names do as paths.
        return methods, check_steps(ours, options, pending=list(filter(None, recipes)))
    if isinstance(config, MergeConfiguration):
        return methods, check(config, options, out_path)
    return methods, _check_raw(
        config, options, out_path, tensor_union, tensor_intersection
    )


def _parsed(path: str) -> dict[str | None, Any]:
    """Recipes by name, None for one without."""
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        documents = list(yaml.safe_load_all(source))
        if len(documents) > 1 or "name" in documents[0]:
            return multimerge.load_config(source, "")[0]
        if merges_files(documents[0]):
            model = merge_raw_pytorch.RawPyTorchMergeConfig
        else:
            model = MergeConfiguration
        return {None: model.model_validate(documents[0])}
    except _NOT_A_RECIPE as error:
        raise MergeError(f"{path} is not a recipe: {error}") from None


def merges_files(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe is for ``mergekit-pytorch``, which takes files where ``mergekit-yaml`` takes models."""
    models = recipe.get("models")
    sources = [recipe.get("base_model"), *(models if isinstance(models, list) else ())]
    paths = [s.get("model") if isinstance(s, dict) else s for s in sources]
    return any(
        isinstance(path, str)
        and not os.path.isdir(path)
        and (os.path.isfile(path) or path.lower().endswith(_WEIGHT_FILES))
        for path in paths
    )


def _check_raw(
    config: merge_raw_pytorch.RawPyTorchMergeConfig,
    options: MergeOptions,
    out_path: str | None,
    tensor_union: bool,
    tensor_intersection: bool,
) -> list[Problem]:
    try:
        merge_raw_pytorch.plan_flat_merge(
            config, out_path or "", tensor_union, tensor_intersection, options
        )
    except RecipeError as error:
        return list(error.problems)
    return []
