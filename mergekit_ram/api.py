"""The commands from Python: each takes a recipe and returns what it found as a typed result.

Every function takes the recipe as a file's path, as plain data, or as a ``Recipe`` that was read
before, and mergekit's ``MergeOptions`` where the defaults do not do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mergekit.merge import run_merge
from mergekit.options import MergeOptions

from mergekit_ram.check.files import check_file
from mergekit_ram.cluster.driver import ClusterOptions
from mergekit_ram.host.known_methods import parameter_warnings
from mergekit_ram.host.methods import METHODS
from mergekit_ram.host.recipe import Recipe, read_recipes, recipe_of
from mergekit_ram.report.checked import CheckResult
from mergekit_ram.report.findings import Comparison, Inspection
from mergekit_ram.report.merge_report import FILE_NAME, Report
from mergekit_ram.tools import comparison, inspection, plans

LOG = logging.getLogger(__name__)

RecipeLike = str | os.PathLike[str] | Mapping[str, Any] | Recipe


def merge(
    recipe: RecipeLike,
    out_path: str | os.PathLike[str],
    *,
    options: MergeOptions | None = None,
    ray: bool | str = False,
    tensor_union: bool = False,
    tensor_intersection: bool = False,
) -> Report | None:
    """Merge, as ``mergekit-yaml`` does, or ``mergekit-pytorch`` for a recipe of files of weights.

    Args:
        recipe: a path, plain data or a ``Recipe``.
        out_path: the merged model's directory.
        options: mergekit's. Its global ones, threads and random seed, are the caller's to apply:
            ``options.apply_global_options()``.
        ray: merge on a Ray cluster: True finds or starts one, a text is its address.
        tensor_union: as ``mergekit-pytorch`` has it: merge every tensor that a file has.
        tensor_intersection: likewise: merge the tensors that all files have.

    Returns:
        The report, which also lies in ``out_path`` as ``ram_report.json``; None by a method that is
        not ours.

    Raises:
        RecipeError: with all problems, before a weight is read.
        MergeError: what else keeps it from being merged. ``out_path`` is as it was.
    """
    read = _read(recipe, tensor_union, tensor_intersection)
    _warn(read.warnings)
    target, options = os.fspath(out_path), options or MergeOptions()
    if ray is not False:
        options = ClusterOptions.beside(target, options, "" if ray is True else ray)
    if read.of_state_dicts:
        plans.merge_files(read, target, options)
    else:
        run_merge(read.configuration(), target, options=options, config_source=read.source)
    if read.method not in METHODS:
        return None
    with open(os.path.join(target, FILE_NAME), encoding="utf-8") as file:
        return Report.model_validate_json(file.read())


def check(
    recipe: RecipeLike,
    out_path: str | os.PathLike[str] | None = None,
    *,
    options: MergeOptions | None = None,
    tensor_union: bool = False,
    tensor_intersection: bool = False,
) -> CheckResult:
    """Find what is wrong with a recipe before a weight is read. Nothing is written or downloaded.

    Args:
        recipe: a path, plain data or a ``Recipe``. A file of several is one for ``mergekit-multi``.
        out_path: where the merged model would go, for disk space and for not overwriting an input.
        options: mergekit's.
        tensor_union: as for ``merge``.
        tensor_intersection: as for ``merge``.

    Raises:
        MergeError: it is no recipe, or not by one of our methods.
    """
    path = os.fspath(recipe) if isinstance(recipe, (str, os.PathLike)) else None
    if path is None:
        recipes: dict[str | None, Recipe] = {None: _read(recipe, tensor_union, tensor_intersection)}
    else:
        recipes = read_recipes(
            path, tensor_union=tensor_union, tensor_intersection=tensor_intersection
        )
    method, problems = check_file(
        recipes,
        options or MergeOptions(),
        None if out_path is None else os.fspath(out_path),
        path=path or "the recipe",
    )
    return CheckResult(recipe=path, method=method, problems=problems)


def inspect(
    recipe: RecipeLike,
    *,
    options: MergeOptions | None = None,
    epsilon: float | None = None,
    r: float | None = None,
    alpha: float | None = None,
    exact: bool = False,
    tensor_union: bool = False,
    tensor_intersection: bool = False,
) -> Inspection:
    """See what the agents of a recipe changed and where they overlap. Nothing is merged or written.

    Args:
        recipe: a path, plain data or a ``Recipe``, of any merge method, with a base model.
        options: mergekit's.
        epsilon: in place of the recipe's own; task vectors beyond it count as changed.
        r: the same, of ``ramplus``.
        alpha: the same, of ``ramplus``.
        exact: measure magnitudes on all elements, not on an even sample of large tensors.
        tensor_union: as for ``merge``.
        tensor_intersection: as for ``merge``.

    Raises:
        MergeError: the recipe cannot be merged.
    """
    given = {"epsilon": epsilon, "r": r, "alpha": alpha}
    read = _read(recipe, tensor_union, tensor_intersection)
    _warn([*read.warnings, *parameter_warnings(read.method, read.content)])
    return inspection.inspect(
        read,
        options or MergeOptions(),
        parameters={name: value for name, value in given.items() if value is not None},
        exact=exact,
    )


def compare(
    recipe: RecipeLike,
    methods: Sequence[str] = comparison.DEFAULT_METHODS,
    *,
    options: MergeOptions | None = None,
    tensor_union: bool = False,
    tensor_intersection: bool = False,
) -> Comparison:
    """See what merge methods would keep of the agents of a recipe. Nothing is written.

    Args:
        recipe: a path, plain data or a ``Recipe``, of any merge method, with a base model.
        methods: names of merge methods; each merges the recipe's models in memory, by tensor.
        options: mergekit's.
        tensor_union: as for ``merge``.
        tensor_intersection: as for ``merge``.

    Raises:
        MergeError: the recipe cannot be merged, by one of the methods at least.
    """
    read = _read(recipe, tensor_union, tensor_intersection)
    _warn([*read.warnings, *parameter_warnings(read.method, read.content)])
    return comparison.compare(read, options or MergeOptions(), methods)


def _read(recipe: RecipeLike, tensor_union: bool, tensor_intersection: bool) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    settings = {"tensor_union": tensor_union, "tensor_intersection": tensor_intersection}
    if isinstance(recipe, Mapping):
        return recipe_of(recipe, **settings)
    return Recipe.read(os.fspath(recipe), **settings)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        LOG.warning(warning)
