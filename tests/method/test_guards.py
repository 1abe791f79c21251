"""What is not finite or overflows is treated alike in counting and merging, on every path."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from mergekit_ram.errors import NonFiniteError, OutputOverflowError
from mergekit_ram.method import compiled, magnitude
from mergekit_ram.method import stream as kernel
from mergekit_ram.method.rule import Agent, Rule
from mergekit_ram.method.stream import count, merge, merge_and_count
from support import oracle
from support.tensors import BF16, F16, F32, INFINITY, NAN

# Parameters of every way through the kernel.
WAYS = {
    "ram": ({}, {}),
    "ramplus": ({}, {"rescaling": 1.5}),
    "weighted": ({}, {"weight": 0.5}),
    "scaled": ({"scale": 2.0}, {}),
    "unnormalized": ({"normalize": False}, {"weight": 2.0}),
    "ties": ({"shared": "ties"}, {"density": 0.5}),
    "drop": ({"shared": "drop"}, {}),
    "kept": ({}, {"keep_unique": False}),
}

# Compiling takes seconds.
COMPILING = (False, pytest.param(True, marks=pytest.mark.slow))


@pytest.fixture(autouse=True)
def forget_compiling():
    yield
    compiled.enabled.cache_clear()


def agents_of(tensors, **of_the_last) -> list[Agent]:
    *others, last = tensors
    return [*map(Agent, others), Agent(last, **of_the_last)]


def random_tensors(agents, elements, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(elements, generator=generator)
    changes = torch.randn(agents, elements, generator=generator)
    changed = torch.rand(agents, elements, generator=generator) < 0.3
    return base.to(dtype), (base + changes * changed).to(dtype)


@pytest.mark.parametrize("compiling", COMPILING)
@pytest.mark.parametrize("special", [NAN, -NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite_is_counted_as_it_is_merged(way, special, compiling, monkeypatch):
    if compiling:
        compiled.enabled.cache_clear()
        monkeypatch.setenv("MERGEKIT_RAM_COMPILE", "1")
    rule, last = WAYS[way]
    rule = Rule(finite=False, **rule)
    base, tensors = random_tensors(3, 600, F32)
    tensors[0, 3] = tensors[1, 4] = tensors[2, 4] = tensors[:, 5] = special
    base[6] = special
    base[7] = tensors[0, 7] = special
    base[8] = tensors[:, 8] = special
    agents = agents_of(tensors, **last)
    delta = base - tensors
    delta[torch.isnan(delta)] = 1.0
    signs = torch.sign(delta * (delta.abs() > 1e-5)).numpy()
    counts = []
    for block in (None, 7, 64):
        merged, counted = merge_and_count(base, agents, rule, block_elements=block)
        alone = merge(base, agents, rule, block_elements=block)
        assert torch.equal(merged.view(torch.int32), alone.view(torch.int32))
        counts += [counted, count(base, agents, rule, block_elements=block)]
    assert all(counted == counts[0] for counted in counts)
    changed = np.abs(signs)
    changers = changed.sum(0)
    assert counts[0].changed == tuple(changed.sum(1))
    assert counts[0].unique == tuple((changed * (changers == 1)).sum(1))
    assert counts[0].sign_conflicts == np.sum(np.abs(signs.sum(0)) != changers)
    unchanged = torch.as_tensor(changers == 0)
    assert torch.equal(merged[unchanged], base[unchanged])
    # It gets through to the result, and what is beside it is merged as ever.
    spoilt = torch.as_tensor(~(base.isfinite() & tensors.isfinite().all(0)))
    assert not merged[spoilt & ~unchanged].isfinite().any()
    expected = oracle.ram(
        base[~spoilt].numpy(),
        list(tensors[:, ~spoilt].numpy()),
        normalize=rule.normalize,
        shared=rule.shared,
        lambda_=rule.scale,
        weight=[agent.weight for agent in agents],
        keep_unique=[agent.keep_unique for agent in agents],
        factors=[agent.rescaling for agent in agents],
    )
    if all(agent.density == 1 for agent in agents):  # or it depends on the others
        assert np.allclose(merged[~spoilt], expected.value, atol=1e-6)


@pytest.mark.parametrize("compiling", COMPILING)
@pytest.mark.parametrize("agents", [2, 15, 16, 17, 40, 128])
def test_counts_are_those_of_plain_arithmetic_for_any_number_of_agents(
    agents, compiling, monkeypatch
):
    if compiling and agents > 40:
        pytest.skip("compiling takes minutes")
    if compiling:
        compiled.enabled.cache_clear()
        monkeypatch.setenv("MERGEKIT_RAM_COMPILE", "1")
    base, tensors = random_tensors(agents, 3000, BF16)
    models = agents_of(tensors)
    merged, counts = merge_and_count(base, models)
    again = count(base, models, block_elements=1000)
    alone = merge(base, models)
    assert counts == again
    assert torch.equal(merged, alone)
    delta = tensors.double() - base.double()
    changed = delta.abs() > 1e-5
    changers = changed.sum(0)
    assert counts.changed == tuple(changed.sum(1).tolist())
    assert counts.unique == tuple((changed & (changers == 1)).sum(1).tolist())
    assert np.array_equal(counts.pairwise, changed.int() @ changed.int().T)
    opposed = (delta * changed).sign()
    assert counts.sign_conflicts == int(((opposed == 1).any(0) & (opposed == -1).any(0)).sum())
    mean = base.double() + (delta * changed).sum(0) / changers.clamp(min=1)
    assert torch.allclose(merged.double(), mean, rtol=2**-8, atol=1e-6)


OVERFLOWING = {
    # way → base, agents, dtype of the output
    "ramplus": (60_000.0, [65_000.0, 60_000.0], F16, F16),
    "scaled": (30_000.0, [60_000.0, 30_000.0], F16, F16),
    "ram": (3e38, [-3e38, 3e38], F32, F32),
    "unnormalized": (0.0, [0.0, 60_000.0], F16, F16),
}


@pytest.mark.parametrize("compiling", COMPILING)
@pytest.mark.parametrize("way", OVERFLOWING)
def test_an_output_that_overflows_is_refused_or_counted(way, compiling, monkeypatch):
    if compiling:
        compiled.enabled.cache_clear()
        monkeypatch.setenv("MERGEKIT_RAM_COMPILE", "1")
    base_value, values, dtype, out_dtype = OVERFLOWING[way]
    base = torch.zeros(100, dtype=dtype)
    base[:3] = base_value
    tensors = torch.stack([base.clone() for _ in values])
    for tensor, value in zip(tensors, values, strict=True):
        tensor[:3] = value
    rule, last = WAYS[way]
    agents = agents_of(tensors.flip(0), **last)
    if way == "unnormalized":
        agents = agents_of(tensors, **last)
    with pytest.raises(OutputOverflowError) as refused:
        merge(base, agents, Rule(**rule), out_dtype=out_dtype)
    assert refused.value.count == 3
    assert refused.value.dtype in str(refused.value)
    found = kernel.merge_in_full(
        base, agents, Rule(finite=False, **rule), counting=True, out_dtype=out_dtype
    )
    assert found.overflowed == 3
    assert not found.tensor[:3].isfinite().any()
    assert found.tensor[3:].isfinite().all()


def test_an_input_that_is_not_finite_is_no_overflow():
    base, tensors = random_tensors(2, 50, F16)
    tensors[0, 3] = INFINITY
    with pytest.raises(NonFiniteError):
        merge(base, agents_of(tensors))
    found = kernel.merge_in_full(base, agents_of(tensors), Rule(finite=False), counting=False)
    assert found.overflowed == 0
    assert int((~found.tensor.isfinite()).sum()) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_not_floats_are_refused(dtype):
    tensor = torch.zeros(4).to(dtype)
    with pytest.raises(ValueError, match=str(dtype)):
        merge(tensor, [Agent(tensor)])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_refused_by_its_name(dtype):
    tensor = torch.zeros(4).to(dtype)
    for function in (merge, count, merge_and_count):
        with pytest.raises(ValueError, match="float8"):
            function(tensor, [Agent(tensor)])


@pytest.mark.parametrize("shared", ["mean", "ties"])
def test_the_smallest_block_has_elements_however_many_agents(shared):
    base = torch.zeros(4)
    agents = [Agent(base + 1)] * 3000
    merged, counts = merge_and_count(base, agents, Rule(shared=shared))
    assert torch.equal(merged, base + 1)
    assert set(counts.changed) == {4}


@pytest.mark.parametrize("special", [NAN, INFINITY])
def test_what_is_not_finite_counts_as_changed_at_every_epsilon(special):
    base, tensors = random_tensors(2, 500, F32)
    tensors[0, 3] = tensors[:, 4] = special
    agents = agents_of(tensors)
    found = magnitude.magnitudes(base, agents, Rule(finite=False))
    for epsilon, shared in zip(magnitude.SWEEP, found.shared.T, strict=True):
        counts = count(base, agents, Rule(epsilon=epsilon, finite=False))
        assert tuple(shared.tolist()) == counts.shared
        at = 1 + magnitude.EDGES.index(epsilon)
        assert tuple(found.changed[:, at].tolist()) == counts.changed


def test_torch_is_not_asked_for_its_compiler_before_the_user_is():
    program = "import sys, mergekit_ram.method.stream; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_overflows_are_picklable():
    error = pickle.loads(pickle.dumps(OutputOverflowError(3, F16)))
    assert (type(error), error.count, error.dtype) == (
        OutputOverflowError,
        3,
        "float16",
    )
