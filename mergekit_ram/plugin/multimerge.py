"""``mergekit-multi``."""

from __future__ import annotations

import functools
import inspect
import os
from types import ModuleType

from mergekit_ram.check.recipes import check_steps
from mergekit_ram.errors import RecipeError
from mergekit_ram.host.compatibility import require_parameters
from mergekit_ram.host.methods import METHODS
from mergekit_ram.plugin.extending import is_extended, marked, once, replace_everywhere


@once
def extend(module: ModuleType) -> None:
    """Check every recipe of ``mergekit-multi`` before the first is merged.

    Args:
        module: ``mergekit.scripts.multimerge``.
    """
    expected = ["merge_configs", "merge_options", "intermediate_dir", "lazy"]
    require_parameters(module, "make_tasks", expected)
    make_tasks = module.make_tasks
    if is_extended(make_tasks):
        return
    signature = inspect.signature(make_tasks)

    @functools.wraps(make_tasks)
    def extended_make_tasks(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        steps = {
            name: config
            for name, config in given["merge_configs"].items()
            if config.merge_method in METHODS
        }
        pending = [
            os.path.join(given["intermediate_dir"], name)
            for name in filter(None, given["merge_configs"])
        ]
        problems = check_steps(steps, given["merge_options"], pending=pending)
        if problems:
            methods = dict.fromkeys(config.merge_method for config in steps.values())
            raise RecipeError(", ".join(methods), problems)
        return make_tasks(*args, **kwargs)

    replace_everywhere("make_tasks", make_tasks, marked(extended_make_tasks))
