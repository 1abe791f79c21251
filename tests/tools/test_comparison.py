"""``mergekit-ram compare``: what each method keeps, against models merged by mergekit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mergekit.merge_methods import merge_tensors

from mergekit_ram.method import retention
from mergekit_ram.tools.comparison import DEFAULT_METHODS as METHODS
from support import checkpoints, oracle
from support.checkpoints import Weights
from support.commands import merge, merge_raw
from support.expected import floating, layer_of
from support.recipes import TOKENS, Models, new_models, raw_recipe, slice_recipe, state_dicts
from support.tensors import BF16, F32, F64, array
from support.tools import MEASURES, compare, run, words

# What compare gives the methods that need it.
ASSUMED = {
    "ties": {"weight": 1.0, "density": 0.5},
    "dare_ties": {"weight": 1.0, "density": 0.5},
    "task_arithmetic": {"weight": 1.0},
    "linear": {"weight": 1.0},
}


def concatenated(weights: Weights, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([array(weights[name]).ravel() for name in names])


def expect(
    base: np.ndarray, agents: Sequence[np.ndarray], merged: np.ndarray, epsilon=1e-5
) -> list[dict]:
    """The measures of every agent, from whole models as float64 vectors."""
    delta = merged - base
    taus = [agent - base for agent in agents]
    changed = [np.abs(tau) > epsilon for tau in taus]
    changers = sum(mask.astype(int) for mask in changed)

    def coefficient(tau, mask):
        if not mask.any():
            return None
        # Least squares of delta = c · tau, by numpy.
        return np.linalg.lstsq(tau[mask, None], delta[mask], rcond=None)[0].item()

    return [
        {
            "unique_retention": coefficient(tau, mask & (changers == 1)),
            "shared_retention": coefficient(tau, mask & (changers > 1)),
            "cosine": delta @ tau / np.linalg.norm(delta) / np.linalg.norm(tau),
            "sign_agreement": np.mean(np.sign(delta[mask]) == np.sign(tau[mask])),
            "norm_ratio": np.linalg.norm(delta) / np.linalg.norm(tau),
        }
        for tau, mask in zip(taus, changed)
    ]


def check(found, base, agents, merged, epsilon=1e-5) -> None:
    """Check one method's part of a comparison."""
    expected = expect(base, agents, merged, epsilon)
    for agent, measures in zip(found.agents, expected, strict=True):
        for name in MEASURES:
            assert getattr(agent, name) == pytest.approx(measures[name], rel=2e-4, abs=2e-5), name
    delta = merged - base
    assert found.delta_norm == pytest.approx(np.linalg.norm(delta), rel=1e-5)
    assert found.changed == (np.abs(delta) > epsilon).sum()


@pytest.mark.parametrize("method", [m for m in METHODS if m != "dare_ties"])
def test_method_keeps_what_its_model_on_disk_keeps(method, compared, models, tmp_path):
    parameters = ASSUMED.get(method, {"r": 1.0} if method == "ramplus" else {})
    recipe = models.recipe(method, parameters=parameters)
    if method == "linear":
        del recipe["base_model"]
    names = list(models.base)
    base, *agents = [concatenated(w, names) for w in (models.base, *models.agents)]
    merged = concatenated(merge(recipe, tmp_path), names)
    (found,) = [m for m in compared.methods if m.method == method]
    check(found, base, agents, merged)


def test_random_method_is_mergekits_own_by_the_seed_and_the_tensors_name(models, tmp_path):
    options = ("--methods", "ram,dare_ties", "--random-seed", "7")
    found = compare(models.recipe("ram"), tmp_path, *options)
    assert found.seed == 7
    names = list(models.base)
    merged = {}
    for name in names:
        torch.manual_seed(7 + zlib.crc32(name.encode()))
        tensors = [weights[name] for weights in (models.base, *models.agents)]
        parameters = {"weight": 1.0, "density": 0.5}
        merged[name] = merge_tensors(tensors, "dare_ties", base_index=0, parameters=parameters)
    base, *agents = [concatenated(w, names) for w in (models.base, *models.agents)]
    check(found.methods[1], base, agents, concatenated(merged, names))
    again = compare(models.recipe("ram"), tmp_path, *options)
    assert again.methods[1].agents == found.methods[1].agents
    other = compare(models.recipe("ram"), tmp_path, "--methods", "dare_ties")
    assert other.methods[0].agents != found.methods[1].agents


def test_random_choices_of_the_caller_are_left_alone(models, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    compare(models.recipe("ram"), tmp_path, "--methods", "dare_ties")
    assert torch.equal(torch.rand(4), expected)


def test_ram_keeps_unique_updates_whole_and_averaging_divides_them(compared):
    by_name = {method.method: method for method in compared.methods}
    for agent in by_name["ram"].agents:
        assert agent.unique_retention == pytest.approx(1, abs=1e-5)
    for agent in by_name["linear"].agents:
        assert agent.unique_retention == pytest.approx(1 / 3, abs=1e-5)
    for agent in by_name["ramplus"].agents:
        assert agent.unique_retention == pytest.approx(1.2, abs=1e-3)


@settings(max_examples=80, deadline=None)
@given(
    agents=st.integers(1, 4),
    merged=st.integers(1, 3),
    shape=st.sampled_from([(), (0,), (1,), (40,), (7, 5), (2, 3, 4)]),
    dtype=st.sampled_from([F32, F64, BF16]),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    block=st.sampled_from([4, 16, 1 << 15]),
    seed=st.integers(0, 1 << 16),
)
def test_retention_of_any_tensors_is_the_oracles(
    agents, merged, shape, dtype, density, block, seed
):
    generator = torch.Generator().manual_seed(seed)

    def change(base):
        update = torch.randn(shape, generator=generator) * 0.1
        return base + update * (torch.rand(shape, generator=generator) < density)

    base = torch.randn(shape, generator=generator)
    tensors = [change(base).to(dtype) for _ in range(agents + merged)]
    base = base.to(dtype)
    taken, results = tensors[:agents], tensors[agents:]
    found = retention.retained(base, taken, results, 0.01, block_elements=block)
    vectors = [array(tensor).ravel() for tensor in (base, *taken)]
    for kept, result in zip(found, results, strict=True):
        delta = array(result).ravel() - vectors[0]
        assert kept.delta_square == pytest.approx(delta @ delta, rel=1e-4)
        assert kept.changed == (np.abs(delta) > 0.01).sum()
        taus = [vector - vectors[0] for vector in vectors[1:]]
        masks = [np.abs(tau) > 0.01 for tau in taus]
        changers = sum(mask.astype(int) for mask in masks)
        for agent, tau, mask in zip(kept.agents, taus, masks, strict=True):
            alone = mask & (changers == 1)
            size = np.abs(delta) @ np.abs(tau) + 1e-12
            assert agent.changed == mask.sum()
            assert agent.unique == alone.sum()
            agreeing = mask & (np.sign(delta) == np.sign(tau))
            assert agent.agreeing == agreeing.sum()
            assert agent.dot == pytest.approx(delta @ tau, abs=1e-5 * size)
            for value, where in (
                (agent.changed_dot, mask),
                (agent.unique_dot, alone),
            ):
                assert value == pytest.approx(delta[where] @ tau[where], abs=1e-5 * size)
            for value, where in (
                (agent.square, slice(None)),
                (agent.changed_square, mask),
                (agent.unique_square, alone),
            ):
                assert value == pytest.approx(tau[where] @ tau[where], rel=1e-4)


def test_tensors_wait_for_each_other_only_up_to_a_size(models, tmp_path, monkeypatch):
    expected = compare(models.recipe("ram"), tmp_path)
    monkeypatch.setattr("mergekit_ram.tools.comparison._WAITING_BYTES", 0)
    found = compare(models.recipe("ram"), tmp_path)
    for one, other in zip(found.methods, expected.methods, strict=True):
        for agent, same in zip(one.agents, other.agents):
            for name in MEASURES:
                assert getattr(agent, name) == pytest.approx(getattr(same, name), rel=1e-5)


# --- Parameters and recipe forms ------------------------------------------------------------------


def test_recipes_parameters_are_taken_and_missing_ones_are_told(models, tmp_path):
    recipe = models.recipe(
        "ram",
        parameters={"lambda": 0.5, "epsilon": 0.001},
        agents=[{"weight": 2.0}, {"weight": [{"filter": "mlp", "value": 3.0}]}],
    )
    found = compare(recipe, tmp_path, "--methods", "ram,ties,task_arithmetic,della")
    ram, ties, arithmetic, della = found.methods
    assert ram.parameters["epsilon"] == 0.001
    assert found.epsilon == (0.001, 0.001)
    # To DELLA, epsilon is another thing.
    assert della.parameters["epsilon"] == 0.15
    weights = dict(zip(models.agent_paths, (2.0, [1.0, 3.0], 1.0)))
    assert arithmetic.parameters["weight"] == weights
    assert arithmetic.parameters["lambda"] == 0.5
    assert ties.assumed == {"density": 0.5}
    assert ram.assumed == {}

    def settings_of(name):
        return {"weight": [2.0, 3.0 if "mlp" in name else 1.0, 1.0], "lambda": 0.5}

    merged = {
        name: merge_tensors(
            [weights[name] for weights in (models.base, *models.agents)],
            "task_arithmetic",
            base_index=0,
            parameters=settings_of(name),
        )
        for name in models.base
    }
    names = list(models.base)
    base, *agents = [concatenated(w, names) for w in (models.base, *models.agents)]
    check(arithmetic, base, agents, concatenated(merged, names), 0.001)
    text = words(run("compare", recipe, tmp_path, "--methods", "ties,ram").output)
    assert "ties lambda 0.5, weight 2/1–3/1, density 0.5+" in text


def test_filters_without_a_last_value_get_the_assumed_one(models, tmp_path):
    weight = [{"filter": "mlp", "value": 0.5}]
    recipe = models.recipe("ram", parameters={"weight": weight})
    found = compare(recipe, tmp_path, "--methods", "task_arithmetic")
    assert found.methods[0].parameters["weight"] == [0.5, 1.0]


@pytest.mark.parametrize(("dtype", "out_dtype"), [("bfloat16", None), ("float32", "bfloat16")])
def test_what_would_be_saved_is_measured(dtype, out_dtype, models, tmp_path):
    settings = {"dtype": dtype, "out_dtype": out_dtype}
    names = list(models.base)
    loaded = checkpoints.cast(models.base, getattr(torch, dtype))
    agents = [checkpoints.cast(agent, getattr(torch, dtype)) for agent in models.agents]
    recipe = models.recipe("task_arithmetic", parameters={"weight": 1.0}, **settings)
    found = compare(recipe, tmp_path, "--methods", "ramplus,task_arithmetic")
    vectors = [concatenated(weights, names) for weights in (loaded, *agents)]
    for method in found.methods:
        parameters = method.assumed or ({} if method.method == "ramplus" else {"weight": 1.0})
        again = models.recipe(method.method, parameters=parameters, **settings)
        directory = tmp_path / method.method
        directory.mkdir()
        merged = concatenated(merge(again, directory), names)
        check(method, vectors[0], vectors[1:], merged)


def test_slices_are_compared_over_what_they_merge(models, tmp_path):
    places = [((0, 1), (0, 1)), ((1, 3), (1, 2))]
    recipe = models.recipe("ramplus")
    slice_recipe(recipe, models, places)
    found = compare(recipe, tmp_path, "--methods", "ram,linear,task_arithmetic")
    members = {None: (0, 1), 0: (0, 1), 1: (1, 2), 2: (1, 2)}

    def present(name: str) -> tuple[int, ...]:
        return (1, 2) if name == "model.norm.weight" else members[layer_of(name)]

    def vector(agent: int) -> np.ndarray:
        return np.concatenate(
            [
                array((models.agents[agent] if agent in present(n) else models.base)[n]).ravel()
                for n in models.base
            ]
        )

    base = concatenated(models.base, list(models.base))
    agents = [vector(i) for i in range(3)]
    summed = sum(agent - base for agent in agents)
    ram, linear, arithmetic = found.methods
    check(ram, base, agents, oracle.ram(base, agents).value)
    check(arithmetic, base, agents, base + summed)
    # Every tensor has two of the agents.
    check(linear, base, agents, base + summed / 2)


def test_vocabularies_are_aligned_before_merging(tmp_path):
    config, base = checkpoints.make_base("qwen2", tied=False)
    agents = [checkpoints.change(base, seed) for seed in (1, 2)]
    order = [0, *range(47, 0, -1)]
    stored = dict(agents[0])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = stored[name][order]
    paths = [
        checkpoints.save(tmp_path / name, config, weights, tokens=tokens)
        for name, weights, tokens in (
            ("base", base, TOKENS),
            ("shuffled", stored, [TOKENS[i] for i in order]),
            ("same", agents[1], TOKENS),
        )
    ]
    models = Models(config, base, agents, paths[0], paths[1:])
    recipe = models.recipe("ramplus", tokenizer_source="base")
    found = compare(recipe, tmp_path, "--methods", "ram,linear")
    names = list(base)
    start, *vectors = [concatenated(w, names) for w in (base, *agents)]
    check(found.methods[0], start, vectors, oracle.ram(start, vectors).value)
    check(found.methods[1], start, vectors, sum(vectors) / 2)


def test_modules_are_compared(tmp_path):
    models = new_models(tmp_path / "models", "t5")
    found = compare(models.recipe("ram"), tmp_path)
    names = list(models.base)
    base, *agents = [concatenated(w, names) for w in (models.base, *models.agents)]
    check(found.methods[0], base, agents, oracle.ram(base, agents).value)
    assert found.total == base.size


def test_state_dicts_of_mergekit_pytorch_are_compared(models, tmp_path):
    base, agents = state_dicts(models)
    recipe = raw_recipe(tmp_path, base, agents, "ramplus")
    recipe |= {"dtype": "bfloat16", "out_dtype": "float32"}
    found = compare(recipe, tmp_path, "--methods", "ramplus,ties,linear")
    names = list(floating(base))
    loaded = [checkpoints.cast(weights, BF16) for weights in (base, *agents)]
    vectors = [concatenated(weights, names) for weights in loaded]
    for method in found.methods[:2]:
        given = dict(method.assumed)
        again = {**recipe, "merge_method": method.method, "parameters": given}
        directory = tmp_path / method.method
        directory.mkdir()
        merged = concatenated(merge_raw(again, directory), names)
        check(method, vectors[0], vectors[1:], merged)


def test_base_among_the_models_is_no_agent(models, tmp_path):
    recipe = models.recipe("ram")
    recipe["models"].insert(0, {"model": models.base_path})
    found = compare(recipe, tmp_path, "--methods", "ram,linear")
    assert [agent.model for agent in found.methods[1].agents] == models.agent_paths
    for agent in found.methods[1].agents:
        assert agent.unique_retention == pytest.approx(1 / 3, abs=1e-5)


def test_agent_without_unique_or_changed_elements_has_no_retention(models, tmp_path):
    paths = [
        checkpoints.save(tmp_path / name, models.config, models.agents[0])
        for name in ("one", "other")
    ]
    paths.append(checkpoints.save(tmp_path / "none", models.config, models.base))
    recipe = models.recipe("ram")
    recipe["models"] = [{"model": path} for path in paths]
    found = compare(recipe, tmp_path)
    one, _, none = found.methods[0].agents
    assert one.unique_retention is None
    assert one.shared_retention == pytest.approx(1)
    assert none.cosine is None and none.sign_agreement is None
    text = run("compare", recipe, tmp_path).output
    assert "nan" not in text
