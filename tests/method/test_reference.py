"""The fast merge gives what the rule as the paper states it gives."""

from __future__ import annotations

import pytest
import torch

from mergekit_ram.method import Agent, Rule, merge
from mergekit_ram.method.reference import merge_exactly
from support.kernel_cases import realistic, same_bits
from support.tensors import BF16, F16, F32, F64

RULES = {
    # way → rule, parameters of the agents in turn
    "plain": (Rule(), [{}]),
    "rescaling": (Rule(), [{"rescaling": 1.02}, {"rescaling": 1.1}]),
    "drop": (Rule(shared="drop"), [{"rescaling": 1.1}]),
    "weights": (Rule(), [{"weight": 0.3}, {"weight": 1.7}]),
    "weights of 0": (Rule(), [{"weight": 0.0}, {"weight": 0.0}, {"weight": 2.0}]),
    "not normalized": (Rule(normalize=False), [{"weight": 0.3}, {"weight": 1.7}]),
    "keep_unique": (Rule(), [{"keep_unique": False}, {}]),
    "scale": (Rule(scale=0.7, epsilon=1e-4), [{}]),
}


@pytest.mark.parametrize("way", RULES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_merge_is_the_reference_rounded(number, dtype, way):
    rule, settings = RULES[way]
    case = realistic(agents=number, dtype=dtype, change=0.05)
    agents = [
        Agent(agent.tensor, **settings[i % len(settings)]) for i, agent in enumerate(case.agents)
    ]
    expected = merge_exactly(case.base, agents, rule)
    exact = merge(case.base, agents, rule, out_dtype=F64)
    torch.testing.assert_close(exact, expected, rtol=1e-13, atol=1e-16)
    # Half a step of the dtype, and as much again where float32 rounds to the other side of it.
    merged = merge(case.base, agents, rule)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(merged, expected.to(dtype), rtol=step, atol=step / 1000)
    if dtype.itemsize == 2:
        assert (merged == expected.to(dtype)).float().mean() > 0.999


def test_the_reference_keeps_what_nobody_changed_and_knows_no_ties():
    base = torch.tensor([-0.0, 1.0], dtype=F64)
    agents = [Agent(base + torch.tensor([1e-6, 1e-6]))]
    assert same_bits(merge_exactly(base, agents), base)
    with pytest.raises(ValueError, match="ties"):
        merge_exactly(base, agents, Rule(shared="ties"))


def test_updates_that_shrink_keep_the_bits_of_what_nobody_changed():
    base = torch.tensor([-0.0, -0.0, 1.0])
    agents = [
        Agent(base + torch.tensor([0.0, 1.0, 0.0]), rescaling=0.5),
        Agent(base.clone(), rescaling=0.5),
    ]
    assert same_bits(merge(base, agents), torch.tensor([-0.0, 0.5, 1.0]))
