"""mergekit's planner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mergekit.common import dtype_from_name

from mergekit_ram.check.problems import unplannable
from mergekit_ram.cluster.driver import ClusterOptions
from mergekit_ram.errors import MergeError, UnplannableError
from mergekit_ram.host import loading
from mergekit_ram.host.compatibility import require, require_parameters
from mergekit_ram.host.methods import METHODS
from mergekit_ram.host.parameters import Refusals
from mergekit_ram.host.references import plain
from mergekit_ram.plugin import planned
from mergekit_ram.plugin.extending import once
from mergekit_ram.plugin.writer import extend_writer


@once
def extend(module: ModuleType) -> None:
    """Have the planner check parameters, round once and measure a model-wide ratio.

    Args:
        module: ``mergekit.plan``.
    """
    planner = module.MergePlanner
    if hasattr(planner, "mergekit_ram_record"):
        return
    extend_writer()
    require_parameters(planner, "_plan", [])
    require_parameters(planner, "plan_tensor", ["weight", "weights_in", "models"])
    require("_tensors" in planner.__annotations__, "MergePlanner._tensors is gone")
    require_parameters(planner, "plan_to_disk", ["out_path"])
    planner.mergekit_ram_record = None
    planner._plan = _extended_plan(planner._plan)
    planner.plan_tensor = _extended_plan_tensor(planner.plan_tensor)
    planner.plan_to_disk = _extended_plan_to_disk(planner.plan_to_disk)


def _extended_plan(plan: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plan)
    def extended_plan(self) -> None:
        method = METHODS.get(self.config.merge_method)
        if method is None:
            return plan(self)
        # Planning rewrites the configuration, so take the recipe before.
        recipe = plain(self.config)
        refusals = Refusals()
        with refusals.collect():
            try:
                plan(self)
            except MergeError:
                raise
            except Exception as error:
                raise UnplannableError(method.spec.name, [unplannable(error)]) from error
        weights = [weight for weight, _ in self._tensors]
        merges, self.mergekit_ram_record = planned.recorded(
            method,
            [
                _rounded_once(task, weight.force_dtype or self.config.out_dtype)
                for weight, task in self._tensors
            ],
            refusals,
            self.options,
            base_model=self.config.base_model,
            recipe=recipe,
            dtype=self.config.dtype,
        )
        self._tensors = list(zip(weights, merges))

    return extended_plan


def _rounded_once(task: Any, name: str | None) -> Any:
    """The same merge, writing the dtype that is saved, so that saving does not round again."""
    dtype = dtype_from_name(name)
    if dtype is None or not dtype.is_floating_point:
        return task
    return task.model_copy(update={"out_dtype": name})


def _extended_plan_tensor(plan_tensor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plan_tensor)
    def extended_plan_tensor(self, weight, weights_in, models, *args, **kwargs) -> None:
        Refusals.name_tensor(weight.name)
        if self.config.merge_method in METHODS and len(weights_in) < len(models):
            # mergekit counts the first slice's sources for what comes after the last one, all by
            # one name.
            weights_in = [weight] * len(models)
        plan_tensor(self, weight, weights_in, models, *args, **kwargs)

    return extended_plan_tensor


def _extended_plan_to_disk(plan_to_disk: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plan_to_disk)
    def extended_plan_to_disk(self, out_path: str) -> list[Any]:
        targets = plan_to_disk(self, out_path)
        record = self.mergekit_ram_record
        if record is not None and not isinstance(self.options, ClusterOptions):
            loading.stream(task for _, task in self._tensors)
        return planned.finished(targets, out_path, record, self.options)

    return extended_plan_to_disk
