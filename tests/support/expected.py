"""What a merge should give, by the float64 oracle."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from support import oracle
from support.checkpoints import Weights
from support.tensors import F64, array, bits, dtype_name

METHODS = ("ram", "ramplus", "ramplus_tl")
# Strong enough that one tensor counted wrongly shows in a float32 result.
STRONG = {"r": 1.0, "alpha": 10.0}
RESCALING = ("r", "alpha", "ratio")


@dataclasses.dataclass
class Planned:
    """One output tensor: what is merged into it, and the oracle's keywords for it."""

    base: torch.Tensor
    agents: Sequence[torch.Tensor]
    parameters: Mapping = dataclasses.field(default_factory=dict)


Plan = dict[str, Planned]


def plan(
    base: Weights,
    agents: Sequence[Weights],
    parameters: Mapping | Callable[[str], Mapping] | None = None,
) -> Plan:
    """Every tensor of the base with every agent's. An agent without a tensor counts as one that
    left it as it is.
    """
    of = parameters if callable(parameters) else lambda _: parameters or {}
    return {
        name: Planned(tensor, [agent.get(name, tensor) for agent in agents], of(name))
        for name, tensor in base.items()
    }


@dataclasses.dataclass
class Expected:
    base: torch.Tensor
    merged: oracle.Merged
    dtype: torch.dtype
    wide: bool

    def check(self, name: str, got: torch.Tensor) -> None:
        assert got.dtype == self.dtype, name
        assert got.shape == self.base.shape, name
        inactive = torch.as_tensor(self.merged.changers == 0)
        kept = self.base.to(self.dtype)
        assert torch.equal(bits(got)[inactive], bits(kept)[inactive]), (
            f"{name}: elements that no agent changed lost the base's bits"
        )
        error = np.abs(array(got) - self.merged.value)
        allowed = (2.0**-50 if self.wide else 2.0**-22) * self.merged.magnitude
        if self.dtype != F64:
            allowed = allowed + 0.51 * oracle.ulp(self.merged.value, dtype_name(self.dtype))
        wrong = (error > allowed) & ~self.merged.contested
        assert not wrong.any(), (
            f"{name}: {wrong.sum()} of {wrong.size} elements are wrong, "
            f"by up to {np.max(error[wrong] / allowed[wrong]):.3g} times the tolerance"
        )


def expect(
    method: str,
    planned: Plan,
    *,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> dict[str, Expected]:
    """Evaluate a plan in float64, the ratio over the whole of it if the method is ``ramplus``."""
    inputs = {}
    for name, tensor in planned.items():
        tensors = [tensor.base, *tensor.agents]
        tensors = [t.to(dtype) if dtype else t for t in tensors]
        inputs[name] = tensors
    arrays = {name: [array(t) for t in tensors] for name, tensors in inputs.items()}
    counts = {
        name: oracle.overlap(base, agents, **selection(planned[name].parameters))
        for name, (base, *agents) in arrays.items()
    }
    over_model = sum_counts(counts)
    expected = {}
    for name, (base, *agents) in arrays.items():
        parameters = dict(planned[name].parameters)
        rescaling = {key: parameters.pop(key) for key in RESCALING if key in parameters}
        if method != "ram":
            scope = over_model if method == "ramplus" else counts[name]
            parameters["factors"] = oracle.rescaling(scope, **rescaling)
        dtypes = [tensor.dtype for tensor in inputs[name]]
        promoted = dtypes[0]
        for other in dtypes[1:]:
            promoted = torch.promote_types(promoted, other)
        expected[name] = Expected(
            base=inputs[name][0],
            merged=oracle.ram(base, agents, **parameters),
            dtype=out_dtype or promoted,
            wide=F64 in (*dtypes, out_dtype),
        )
    return expected


def selection(parameters: Mapping) -> dict:
    return {key: parameters[key] for key in ("epsilon", "weight", "normalize") if key in parameters}


def sum_counts(counts: Mapping[str, oracle.Overlap]) -> oracle.Overlap:
    first, *others = counts.values()
    for other in others:
        first = first + other
    return first


def overlap_of(planned: Plan) -> oracle.Overlap:
    return sum_counts(
        {
            name: oracle.overlap(
                array(tensor.base),
                [array(agent) for agent in tensor.agents],
                **selection(tensor.parameters),
            )
            for name, tensor in planned.items()
        }
    )


def check(output: Weights, expected: Mapping[str, Expected]) -> None:
    assert output.keys() == expected.keys()
    for name, tensor in expected.items():
        tensor.check(name, output[name])


def check_state_dict(output: Weights, expected, base: Weights) -> None:
    output = dict(output)
    assert torch.equal(output.pop("steps"), base["steps"])
    check(output, expected)


def true_counts(planned: Plan) -> list[tuple[int, int, int]]:
    counts = overlap_of(planned)
    columns = zip(counts.changed, counts.unique, counts.shared, strict=True)
    return [tuple(map(int, row)) for row in columns]


def total_elements(weights: Weights) -> int:
    return sum(tensor.numel() for tensor in weights.values())


def floating(weights: Weights) -> Weights:
    return {n: t for n, t in weights.items() if t.is_floating_point()}


def layer_of(name: str) -> int | None:
    found = re.search(r"(?:layers|block)\.(\d+)\.", name)
    return int(found[1]) if found else None


def gradient(values: Sequence[float], name: str, layers: int) -> float:
    """A gradient's value in one tensor; what stands before and after the layers takes the first
    value.
    """
    layer = layer_of(name)
    t = 0 if layer is None else layer / (layers - 1)
    return float(np.interp(t, np.linspace(0, 1, len(values)), values))
