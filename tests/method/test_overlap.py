from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergekit_ram.method.overlap import (
    OverlapCounts,
    overlap_ratio,
    rescaling_factor,
    rescaling_factors,
    total_counts,
)
from mergekit_ram.method.tally import Tally
from support import oracle


def examples(number: int) -> settings:
    return settings(max_examples=number, derandomize=True, deadline=None, database=None)


def directions(rng: np.random.Generator, agents: int, elements: int, active: float) -> np.ndarray:
    """How every agent moves every element, −1, 0 or 1: ``[agents, elements]``."""
    signs = rng.choice([-1.0, 1.0], (agents, elements))
    return signs * (rng.random((agents, elements)) < active)


def expected(signs: np.ndarray) -> oracle.Overlap:
    return oracle.overlap(np.zeros(signs.shape[1]), list(signs))


def tally(signs: np.ndarray, cuts=(), dtype=torch.float32) -> OverlapCounts:
    """Counts by blocks that end at the cuts, with deltas of any size."""
    edges = [0, *sorted(cuts), signs.shape[1]]
    blocks = [signs[:, start:end] for start, end in zip(edges, edges[1:])]
    longest = max(block.shape[1] for block in blocks)
    counter = Tally(len(signs), longest, dtype, torch.device("cpu"))
    for block in blocks:
        counter.begin(block.shape[1])
        for i, row in enumerate(block):
            counter.add(i, torch.tensor(1e-6 * (i + 1) * row, dtype=dtype))
        counter.end()
    return counter.counts()


def assert_counts(counts: OverlapCounts, reference: oracle.Overlap) -> None:
    for field in vars(reference):
        value = np.array(getattr(counts, field))
        assert np.array_equal(value, getattr(reference, field)), field


@st.composite
def overlaps(draw, agents: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    active = draw(st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0)))
    agents = agents or draw(st.integers(1, 5))
    return directions(rng, agents, draw(st.integers(0, 60)), active)


@pytest.mark.parametrize("agents", range(1, 13))
@examples(12)
@given(data=st.data())
def test_tally_counts_like_brute_force(agents, data):
    signs = data.draw(overlaps(agents))
    cuts = data.draw(st.lists(st.integers(0, signs.shape[1]), max_size=4))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64)))
    assert_counts(tally(signs, cuts, dtype), expected(signs))


@pytest.mark.parametrize("agents", [1, 2, 5, 6, 10, 11, 15, 16, 33])
@pytest.mark.parametrize("active", [0.05, 0.6])
def test_tally_of_many_elements_and_agents(agents, active):
    signs = directions(np.random.default_rng(agents), agents, 3001, active)
    signs[:, :3] = [[1, -1, 0]] * agents
    assert_counts(tally(signs, cuts=(1000, 2000)), expected(signs))


@pytest.mark.parametrize("agents", [10, 11, 16, 34, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_are_exact_for_any_number_of_agents(agents, dtype):
    generator = np.random.default_rng(agents)
    signs = generator.choice([-1, 0, 1], (agents, 3000), p=[0.1, 0.8, 0.1])
    signs[:, :3] = 1, 0, -1
    tally = Tally(agents, 2000, dtype, torch.device("cpu"))
    for block in np.split(signs, [2000], axis=1):
        tally.begin(block.shape[1])
        for agent, row in enumerate(block):
            tally.add(agent, torch.tensor(row * 0.25, dtype=dtype))
        tally.end()
    changed = np.abs(signs)
    changers = changed.sum(0)
    counts = tally.counts()
    assert counts.total == 3000
    for i in range(agents):
        others = np.bincount(changers[changed[i] == 1] - 1, minlength=agents)
        assert counts.histogram[i] == tuple(others)
    assert np.array_equal(counts.pairwise, changed @ changed.T)
    opposed = [[np.sum(a * b == -1) for b in signs] for a in signs]
    assert np.array_equal(counts.pairwise_conflicts, opposed)
    assert counts.sign_conflicts == np.sum(np.abs(signs.sum(0)) != changers)


def test_opposite_directions_conflict_once_however_many_agents_take_part():
    counts = tally(np.array([[1, 1, 1, 0], [-1, -1, 1, 0], [-1, 0, 1, -1]]))
    assert counts.sign_conflicts == 2
    assert counts.pairwise_conflicts == ((0, 2, 1), (2, 0, 0), (1, 0, 0))
    assert counts.pairwise == ((3, 3, 2), (3, 3, 2), (2, 2, 3))
    assert counts.histogram == ((0, 1, 2), (0, 1, 2), (1, 0, 2))


@examples(60)
@given(overlaps(), st.data())
def test_counts_of_parts_add_up_to_those_of_the_whole(signs, data):
    cut = data.draw(st.integers(0, signs.shape[1]))
    parts = [tally(signs[:, :cut]), tally(signs[:, cut:])]
    whole = tally(signs)
    assert parts[0] + parts[1] == parts[1] + parts[0] == whole
    assert total_counts(iter(parts), len(signs)) == whole
    assert whole + OverlapCounts.zero(len(signs)) == whole


def test_sum_of_no_counts_is_zero():
    zero = total_counts([], 3)
    assert zero == OverlapCounts.zero(3)
    assert zero.agents == 3
    assert_counts(zero, expected(np.zeros((3, 0))))


def test_counts_of_different_numbers_of_agents_do_not_add():
    with pytest.raises(ValueError, match="2 and of 3 agents"):
        OverlapCounts.zero(2) + OverlapCounts.zero(3)
    with pytest.raises(TypeError):
        OverlapCounts.zero(2) + 0


@examples(60)
@given(overlaps(), st.data())
def test_spread_counts_are_those_with_idle_agents_in_between(signs, data):
    agents = len(signs) + data.draw(st.integers(0, 3))
    places = data.draw(st.permutations(range(agents)))[: len(signs)]
    among = np.zeros((agents, signs.shape[1]))
    among[places] = signs
    assert_counts(tally(signs).spread(places, agents), expected(among))


@pytest.mark.parametrize(
    "shared, unique, kind, ratio",
    [
        (0, 0, "unique", 0.0),
        (0, 0, "changed", 0.0),
        (0, 8, "unique", 0.0),
        (0, 8, "changed", 0.0),
        (8, 0, "unique", 0.7),
        (8, 0, "changed", 0.7),
        (1, 4, "unique", 0.25),
        (1, 4, "changed", 0.2),
        (12, 4, "unique", 3.0),
        (12, 4, "changed", 0.75),
    ],
)
def test_overlap_ratio(shared, unique, kind, ratio):
    assert overlap_ratio(shared, unique, alpha=0.7, kind=kind) == ratio


def test_overlap_ratio_is_shared_over_unique_by_default():
    assert overlap_ratio(1, 4, alpha=0.7) == 0.25


@pytest.mark.parametrize(
    "rho, r, alpha, factor",
    [
        (0.0, 0.5, 0.2, 1.0),
        (0.125, 0.5, 0.2, 1.0625),
        (0.25, 0.5, 0.25, 1.125),
        (3.0, 0.5, 0.25, 1.125),
        (3.0, 0.5, 4.0, 2.5),
        (3.0, 0.0, 4.0, 1.0),
        (3.0, 0.5, 0.0, 1.0),
        (-1.0, 0.5, 4.0, 1.0),
        (float("inf"), 0.5, 0.25, 1.125),
    ],
)
def test_rescaling_factor_clips_the_ratio(rho, r, alpha, factor):
    assert rescaling_factor(rho, r=r, alpha=alpha) == factor


def test_rescaling_by_no_number_is_refused():
    with pytest.raises(ValueError, match="rho must be a number, not nan"):
        rescaling_factor(float("nan"), r=0.1, alpha=0.2)


def test_agent_with_only_shared_changes_is_rescaled_in_full():
    counts = tally(np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]))
    assert rescaling_factors(counts, r=0.5, alpha=0.25) == (1.125, 1.125, 1.0)
    assert rescaling_factors(counts, r=0.5, alpha=4.0) == (3.0, 2.0, 1.0)


@examples(60)
@given(
    st.lists(overlaps(3), min_size=1, max_size=4),
    st.sampled_from((0.0, 0.1, 1.0)),
    st.sampled_from((0.0, 0.2, 1.0, 5.0)),
    st.sampled_from(("unique", "changed")),
)
def test_rescaling_of_a_model_is_by_its_summed_counts(model, r, alpha, kind):
    counts = total_counts([tally(signs) for signs in model], 3)
    reference = oracle.model_overlap([(np.zeros(signs.shape[1]), list(signs)) for signs in model])
    assert_counts(counts, reference)
    factors = rescaling_factors(counts, r=r, alpha=alpha, kind=kind)
    assert factors == pytest.approx(
        oracle.rescaling(reference, r=r, alpha=alpha, ratio=kind), rel=1e-15
    )


@pytest.mark.parametrize("agents", [1, 2, 5, 11])
@pytest.mark.parametrize("blocks", [(), (0,), (0, 0, 0)])
def test_tally_of_no_elements_is_zero(agents, blocks):
    counter = Tally(agents, 8, torch.float32, torch.device("cpu"))
    for elements in blocks:
        counter.begin(elements)
        for agent in range(agents):
            counter.add(agent, torch.zeros(elements))
        counter.end()
    assert counter.counts() == OverlapCounts.zero(agents)


@pytest.mark.parametrize("elements", [0, 1, 2, 7, 64])
def test_tally_of_no_agents_counts_elements_only(elements):
    counter = Tally(0, 64, torch.float32, torch.device("cpu"))
    for _ in range(3):
        counter.begin(elements)
        counter.end()
    assert counter.counts() == OverlapCounts(3 * elements, (), (), (), 0)
