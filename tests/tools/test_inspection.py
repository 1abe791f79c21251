"""``mergekit-ram inspect`` counts what the float64 oracle counts."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mergekit_ram import cli
from mergekit_ram.method import magnitude
from mergekit_ram.method import stream as kernel
from mergekit_ram.report.findings import Inspection
from support import ROOT, checkpoints, oracle
from support.checkpoints import Weights
from support.expected import floating, layer_of
from support.recipes import (
    EXAMPLES,
    TOKENS,
    Models,
    new_models,
    raw_recipe,
    slice_recipe,
    state_dicts,
)
from support.tensors import BF16, F32, F64, array
from support.tools import count_by_oracle, inspect, run


def check_counts(found: Inspection, expected: oracle.Overlap) -> None:
    assert [agent.changed for agent in found.agents] == expected.changed.tolist()
    assert [agent.unique for agent in found.agents] == expected.unique.tolist()
    assert [agent.shared for agent in found.agents] == expected.shared.tolist()
    histogram = [agent.overlap_histogram for agent in found.agents]
    assert histogram == expected.histogram.tolist()
    assert found.pairwise_shared == expected.pairwise.tolist()
    assert found.pairwise_conflicts == expected.pairwise_conflicts.tolist()
    assert found.sign_conflicts == expected.sign_conflicts


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("ram", {}),
        ("ramplus", {"r": 0.5}),
        ("ramplus_tl", {"alpha": 0.1}),
        ("ties", {"weight": 0.3, "density": 0.5}),
        ("dare_ties", {"weight": 1.0, "density": 0.2, "int8_mask": True}),
        ("della", {"weight": 1.0, "density": 0.5, "epsilon": 0.2}),
        ("task_arithmetic", {"weight": 1.0}),
        ("linear", {"weight": 1.0}),
    ],
)
def test_recipe_of_any_method_is_counted_as_the_oracle_counts(method, parameters, models, tmp_path):
    found = inspect(models.recipe(method, parameters=parameters), tmp_path)
    expected = count_by_oracle(models.base, models.agents)
    check_counts(found, expected)
    assert found.method == method
    assert found.total == expected.total
    assert [agent.model for agent in found.agents] == models.agent_paths
    rescaling = {n: parameters[n] for n in ("r", "alpha") if n in parameters}
    factors = oracle.rescaling(expected, **rescaling)
    assert [agent.lambda_ for agent in found.agents] == pytest.approx(factors)
    ratios = expected.shared / expected.unique
    assert [agent.rho for agent in found.agents] == pytest.approx(ratios.tolist())


def test_layers_and_module_types_are_counted_apart(models, tmp_path):
    found = inspect(models.recipe("ram"), tmp_path)
    layers = {part.name: part for part in found.layers}
    for number in range(3):
        inside = {n: t for n, t in models.base.items() if layer_of(n) == number}
        expected = count_by_oracle(inside, models.agents)
        part = layers[f"model.layers.{number}"]
        assert part.changed == expected.changed.tolist()
        assert part.sign_conflicts == expected.sign_conflicts
    (part,) = [part for part in found.module_types if part.name == "mlp.up_proj"]
    inside = {n: t for n, t in models.base.items() if "mlp.up_proj" in n}
    assert part.shared == count_by_oracle(inside, models.agents).shared.tolist()
    for parts in (found.layers, found.module_types):
        assert sum(part.total for part in parts) == found.total


def test_options_take_the_place_of_the_recipes_parameters(models, tmp_path):
    recipe = models.recipe(
        "ramplus",
        parameters={"epsilon": 1e-5, "r": 0.1},
        agents=[{"weight": 2.0}],
    )
    options = ("--epsilon", "0.02", "--r", "2", "--alpha", "0.5")
    found = inspect(recipe, tmp_path, *options)
    expected = count_by_oracle(models.base, models.agents, lambda name: 0.02)
    check_counts(found, expected)
    assert found.epsilon == (0.02, 0.02)
    factors = oracle.rescaling(expected, r=2, alpha=0.5)
    assert [agent.lambda_ for agent in found.agents] == pytest.approx(factors)


def test_sweep_and_histogram_equal_the_oracle_at_every_threshold(models, tmp_path):
    found = inspect(models.recipe("ram"), tmp_path)
    assert found.magnitudes.sampled_fraction == 1
    assert [point.epsilon for point in found.epsilon_sweep] == list(magnitude.SWEEP)
    for point in found.epsilon_sweep:
        expected = count_by_oracle(models.base, models.agents, lambda _, e=point.epsilon: e)
        assert point.changed == expected.changed.tolist()
        assert point.unique == expected.unique.tolist()
        assert point.shared == expected.shared.tolist()
    bounds = [0, *found.magnitudes.edges, np.inf]
    for agent, counts in zip(models.agents, found.magnitudes.counts):
        sizes = np.concatenate(
            [np.abs(array(agent[n]) - array(models.base[n])).ravel() for n in agent]
        )
        # Bins are open below and closed above.
        expected = [
            int(((low < sizes) & (sizes <= high)).sum()) for low, high in zip(bounds, bounds[1:])
        ]
        assert counts == expected


def test_sweep_holds_the_exact_counts_at_an_epsilon_of_its_own(models, tmp_path):
    found = inspect(models.recipe("ram", parameters={"epsilon": 7e-3}), tmp_path)
    (point,) = [point for point in found.epsilon_sweep if point.epsilon == 7e-3]
    assert point.changed == [agent.changed for agent in found.agents]
    assert point.shared == [agent.shared for agent in found.agents]


@settings(max_examples=60, deadline=None)
@given(
    agents=st.integers(1, 5),
    exponents=st.lists(st.integers(-9, 1), min_size=1, max_size=40),
    seed=st.integers(0, 1 << 16),
    dtype=st.sampled_from([F32, F64, BF16]),
    block=st.sampled_from([3, 16]),
)
def test_magnitudes_are_strict_at_every_boundary(agents, exponents, seed, dtype, block):
    """Differences that lie on a threshold, or one step of the dtype beside it."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.tensor([float(f"{10.0**e:g}") for e in exponents], dtype=F64)

    def agent():
        exact = edges.to(dtype)
        steps = torch.randint(-1, 2, exact.shape, generator=generator)
        up = torch.nextafter(exact, torch.full_like(exact, 9.0))
        down = torch.nextafter(exact, torch.zeros_like(exact))
        near = torch.where(steps > 0, up, torch.where(steps < 0, down, exact))
        kept = torch.rand(exact.shape, generator=generator) < 0.7
        sign = torch.randint(0, 2, exact.shape, generator=generator) * 2 - 1
        return near * kept * sign.to(dtype)

    tensors = [agent() for _ in range(agents)]
    base = torch.zeros(edges.shape, dtype=dtype)
    found = magnitude.magnitudes(
        base,
        [kernel.Agent(tensor) for tensor in tensors],
        kernel.Rule(),
        block_elements=block,
    )
    arrays = [array(tensor) for tensor in tensors]
    for k, threshold in enumerate((0.0, *magnitude.EDGES)):
        expected = oracle.overlap(array(base), arrays, epsilon=threshold)
        assert found.changed[:, k].tolist() == expected.changed.tolist()
    for k, threshold in enumerate(magnitude.SWEEP):
        expected = oracle.overlap(array(base), arrays, epsilon=threshold)
        assert found.shared[:, k].tolist() == expected.shared.tolist()
    assert found.sampled == found.total == len(exponents)


def test_sample_of_a_large_tensor_is_spread_evenly_and_scaled_up():
    """The first half of the tensor is changed, so a sample from one end would be far off."""
    base = torch.zeros(1 << 18)
    agent = base.clone()
    agent[: 1 << 17] = 0.01
    found = magnitude.magnitudes(base, [kernel.Agent(agent)], kernel.Rule(), every=8)
    assert found.sampled == found.total / 8
    at = magnitude.EDGES.index(1e-3) + 1
    assert found.changed[0, at].item() == pytest.approx(1 << 17, rel=0.01)


def test_exact_option_measures_all_of_a_large_tensor(tmp_path):
    sizes = {"vocab_size": 8192, "hidden_size": 32, "tied": True}
    models = new_models(tmp_path / "models", "qwen2", **sizes)
    sampled = inspect(models.recipe("ram"), tmp_path)
    assert 0.1 < sampled.magnitudes.sampled_fraction < 0.5
    check_counts(sampled, count_by_oracle(models.base, models.agents))
    exact = inspect(models.recipe("ram"), tmp_path, "--exact")
    assert exact.magnitudes.sampled_fraction == 1
    for one, other in zip(sampled.epsilon_sweep, exact.epsilon_sweep):
        expected = count_by_oracle(models.base, models.agents, lambda _, e=one.epsilon: e)
        assert other.changed == expected.changed.tolist()
        assert one.changed == pytest.approx(other.changed, rel=0.1)
    text = run("inspect", models.recipe("ram"), tmp_path).output
    assert "of them sampled" in text


# --- Recipe forms ---------------------------------------------------------------------------------


def test_slices_count_each_agent_where_it_is_merged(models, tmp_path):
    places = [((0, 1), (0, 1)), ((1, 3), (1, 2))]
    recipe = models.recipe("ties", parameters={"weight": 1.0})
    slice_recipe(recipe, models, places)
    # Before the layers the first slice counts, after them the last one.
    members = {None: (0, 1), 0: (0, 1), 1: (1, 2), 2: (1, 2)}

    def present(i: int) -> Weights:
        return {
            name: tensor
            for name, tensor in models.agents[i].items()
            if i in (members[layer_of(name)] if name != "model.norm.weight" else (1, 2))
        }

    found = inspect(recipe, tmp_path)
    agents = [present(i) for i in range(3)]
    check_counts(found, count_by_oracle(models.base, agents))
    totals = [sum(t.numel() for t in agent.values()) for agent in agents]
    assert [agent.total for agent in found.agents] == totals


def test_modules_of_an_encoder_and_a_decoder_are_inspected(tmp_path):
    models = new_models(tmp_path / "models", "t5")
    recipe = models.recipe("dare_ties", parameters={"weight": 1.0})
    del recipe["models"]
    first, second, third = models.agent_paths

    def of(*paths):
        return {"models": [{"model": path} for path in paths]}

    recipe["modules"] = {
        "encoder": of(first, third),
        "decoder": of(first, second),
        "shared": of(second, third),
    }
    present = {"encoder": (0, 2), "decoder": (0, 1), "shared": (1, 2)}
    agents = [
        {n: t for n, t in agent.items() if i in present[n.split(".")[0]]}
        for i, agent in enumerate(models.agents)
    ]
    found = inspect(recipe, tmp_path)
    order = [found.agents[i].model for i in range(3)]
    agents = [agents[models.agent_paths.index(path)] for path in order]
    check_counts(found, count_by_oracle(models.base, agents))


def test_vocabularies_are_aligned_before_counting(tmp_path):
    config, base = checkpoints.make_base("qwen2", tied=False)
    agents = [checkpoints.change(base, seed) for seed in (1, 2)]
    order = [0, *range(47, 0, -1)]
    stored = dict(agents[0])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = stored[name][order]
    shuffled = [TOKENS[i] for i in order]
    paths = [
        checkpoints.save(tmp_path / name, config, weights, tokens=tokens)
        for name, weights, tokens in (
            ("base", base, TOKENS),
            ("shuffled", stored, shuffled),
            ("same", agents[1], TOKENS),
        )
    ]
    models = Models(config, base, agents, paths[0], paths[1:])
    recipe = models.recipe("ramplus", tokenizer_source="base")
    check_counts(inspect(recipe, tmp_path), count_by_oracle(base, agents))


def test_epsilon_by_filter_counts_each_tensor_with_its_own(models, tmp_path):
    epsilon = [{"filter": "mlp", "value": 0.02}, {"value": 1e-5}]
    found = inspect(models.recipe("ram", parameters={"epsilon": epsilon}), tmp_path)
    own = count_by_oracle(models.base, models.agents, lambda n: 0.02 if "mlp" in n else 1e-5)
    check_counts(found, own)
    assert found.epsilon == (1e-5, 0.02)


def test_weights_without_normalization_count_as_they_merge(models, tmp_path):
    weight = (0.5, 1.0, 0.25)
    recipe = models.recipe(
        "ram",
        parameters={"normalize": False, "epsilon": 0.01},
        agents=[{"weight": w} for w in weight],
    )
    found = inspect(recipe, tmp_path)
    counts = [
        oracle.overlap(
            array(tensor),
            [array(agent[name]) for agent in models.agents],
            epsilon=0.01,
            weight=weight,
            normalize=False,
        )
        for name, tensor in models.base.items()
    ]
    assert [a.changed for a in found.agents] == sum(c.changed for c in counts).tolist()
    (point,) = [point for point in found.epsilon_sweep if point.epsilon == 1e-3]
    assert all(c > 0 for c in point.changed)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("method", ["ramplus", "ties"])
def test_state_dicts_of_mergekit_pytorch_are_inspected(suffix, method, models, tmp_path):
    base, agents = state_dicts(models)
    parameters = {"weight": 1.0} if method == "ties" else {}
    recipe = raw_recipe(tmp_path, base, agents, method, suffix, **parameters)
    check_counts(inspect(recipe, tmp_path), count_by_oracle(floating(base), agents))


def test_tensor_union_and_intersection_are_taken_as_mergekit_pytorch_takes_them(models, tmp_path):
    base, agents = floating(models.base), [dict(agent) for agent in models.agents]
    del agents[0]["model.norm.weight"]
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    result = run("inspect", recipe, tmp_path)
    assert result.exit_code == 1
    assert "1 tensor missing: model.norm.weight" in result.output
    found = inspect(recipe, tmp_path, "--tensor-union")
    check_counts(found, count_by_oracle(base, agents))
    found = inspect(recipe, tmp_path, "--tensor-intersection")
    del base["model.norm.weight"]
    check_counts(found, count_by_oracle(base, agents))


@pytest.mark.slow
def test_examples_of_the_project_can_be_inspected(tmp_path, monkeypatch):
    script = ROOT / "example_yamls" / "make_agents.py"
    subprocess.run(
        [sys.executable, script, "agents"], cwd=tmp_path, check=True, capture_output=True
    )
    monkeypatch.chdir(tmp_path)
    for file in EXAMPLES:
        result = CliRunner().invoke(cli.main, ["inspect", str(file), "--quiet"])
        assert result.exit_code == 0, f"{file}: {result.output}"
