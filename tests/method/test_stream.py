"""The kernel against the float64 oracle, on random tensors and at every edge."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergekit_ram.method.overlap import OverlapCounts
from mergekit_ram.method.stream import Agent, NonFiniteError, Rule, count, merge, merge_and_count
from support import oracle
from support.kernel_cases import (
    BLOCKS,
    DTYPES,
    Case,
    assert_counted,
    assert_merged,
    cases,
    examples,
    grid_tensors,
    realistic,
    rounding_range,
    same_bits,
)
from support.tensors import BF16, F16, F32, F64, array, dtype_name


@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@examples(250)
@given(case=cases(), block=st.sampled_from(BLOCKS))
def test_merge_is_the_float64_evaluation_rounded(shared, case, block):
    case = replace(case, rule=replace(case.rule, shared=shared))
    merged = merge(case.base, case.agents, case.rule, block_elements=block)
    assert_merged(merged, case)


@examples(200)
@given(cases(), st.sampled_from(DTYPES))
def test_output_dtype_is_rounded_to_once(case, out):
    assert_merged(merge(case.base, case.agents, case.rule, out_dtype=out), case, out)


@examples(250)
@given(cases(), st.sampled_from(BLOCKS))
def test_counts_are_those_of_the_float64_evaluation(case, block):
    counts = count(case.base, case.agents, case.rule, block_elements=block)
    assert_counted(counts, case.expected_counts())


@examples(150)
@given(cases(), st.sampled_from(BLOCKS), st.sampled_from((None, *DTYPES)))
def test_counting_while_merging_changes_neither(case, block, out):
    call = functools.partial(
        merge_and_count, case.base, case.agents, case.rule, block_elements=block
    )
    merged, counts = call(out_dtype=out)
    alone = merge(case.base, case.agents, case.rule, out_dtype=out)
    assert same_bits(merged, alone)
    assert counts == count(case.base, case.agents, case.rule)


@examples(100)
@given(cases())
def test_result_does_not_depend_on_the_block_size(case):
    whole = merge(case.base, case.agents, case.rule)
    for block in BLOCKS:
        blocks = merge(case.base, case.agents, case.rule, block_elements=block)
        assert same_bits(blocks, whole), block


@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_result_does_not_depend_on_threads_or_default_block(shared, dtype):
    case = realistic((500, 1601), dtype=dtype, change=0.05)
    agents = [
        replace(agent, weight=weight, density=0.4, rescaling=1.03)
        for agent, weight in zip(case.agents, (0.3, 1.7, 0.9), strict=True)
    ]
    rule = Rule(scale=0.7, shared=shared)
    threads = torch.get_num_threads()
    try:
        results = []
        for number, block in ((1, None), (2, None), (3, 100_003), (2, 800_500)):
            torch.set_num_threads(number)
            merged = merge_and_count(case.base, agents, rule, block_elements=block)
            results.append(merged)
    finally:
        torch.set_num_threads(threads)
    merged, counts = results[0]
    for other, other_counts in results[1:]:
        assert same_bits(other, merged)
        assert other_counts == counts


@examples(150)
@given(cases(), st.randoms(use_true_random=False))
def test_agent_order_does_not_matter_beyond_rounding(case, random):
    order = random.sample(range(len(case.agents)), len(case.agents))
    agents = [case.agents[i] for i in order]
    merged, counts = merge_and_count(case.base, agents, case.rule)
    assert_merged(merged, case)
    expected = case.expected_counts()
    assert counts.unique == tuple(expected.unique[order])
    assert np.array_equal(counts.histogram, expected.histogram[order])
    assert np.array_equal(counts.pairwise, expected.pairwise[order][:, order])


@examples(100)
@given(cases(), st.sampled_from((None, *DTYPES)))
def test_inputs_are_not_modified(case, dtype):
    before = [tensor.clone() for tensor in case.tensors]
    merge_and_count(case.base, case.agents, case.rule, input_dtype=dtype)
    for tensor, copy in zip(case.tensors, before, strict=True):
        assert same_bits(tensor, copy)


@examples(150)
@given(cases(), st.sampled_from(DTYPES), st.sampled_from((None, *DTYPES)))
def test_inputs_are_rounded_to_the_input_dtype_first(case, dtype, out):
    agents = [replace(agent, tensor=agent.tensor.to(dtype)) for agent in case.agents]
    expected = merge_and_count(case.base.to(dtype), agents, case.rule, out_dtype=out)
    merged, counts = merge_and_count(
        case.base, case.agents, case.rule, input_dtype=dtype, out_dtype=out
    )
    assert same_bits(merged, expected[0])
    assert counts == expected[1]
    counted = count(case.base, case.agents, case.rule, input_dtype=dtype)
    assert out == F64 or counted == counts


@pytest.mark.parametrize("base", [0.0, -0.0, 1.0])
@pytest.mark.parametrize("epsilon", [1e-5, 0.1, 0.3, 2.0**-10, 1.5 * 2.0**-12, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_strictly_more_than_epsilon_is_a_change(dtype, epsilon, base):
    start = torch.tensor(base, dtype=dtype)
    up = torch.tensor(torch.inf, dtype=dtype)
    nearest = [start + torch.tensor(v, dtype=dtype) for v in (epsilon, -epsilon)]
    values = [v for x in nearest for v in (x, x.nextafter(up), x.nextafter(-up))]
    agent = torch.stack(values)
    # Exact: a difference of neighbours of the base is, and so is one from zero.
    tau = array(agent) - base
    changed = np.abs(tau) > epsilon
    assert changed.any() and not changed.all()

    case = Case(start.expand(6), [Agent(agent)] * 2, Rule(epsilon=epsilon), exact=True)
    counts = count(case.base, case.agents, case.rule)
    assert counts.changed == (changed.sum(),) * 2
    merged = merge(case.base, case.agents, case.rule)
    assert same_bits(merged, torch.where(torch.tensor(changed), agent, case.base))


def test_epsilon_too_small_for_float32_still_lets_the_smallest_change_through():
    base = torch.zeros(3)
    agent = torch.tensor([0.0, 2.0**-149, -(2.0**-149)])
    assert count(base, [Agent(agent)], Rule(epsilon=1e-60)).changed == (2,)
    assert same_bits(merge(base, [Agent(agent)], Rule(epsilon=1e-60)), agent)


def test_epsilon_applies_to_weighted_task_vectors_without_normalization():
    base = torch.zeros(2)
    agents = [Agent(torch.tensor([1.0, 4.0]), weight=0.5), Agent(base, weight=9.0)]
    rule = Rule(epsilon=0.5, normalize=False)
    assert merge(base, agents, rule).tolist() == [0.0, 2.0]
    assert count(base, agents, rule).changed == (1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("weight", [1.0, -0.3])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("keep_unique", [True, False])
def test_inactive_elements_keep_the_bits_of_the_base(
    dtype, shared, scale, weight, normalize, keep_unique
):
    base = torch.tensor([-0.0, 0.0, 1e-7, -1e-7, 0.3, -0.0]).to(dtype)
    moved = base.clone()
    moved[-1] = 1.0
    nudged = base + torch.tensor([5e-6, -5e-6, 0, 0, 0, 0]).to(dtype)
    agents = [
        Agent(moved, density=0.5, rescaling=1.1),
        Agent(nudged, weight=weight, density=0.5, keep_unique=keep_unique),
        Agent(moved, keep_unique=keep_unique),
    ]
    rule = Rule(scale=scale, shared=shared, normalize=normalize)
    for chosen in (agents, agents[:2], agents[1:], agents[1:2]):
        for out in DTYPES:
            merged = merge(base, chosen, rule, out_dtype=out)
            assert same_bits(merged[:-1], base.to(out)[:-1])


@pytest.mark.parametrize("shared", ["drop", "ties", "mean"])
def test_updates_that_are_dropped_or_cancel_keep_the_bits_of_the_base(shared):
    base = torch.tensor([-0.0, -0.0])
    agents = [
        Agent(torch.tensor([1.0, 2.0]), keep_unique=False),
        Agent(torch.tensor([-1.0, -0.0])),
    ]
    for scale in (1.0, -1.0):
        merged = merge(base, agents, Rule(shared=shared, scale=scale))
        assert same_bits(merged, base)


@pytest.mark.parametrize("shared", ["mean", "ties"])
def test_elements_changed_only_by_agents_of_no_weight(shared):
    base = torch.full((3,), 0.5)
    idle = [
        Agent(torch.tensor([2.0, 2.0, 0.5]), weight=0.0),
        Agent(torch.tensor([2.0, 0.5, 0.5]), weight=0.0),
    ]
    merged = merge(base, [*idle, Agent(base + 1)], Rule(shared=shared))
    assert merged.tolist() == [1.5, 1.5, 1.5]
    merged = merge(base, [*idle, Agent(base)], Rule(shared=shared))
    assert merged.tolist() == [0.5, 2.0, 0.5]
    assert merge(base, idle, Rule(shared=shared)).tolist() == [0.5, 2.0, 0.5]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_both_signs(dtype, shared, normalize):
    rng = np.random.default_rng(0)
    base, *tensors = (
        torch.tensor(array).to(dtype) for array in grid_tensors(rng, (40, 10), [0.5, 0.5, 0.8])
    )
    weights = (-0.25, -0.5, 8.0)
    agents = [Agent(tensor, weight) for tensor, weight in zip(tensors, weights)]
    rule = Rule(epsilon=1 / 64, normalize=normalize, shared=shared)
    assert_merged(merge(base, agents, rule), Case(base, agents, rule, exact=True))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("change", [1e-3, 0.02, 0.25])
@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@pytest.mark.parametrize("plain", [True, False])
def test_16_bit_results_are_within_half_an_ulp(dtype, change, shared, plain):
    case = realistic(agents=5, dtype=dtype, change=change)
    if not plain:
        agents = [
            replace(agent, weight=0.1 + 0.3 * i, density=0.3, rescaling=1 + 0.01 * i)
            for i, agent in enumerate(case.agents)
        ]
        case = replace(case, agents=agents, rule=Rule(scale=0.9))
    case = replace(case, rule=replace(case.rule, shared=shared))
    expected = case.expected()
    error = array(merge(case.base, case.agents, case.rule)) - expected.value
    ulps = np.abs(error) / oracle.ulp(expected.value, dtype_name(dtype))
    assert expected.contested.mean() < 0.2
    assert ulps[~expected.contested].max() <= 0.51


@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
def test_float32_weights_are_rounded_to_bfloat16_once(shared):
    case = realistic((300, 300), dtype=F32, change=0.05)
    case = replace(case, rule=Rule(shared=shared))
    expected = case.expected()
    low, high = rounding_range(case, expected, BF16)
    decided = (low == high) & ~expected.contested
    assert decided.mean() > 0.998
    merged = merge(case.base, case.agents, case.rule, out_dtype=BF16)
    assert np.array_equal(
        array(merged)[decided], oracle.rounded(expected.value, "bfloat16")[decided]
    )


@examples(100)
@given(cases(dtypes=(F64,)))
def test_float64_weights_are_merged_in_float64(case):
    expected = case.expected()
    assert expected.value.shape == case.base.shape
    error = np.abs(array(merge(case.base, case.agents, case.rule)) - expected.value)
    assert np.all((error <= 1e-14 * expected.magnitude) | expected.contested)


def test_one_float64_agent_is_enough_for_float64():
    base = torch.zeros(1)
    agents = [Agent(torch.tensor([1 + 2.0**-40], dtype=F64)), Agent(base)]
    assert merge(base, agents).item() == 1 + 2.0**-40


def test_result_carries_no_graph():
    case = realistic((8, 8))
    agents = [replace(agent, tensor=agent.tensor.clone().requires_grad_()) for agent in case.agents]
    base = case.base.clone().requires_grad_()
    for block in (None, 3):
        merged, counts = merge_and_count(base, agents, block_elements=block)
        assert not merged.requires_grad
        assert same_bits(merged, merge(case.base, case.agents))
        assert counts == count(base, agents)


@pytest.mark.parametrize("call", [merge, merge_and_count, count])
@pytest.mark.parametrize(
    "base, agent, message",
    [
        (torch.zeros(4, dtype=torch.int8), torch.zeros(4), "torch.int8"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int64), "torch.int64"),
        (torch.zeros(4, 3), torch.zeros(3, 4), r"\(4, 3\).*\(3, 4\)"),
        (torch.zeros(4), torch.zeros(1), r"\(4,\).*\(1,\)"),
        (torch.zeros(()), torch.zeros(1), r"\(\).*\(1,\)"),
        (torch.zeros(4), torch.zeros(4, device="meta"), "cpu.*meta"),
    ],
)
def test_tensors_that_cannot_be_merged_are_refused(call, base, agent, message):
    for agents in ([Agent(agent)], [Agent(torch.zeros_like(base)), Agent(agent)]):
        with pytest.raises(ValueError, match=message):
            call(base, agents)


@pytest.mark.parametrize("call", [merge, merge_and_count, count])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@pytest.mark.parametrize("keep_unique", [True, False])
@pytest.mark.parametrize("weight, normalize", [(1.0, True), (0.0, True), (0.0, False)])
def test_inputs_that_are_not_finite_are_refused(
    call, dtype, shared, keep_unique, weight, normalize
):
    rule = Rule(shared=shared, normalize=normalize)
    for where in range(3):
        for value in (torch.nan, torch.inf, -torch.inf):
            tensors = [torch.full((5, 4), 0.1 * i, dtype=dtype) for i in range(3)]
            tensors[where][3, 1:3] = value
            base, *others = tensors
            agents = [
                Agent(
                    tensor,
                    weight=weight if i == where - 1 else 1.0,
                    density=0.5,
                    keep_unique=keep_unique,
                )
                for i, tensor in enumerate(others)
            ]
            for block in (None, 3):
                with pytest.raises(NonFiniteError) as refusal:
                    call(base, agents, rule, block_elements=block)
                expected = [0, 0, 0]
                expected[where] = 2
                assert refusal.value.counts == tuple(expected)


def test_infinities_that_cancel_are_refused():
    infinite = torch.tensor([1.0, torch.inf, -torch.inf])
    agents = [Agent(infinite), Agent(-infinite)]
    for base, found in ((torch.zeros(3), 0), (infinite, 2)):
        with pytest.raises(NonFiniteError) as refusal:
            merge(base, agents)
        assert refusal.value.counts == (found, 2, 2)


@pytest.mark.parametrize("call", [merge, merge_and_count, count])
@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("moved", [None, 0, 1])
def test_a_base_that_is_not_finite_is_refused_where_agents_are_equal_to_it(
    call, shared, value, moved
):
    base = torch.tensor([1.0, value, 2.0, 3.0], dtype=BF16)
    agents = [Agent(base), Agent(base.clone())]
    if moved is not None:
        agents[moved] = Agent(base + torch.tensor([0.5, 0, 0, 0], dtype=BF16))
    for block in (None, 2):
        with pytest.raises(NonFiniteError) as refusal:
            call(base, agents, Rule(shared=shared), block_elements=block)
        assert refusal.value.counts == (1, 1, 1)


def test_not_finite_results_can_be_asked_for():
    base, agent = torch.zeros(3), torch.tensor([torch.inf, 1.0, torch.nan])
    merged = merge(base, [Agent(agent)], Rule(finite=False))
    assert not merged[[0, 2]].isfinite().any()
    assert merged[1] == 1
    assert count(base, [Agent(agent)], Rule(finite=False)).total == 3


@pytest.mark.parametrize("call", [merge, merge_and_count, count])
def test_finite_weights_whose_sum_overflows_are_not_refused(call):
    base, agent = torch.zeros(9), torch.full((9,), 1e38)
    call(base, [Agent(agent)])
    assert torch.equal(merge(base, [Agent(agent)]), agent)


@pytest.mark.parametrize("agents", [0, 1, 3, 11])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_empty_tensor_merges_and_counts_nothing(shape, agents):
    base = torch.zeros(shape, dtype=BF16)
    merged, counts = merge_and_count(base, [Agent(base.clone())] * agents)
    assert same_bits(merged, base)
    assert counts == count(base, [Agent(base)] * agents) == OverlapCounts.zero(agents)


def test_no_agents_leave_the_base_and_count_its_elements():
    base = torch.tensor([0.5, -0.0, 3.0])
    merged, counts = merge_and_count(base, [])
    assert same_bits(merged, base)
    assert counts == count(base, []) == OverlapCounts(3, (), (), (), 0)


PEAK_MEMORY = """
import torch
from mergekit_ram.method.stream import Agent, Rule, merge_and_count

torch.set_num_threads(1)

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

def tensors(elements):
    return [torch.full((elements,), 1 + i, dtype=torch.bfloat16) for i in range(4)]

rule = Rule(shared="{shared}", scale=0.5)
base, *agents = tensors(1 << 20)
merge_and_count(base, [Agent(agent) for agent in agents], rule)
base, *agents = tensors(1 << 24)
before = peak()
merge_and_count(base, [Agent(agent) for agent in agents], rule)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
def test_memory_beyond_the_output_does_not_grow_with_the_tensor(shared):
    program = PEAK_MEMORY.format(shared=shared)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    output = 32
    assert float(run.stdout) < output + 24
