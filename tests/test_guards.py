"""What is not finite, many agents, and arguments that no merge can use: alike in counting and
merging, on every path.
"""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys

import checkpoints
import numpy as np
import oracle
import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import merge_state_dicts
from mergekit.scripts import run_yaml

from mergekit_ram import cli
from mergekit_ram.errors import (
    NonFiniteError,
    OutputOverflowError,
    OverflowedWeightsError,
)
from mergekit_ram.method import compiled, magnitude
from mergekit_ram.method import stream as kernel
from mergekit_ram.method.overlap import OverlapCounts, overlap_ratio, rescaling_factor
from mergekit_ram.method.rule import Agent, Rule
from mergekit_ram.method.stream import count, merge, merge_and_count
from mergekit_ram.report.record import MergeRecord

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INFINITY = math.inf
NAN = math.nan

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


def agents_of(tensors, **of_the_last) -> list[Agent]:
    *others, last = tensors
    return [*map(Agent, others), Agent(last, **of_the_last)]


def random_tensors(agents, elements, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(elements, generator=generator)
    changes = torch.randn(agents, elements, generator=generator)
    changed = torch.rand(agents, elements, generator=generator) < 0.3
    return base.to(dtype), (base + changes * changed).to(dtype)


@pytest.mark.parametrize("compiling", [False, True])
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


@pytest.mark.parametrize("compiling", [False, True])
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


@pytest.mark.parametrize("compiling", [False, True])
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


# --- Whole merges ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def forget_compiling():
    yield
    compiled.enabled.cache_clear()


@pytest.fixture(autouse=True)
def forget_loaders():
    yield
    LoaderCache().loaders.clear()


def save_models(directory, agents, dtype=F32, spoil=None):
    config, base = checkpoints.make_base("qwen2")
    models = [base, *(checkpoints.change(base, seed) for seed in range(agents))]
    models = [checkpoints.cast(weights, dtype) for weights in models]
    if spoil:
        spoil(*models)
    return [
        checkpoints.save(directory / f"model{i}", config, weights)
        for i, weights in enumerate(models)
    ]


def run_merge(directory, paths, method, *options, **entries):
    base, *agents = paths
    recipe = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": agent} for agent in agents],
        **entries,
    }
    file = directory / "recipe.yml"
    file.write_text(yaml.safe_dump(recipe))
    arguments = [str(file), str(directory / "merged"), *options]
    return CliRunner().invoke(run_yaml.main, arguments)


@pytest.mark.parametrize("method", ["ram", "ramplus", "ramplus_tl"])
def test_a_recipe_that_overflows_stops_or_warns_once(method, tmp_path, caplog):
    def spoil(base, agent, other):
        base["model.norm.weight"][:2] = other["model.norm.weight"][:2] = 40_000
        agent["model.norm.weight"][:2] = 60_000

    paths = save_models(tmp_path, 2, F16, spoil)
    settings = {"lambda": 2.0}
    result = run_merge(tmp_path, paths, method, parameters=settings)
    assert result.exit_code == 1
    assert "2 elements of model.norm.weight overflow float16" in result.output
    assert not (tmp_path / "merged").exists()

    settings["non_finite"] = "ignore"
    caplog.clear()
    result = run_merge(tmp_path, paths, method, parameters=settings)
    assert result.exit_code == 0, result.output
    told = [r.message for r in caplog.records if "not finite" in r.message]
    assert len(told) == 1
    assert told[0].startswith("2 elements of model.norm.weight are not finite")
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    assert told[0] in report["warnings"]
    merged = checkpoints.read(tmp_path / "merged")["model.norm.weight"]
    assert (~merged.isfinite()).nonzero().flatten().tolist() == [0, 1]


def overflowing_tensors():
    base = {f"t{i}": torch.full((3,), 4e4, dtype=F16) for i in range(3)}
    agent = {name: tensor.clone() for name, tensor in base.items()}
    for name in ("t0", "t2"):
        agent[name][:2] = 6e4
    return base, agent


@pytest.mark.parametrize("method", ["ram", "ramplus", "ramplus_tl"])
def test_state_dicts_that_overflow_are_refused_or_warned_of_once(method, caplog):
    models = dict(enumerate(overflowing_tensors()))
    parameters = {"lambda": 2.0}
    with pytest.raises(OverflowedWeightsError, match=r"2 elements of t0.*float16"):
        merge_state_dicts(models, method, base=0, parameters=parameters)
    parameters["non_finite"] = "ignore"
    merge_state_dicts(models, method, base=0, parameters=parameters)
    (told,) = [r.message for r in caplog.records if "not finite" in r.message]
    assert told.startswith("4 elements of t0 and 1 more are not finite")


def test_a_record_that_nobody_reports_tells_of_the_first_overflow(caplog):
    silent, unread = (
        MergeRecord(method="ram", base_model=None, recipe={}, agents=[]) for _ in range(2)
    )
    silent.reported = True
    for record in (silent, unread):
        record.add_overflow("a", 3)
        record.add_overflow("b", 4)
        assert record.overflows == {"a": 3, "b": 4}
    (told,) = [r.message for r in caplog.records]
    assert told.startswith("3 elements of a are not finite")


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_forty_agents_can_be_looked_at(command, tmp_path):
    base, *agents = save_models(tmp_path, 40)
    recipe = {
        "merge_method": "ramplus",
        "base_model": base,
        "models": [{"model": agent} for agent in agents],
    }
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    arguments = [
        command,
        str(tmp_path / "recipe.yml"),
        "--json",
        str(tmp_path / "found"),
    ]
    if command == "compare":
        arguments += ["--methods", "ram"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found").read_text())
    of_agents = found["methods"][0] if command == "compare" else found
    assert len(of_agents["agents"]) == 40


@pytest.mark.parametrize("method", ["ram", "ramplus", "ramplus_tl"])
def test_forty_agents_merge_and_are_reported(method, tmp_path):
    paths = save_models(tmp_path, 40)
    result = run_merge(tmp_path, paths, method)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    weights = [checkpoints.read(path) for path in paths]
    base, *agents = weights
    for agent, found in zip(agents, report["agents"], strict=True):
        changed = sum(
            int(((agent[n].double() - base[n].double()).abs() > 1e-5).sum()) for n in base
        )
        assert found["changed"] == changed
        assert sum(found["overlap_histogram"]) == changed
