"""``mergekit-pytorch``, which plans by itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mergekit_ram.check.state_dicts import plannable_raw, raw_problems, require_readable
from mergekit_ram.errors import MergeError, RecipeError
from mergekit_ram.host import output, recipe
from mergekit_ram.host.compatibility import require, require_parameters
from mergekit_ram.host.methods import METHODS
from mergekit_ram.host.parameters import Refusals
from mergekit_ram.host.references import plain
from mergekit_ram.host.tasks import NumberedTensors
from mergekit_ram.plugin import planned
from mergekit_ram.plugin.extending import is_extended, marked, once, replace_everywhere
from mergekit_ram.plugin.writer import extend_writer


@once
def extend(module: ModuleType) -> None:
    """Check the files first, plan as ``planner`` does, have the output appear only when whole.

    Args:
        module: ``mergekit.scripts.merge_raw_pytorch``.
    """
    plan, bind = module.plan_flat_merge, module.construct_param_dicts
    if is_extended(plan):
        return
    extend_writer()
    require_parameters(module, "plan_flat_merge", ["config", "options"])
    require_parameters(module, "construct_param_dicts", ["config", "tensor_name"])
    run = getattr(module.main, "callback", None)
    require(callable(run), "merge_raw_pytorch.main is not a command")
    replace_everywhere("plan_flat_merge", plan, marked(_extended_plan(plan)))
    module.construct_param_dicts = _extended_bind(bind)
    module.main.callback = _extended_run(run)


def _extended_plan(plan: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(plan)
    def extended_plan(config, out_path, tensor_union, tensor_intersection, options):
        if config.merge_method not in METHODS:
            return plan(config, out_path, tensor_union, tensor_intersection, options)
        problems = raw_problems(
            config,
            tensor_union=tensor_union,
            tensor_intersection=tensor_intersection,
            out_path=output.published_at(out_path) if out_path else None,
            lazy=options.lazy_unpickle,
        )
        if not problems:
            return _plan(plan, config, out_path, tensor_union, tensor_intersection, options)
        with contextlib.suppress(Exception):  # of what is known to be wrong already
            try:
                _plan(plan, plannable_raw(config), out_path, True, False, options)
            except RecipeError as error:
                problems += error.problems
        raise RecipeError(config.merge_method, problems)

    return extended_plan


def _plan(
    plan: Callable[..., list[Any]],
    config: Any,
    out_path: str,
    tensor_union: bool,
    tensor_intersection: bool,
    options: Any,
) -> list[Any]:
    refusals = Refusals()
    with refusals.collect():
        targets = plan(config, out_path, tensor_union, tensor_intersection, options)
    *saves, finalize = targets
    merges, record = planned.recorded(
        METHODS[config.merge_method],
        [_by_number(save.tensor_task) for save in saves],
        refusals,
        options,
        base_model=config.base_model,
        recipe=plain(config),
        dtype=config.dtype,
    )
    saves = [save.model_copy(update={"tensor_task": merge}) for save, merge in zip(saves, merges)]
    finalize = finalize.model_copy(update={"tensor_save_tasks": tuple(saves)})
    return planned.finished([*saves, finalize], out_path, record, options)


def _by_number(task: Any) -> Any:
    """The same merge, inputs passed by number.

    Their paths mergekit takes apart at spaces, ``+`` and ``@``.
    """
    tensors = NumberedTensors(tensors=task.gather_tensors.tensors)
    return task.model_copy(update={"gather_tensors": tensors})


def _extended_bind(bind: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(bind)
    def extended_bind(config, merge_method, tensor_name):
        Refusals.name_tensor(tensor_name)
        return bind(config, merge_method, tensor_name)

    return extended_bind


def _extended_run(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def extended_run(*args, config_path, out_path, **kwargs) -> None:
        read = _recipe_of_ours(config_path)
        if read is None:
            return run(*args, config_path=config_path, out_path=out_path, **kwargs)
        try:
            with output.staged_output(out_path) as staging:
                run(*args, config_path=config_path, out_path=staging, **kwargs)
        except MergeError:
            raise
        except Exception:
            # Did something happen to a file meanwhile? That says more than where it was met.
            require_readable(read.configuration())
            raise

    return extended_run


def _recipe_of_ours(path: str) -> recipe.Recipe | None:
    """A file's recipe, if by a method of ours; mergekit says what is wrong with others."""
    try:
        read = recipe.Recipe.read(path)
    except MergeError:
        return None
    return read if read.method in METHODS else None
