"""Plans of recipes for any merge method, without merging anything.

mergekit plans a recipe for ``mergekit-yaml`` and one for ``mergekit-pytorch`` in different ways.
Both end in a list of ``SaveTensor`` tasks, one an output tensor, each of the merge that makes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mergekit.architecture import get_architecture_info
from mergekit.graph import TaskUniverse
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.scripts import merge_raw_pytorch

from mergekit_ram.check.problems import unplannable
from mergekit_ram.check.recipes import require_mergeable
from mergekit_ram.cluster import driver as cluster
from mergekit_ram.errors import MergeError, UnplannableError
from mergekit_ram.host import output
from mergekit_ram.host.architectures import unwrap
from mergekit_ram.host.known_methods import values_of
from mergekit_ram.host.methods import METHODS
from mergekit_ram.host.recipe import Recipe
from mergekit_ram.host.references import plain
from mergekit_ram.host.tasks import run


def prepared(recipe: Recipe, options: MergeOptions) -> Recipe:
    """The recipe with its models' architectures under their own names.

    Raises:
        MergeError: it has no base model.
    """
    if not any(values_of(recipe.content, "base_model")):
        raise MergeError(
            "the recipe names no base_model, and what an agent changed is its difference from the "
            "base: add "
            "base_model, the model that all agents were trained from"
        )
    if recipe.of_state_dicts:
        return recipe
    return replace(recipe, content=plain(unwrap(recipe.configuration(), options)))


def merge_files(recipe: Recipe, out_path: str, options: MergeOptions) -> None:
    """Merge a recipe of files, as ``mergekit-pytorch`` does, on a cluster if the options say so.

    Raises:
        MergeError: it cannot be merged.
    """
    with (
        cluster.finished_parts_kept(options),
        output.staged_output(out_path) as staging,
    ):
        targets = merge_raw_pytorch.plan_flat_merge(
            recipe.configuration(),
            staging,
            recipe.tensor_union,
            recipe.tensor_intersection,
            options,
        )
        for _ in run(targets, options, quiet=options.quiet):
            pass


def plan(recipe: Recipe, options: MergeOptions) -> list[SaveTensor]:
    """Every output tensor and how it is made. For our own methods all problems of the recipe are
    found first.

    Raises:
        MergeError: it cannot be merged.
    """
    try:
        targets = _targets(recipe, options)
    except MergeError:
        raise
    except Exception as error:  # mergekit's, of a recipe that it cannot plan
        raise UnplannableError(recipe.method, [unplannable(error)]) from error
    planned = TaskUniverse(targets).tasks
    saves = [task for task in planned if isinstance(task, SaveTensor)]
    if not saves:
        raise MergeError("the recipe merges no tensor")
    return saves


def _targets(recipe: Recipe, options: MergeOptions) -> list[Any]:
    config = recipe.configuration()
    if recipe.of_state_dicts:
        return merge_raw_pytorch.plan_flat_merge(
            config, "", recipe.tensor_union, recipe.tensor_intersection, options
        )
    if recipe.method in METHODS:
        require_mergeable(config, options, None)
    LoaderCache().setup(options)
    architecture = get_architecture_info(config, options)
    first = config.base_model or config.referenced_models()[0]
    model_config = first.config(options.trust_remote_code)
    return MergePlanner(config, architecture, options, model_config).plan_to_disk("")
