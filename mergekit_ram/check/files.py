"""What is wrong with a recipe file, whichever of mergekit's commands it is for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from mergekit.scripts import merge_raw_pytorch

from mergekit_ram.check.problems import RECIPE
from mergekit_ram.check.recipes import check, check_steps
from mergekit_ram.errors import MergeError, Problem, RecipeError
from mergekit_ram.host.methods import METHODS
from mergekit_ram.host.recipe import Recipe
from mergekit_ram.host.references import dumpable

LOG = logging.getLogger(__name__)


def check_file(
    recipes: Mapping[str | None, Recipe],
    options: MergeOptions,
    out_path: str | None = None,
    *,
    path: str = "the recipe",
) -> tuple[str, list[Problem]]:
    """The merge methods that a file's recipes use, and everything wrong with them.

    Several recipes are taken for those of ``mergekit-multi``.

    Args:
        recipes: by name.
        out_path: where the merged model would go, for disk space and for not overwriting an input.
        path: what messages call the file.

    Raises:
        MergeError: no recipe is for one of our methods.
    """
    ours = {name: recipe for name, recipe in recipes.items() if recipe.method in METHODS}
    if not ours:
        methods = ", ".join(recipe.method for recipe in recipes.values())
        names = ", ".join(METHODS)
        raise MergeError(f"{path} uses merge_method {methods}; this checks {names}")
    for warning in (text for recipe in ours.values() for text in recipe.warnings):
        LOG.warning(warning)
    methods = ", ".join(dict.fromkeys(recipe.method for recipe in ours.values()))
    recipe = ours.get(None)
    if len(recipes) > 1 or recipe is None:
        steps = {name: recipe.configuration() for name, recipe in ours.items()}
        # Where the steps lie makes no difference, so that their names do as paths.
        pending = list(filter(None, recipes))
        problems = check_steps(steps, options, pending=pending)
        return methods, [*problems, *_undumpable(recipes)]
    if recipe.of_state_dicts:
        return methods, _check_state_dicts(recipe, options, out_path)
    return methods, check(recipe.configuration(), options, out_path)


def _undumpable(recipes: Mapping[str | None, Recipe]) -> Iterator[Problem]:
    """The paths that mergekit-multi fails on, since it writes its recipes down for itself."""
    for recipe in recipes.values():
        config = recipe.configuration()
        if isinstance(config, MergeConfiguration):
            for model in filter(lambda m: not dumpable(m), config.referenced_models()):
                yield Problem(
                    RECIPE,
                    f"mergekit-multi cannot take the path {model}, "
                    "for a space or a quotation mark in it",
                    "give it another name, by a symbolic link say",
                )


def _check_state_dicts(
    recipe: Recipe, options: MergeOptions, out_path: str | None
) -> list[Problem]:
    try:
        merge_raw_pytorch.plan_flat_merge(
            recipe.configuration(),
            out_path or "",
            recipe.tensor_union,
            recipe.tensor_intersection,
            options,
        )
    except RecipeError as error:
        return list(error.problems)
    return []
