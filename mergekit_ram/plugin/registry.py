"""mergekit's registry of merge methods, and how it runs those of ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from mergekit.merge_methods.base import BatchOptions, MergeMethod, TensorGroup

from mergekit_ram.errors import ParameterError
from mergekit_ram.host.compatibility import require, require_parameters, require_version
from mergekit_ram.host.groups import BoundGroup, rescaling_by_agent
from mergekit_ram.host.methods import METHODS, RamMethod
from mergekit_ram.host.parameters import Refusals, note_weights
from mergekit_ram.host.tasks import CALL, Call
from mergekit_ram.method.overlap import sum_overlaps
from mergekit_ram.report.record import overflow_warnings

LOG = logging.getLogger(__name__)


def extend(module: ModuleType) -> None:
    """Put the methods into mergekit's registry, in place of its own of the same names.

    Args:
        module: ``mergekit.merge_methods``.
    """
    require_version()
    require_parameters(MergeMethod, "_execute", ["groups", "parameters", "options", "input_dtypes"])
    require_parameters(MergeMethod, "_execute_resolved", ["groups", "parameters"])
    require_parameters(MergeMethod, "_bind_group_parameters", ["group", "supplied"])
    registry = getattr(module.registry, "_METHODS", None)
    require(isinstance(registry, dict), "registry._METHODS is not a dictionary")
    for name, method in METHODS.items():
        if not isinstance(registry.get(name), RegisteredMethod):
            registry[name] = RegisteredMethod(method)


class RegisteredMethod(MergeMethod):
    """Runs a method on mergekit's groups, or hands them on to the task of ours that asked.

    mergekit's own group methods convert whole tensors to one dtype before, and to the output dtype
    after. Here both happen inside the kernel, block by block and with one rounding.
    """

    def __init__(self, method: RamMethod):
        self.method = method
        self.spec = method.spec

    def _bind_group_parameters(self, group: TensorGroup, *supplied: Any) -> dict[str, Any]:
        """Bind for a direct call: its groups are all that a model-wide ratio is over."""
        refusals = Refusals()
        refusals.tensor = group.metadata.name or refusals.tensor
        with refusals.collect():
            values = super()._bind_group_parameters(group, *supplied)
        note_weights(refusals, values, values["weight"].values())
        found = list(refusals)
        if found:
            raise ParameterError(f"merge method {self.spec.name}: {'; '.join(found)}")
        return {**values, CALL: Call.DIRECT}

    def _execute(
        self,
        groups: Sequence[TensorGroup],
        parameters: list[dict[str, Any]],
        options: BatchOptions,
        *,
        input_dtypes: Sequence[torch.dtype | None],
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Any, ...]:
        calls = {values.get(CALL) for values in parameters}
        bound = tuple(
            BoundGroup(self.method, group, values, input_dtype, out_dtype)
            for group, values, input_dtype in zip(groups, parameters, input_dtypes)
        )
        if Call.PLANNED in calls:
            return bound
        rescalings: list[Any] = [None] * len(bound)
        if self.method.ratio_scope == "model":
            require(calls <= {Call.DIRECT}, f"{self.spec.name} was run outside a planned merge")
            overlap = sum_overlaps(group.count() for group in bound)
            rescalings = [rescaling_by_agent(overlap, group.parameters) for group in bound]
        merged = [group.merge(rescaling) for group, rescaling in zip(bound, rescalings)]
        overflows = {
            group.name: found.overflowed for group, found in zip(bound, merged) if found.overflowed
        }
        for warning in overflow_warnings(overflows):
            LOG.warning(warning)
        return tuple(found.tensor for found in merged)
