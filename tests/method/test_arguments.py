"""Arguments that no merge can use are refused by name and value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergekit_ram.method.overlap import OverlapCounts, overlap_ratio, rescaling_factor
from mergekit_ram.method.rule import Agent, Rule
from mergekit_ram.method.stream import merge
from support.tensors import INFINITY, NAN


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("epsilon", value) for value in (-1.0, NAN, INFINITY, "1e-5", None, True)),
        *(("scale", value) for value in (NAN, INFINITY, "1")),
        *(("shared", value) for value in ("TIES", "", None)),
        *(("normalize", value) for value in (1, "true", None)),
        *(("finite", value) for value in (0, None)),
    ],
)
def test_rules_name_the_argument_and_the_value_they_refuse(argument, value):
    with pytest.raises(ValueError) as refused:
        Rule(**{argument: value})
    assert argument in str(refused.value)
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("weight", value) for value in (NAN, INFINITY, "1", None)),
        *(("density", value) for value in (0, -0.5, 2, NAN, "1")),
        *(("rescaling", value) for value in (NAN, -INFINITY, None)),
        *(("keep_unique", value) for value in (1, "false", None)),
        ("tensor", [1.0]),
    ],
)
def test_agents_name_the_argument_and_the_value_they_refuse(argument, value):
    with pytest.raises(ValueError) as refused:
        Agent(**{"tensor": torch.zeros(2), argument: value})
    assert argument in str(refused.value)
    assert repr(value) in str(refused.value)


def test_agents_can_be_compared_and_hashed():
    one, other = Agent(torch.zeros(2)), Agent(torch.zeros(2))
    assert one == one
    assert one != other
    assert len({one, other, one}) == 2


def test_tensors_unlike_the_base_are_refused():
    base = torch.zeros(2, 3)
    other = Agent(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"\(2, 3\).*agents\[1\] \(3, 2\)"):
        merge(base, [Agent(base), other])
    with pytest.raises(ValueError, match=r"agents\[0\] on meta"):
        merge(base, [Agent(base.to("meta"))])
    with pytest.raises(ValueError, match=r"agents\[1\].*torch\.int64"):
        merge(base, [Agent(base), Agent(base.long())])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("base", [1.0]),
        ("agents[1]", torch.zeros(2)),
        ("rule", "ties"),
        ("input_dtype", torch.int8),
        ("out_dtype", torch.float8_e5m2),
        ("out_dtype", "bfloat16"),
        *(("block_elements", value) for value in (0, -4, 1.5, True)),
    ],
)
def test_merges_name_the_argument_and_the_value_they_refuse(argument, value):
    base = torch.zeros(2)
    arguments = {"base": base, "agents": [Agent(base), Agent(base)]}
    if argument == "agents[1]":
        arguments["agents"][1] = value
    else:
        arguments[argument] = value
    with pytest.raises(ValueError) as refused:
        merge(**arguments)
    assert f"{argument} must be" in str(refused.value)
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("function", "argument", "value"),
    [
        *((overlap_ratio, "shared", value) for value in (-1, 1.5, NAN)),
        *((overlap_ratio, "unique", value) for value in (-1, None)),
        *((overlap_ratio, "alpha", value) for value in (-0.1, NAN)),
        *((overlap_ratio, "kind", value) for value in ("S/U", None)),
        *((rescaling_factor, "rho", value) for value in (NAN, "1")),
        *((rescaling_factor, "r", value) for value in (-0.1, NAN, INFINITY)),
        *((rescaling_factor, "alpha", value) for value in (-0.1, NAN)),
        *((OverlapCounts, "total", value) for value in (-1, 0.5)),
        *((OverlapCounts, "sign_conflicts", value) for value in (-1, None)),
        (OverlapCounts, "histogram", ((1, 0),)),
        (OverlapCounts, "pairwise", ((1,), (1,))),
        (OverlapCounts, "pairwise_conflicts", ((1, -1), (0, 1))),
    ],
)
def test_functions_of_counts_name_the_argument_and_the_value_they_refuse(function, argument, value):
    arguments = {
        overlap_ratio: {"shared": 1, "unique": 1, "alpha": 0.2},
        rescaling_factor: {"rho": 1.0, "r": 0.1, "alpha": 0.2},
        OverlapCounts: vars(OverlapCounts.zero(2)),
    }[function]
    function(**arguments)
    with pytest.raises(ValueError) as refused:
        function(**{**arguments, argument: value})
    # The number of agents is taken from the histogram.
    assert argument in str(refused.value) or argument == "histogram"
    assert argument == "histogram" or repr(value) in str(refused.value)


def test_numbers_of_numpy_are_numbers():
    merge(torch.zeros(2), [], Rule(epsilon=np.float32(1e-5), scale=np.int64(1)))
    assert overlap_ratio(np.int64(1), np.int64(2), alpha=0.2) == 0.5
