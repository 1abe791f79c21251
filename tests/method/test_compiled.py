"""The opt-in merge by torch.compile gives what the kernel's own steps give."""

from __future__ import annotations

import shutil

import pytest
import torch

from mergekit_ram.method import compiled
from mergekit_ram.method import stream as kernel

BF16, F32 = torch.bfloat16, torch.float32

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs the C++ compiler g++")


def make_agents(base: torch.Tensor, dtypes) -> list[kernel.Agent]:
    generator = torch.Generator().manual_seed(1)
    agents = []
    for dtype in dtypes:
        update = torch.randn(base.shape, generator=generator) * 1e-3
        update *= torch.rand(base.shape, generator=generator) < 0.4
        agents.append(kernel.Agent((base.float() + update).to(dtype)))
    return agents


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtypes", [(BF16,) * 4, (F32, BF16, F32)])
def test_compiled_merges_and_counts_are_the_same_to_the_bit(dtypes, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(5003, generator=generator) * 0.02).to(dtypes[0])
    base[::7] = -0.0
    agents = make_agents(base, dtypes[1:])
    # The boundary itself, and elements that all agents changed to cancel out.
    agents[0].tensor[:50] = base[:50] + kernel.Rule().epsilon
    agents[0].tensor[50:90], agents[1].tensor[50:90] = 0.5, -0.5
    base[50:90] = 0

    def results():
        return [
            kernel.merge_and_count(base, agents, block_elements=block) for block in (None, 1024)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "enabled", lambda: False)
        expected = results()
    compiled_blocks = []
    take_block = compiled.take_block

    def watched(*arguments, **options):
        compiled_blocks.append(arguments)
        return take_block(*arguments, **options)

    monkeypatch.setattr(compiled, "enabled", lambda: True)
    monkeypatch.setattr(compiled, "take_block", watched)
    for (merged, counts), (expected_merged, expected_counts) in zip(
        results(), expected, strict=True
    ):
        assert merged.dtype == expected_merged.dtype
        integers = {2: torch.int16, 4: torch.int32}[merged.itemsize]
        assert torch.equal(merged.view(integers), expected_merged.view(integers))
        assert counts == expected_counts
    assert len(compiled_blocks) == 1 + 5
    assert kernel.count(base, agents) == expected[0][1]

    agents[1].tensor[3] = float("nan")
    with pytest.raises(kernel.NonFiniteError) as refused:
        kernel.merge_and_count(base, agents)
    assert refused.value.counts == (0, 0, 1, *(0,) * (len(agents) - 2))


@needs_compiler
@pytest.mark.parametrize("dtypes", [(BF16,) * 4, (F32,) * 3])
def test_compiled_ramplus_is_the_same_to_float32_rounding(dtypes, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    base = (torch.randn(5003, generator=generator) * 0.02).to(dtypes[0])
    agents = [
        kernel.Agent(agent.tensor, rescaling=1.01 + 0.1 * i)
        for i, agent in enumerate(make_agents(base, dtypes[1:]))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "enabled", lambda: False)
        expected = kernel.merge(base, agents, out_dtype=F32)
    monkeypatch.setattr(compiled, "enabled", lambda: True)
    merged = kernel.merge(base, agents, out_dtype=F32)
    torch.testing.assert_close(merged, expected, rtol=2**-22, atol=2**-29)
    plain = kernel.merge(base, [kernel.Agent(a.tensor) for a in agents], out_dtype=F32)
    assert (merged != plain).float().mean() > 0.2  # unique updates, all rescaled

    base[-1] = float("inf")
    with pytest.raises(kernel.NonFiniteError) as refused:
        kernel.merge(base, agents)
    assert refused.value.counts == (1, *(0,) * len(agents))


@pytest.fixture
def one_kind():
    # Not by monkeypatch, which hides the setting when it takes it back.
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


@needs_compiler
def test_any_number_of_kinds_of_merges_can_be_compiled(one_kind, monkeypatch):
    monkeypatch.setattr(compiled, "enabled", lambda: True)
    base = torch.arange(40.0)
    for number in (1, 2, 3):
        agents = [kernel.Agent(base + 0.5)] * number
        assert torch.equal(kernel.merge(base, agents), base + 0.5)


@pytest.mark.parametrize("value", ["", "0"])
def test_compiling_has_to_be_asked_for(value, monkeypatch):
    monkeypatch.setenv("MERGEKIT_RAM_COMPILE", value)
    assert not compiled.enabled.__wrapped__()


def test_without_a_compiler_a_warning_is_given_and_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("MERGEKIT_RAM_COMPILE", "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    with pytest.warns(RuntimeWarning, match="C\\+\\+ compiler"):
        assert not compiled.enabled.__wrapped__()
