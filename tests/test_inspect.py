"""``mergekit-ram inspect`` on whole recipes, against counts that the float64 oracle takes from the
same checkpoints.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

import checkpoints
import numpy as np
import oracle
import pytest
import torch
from checkpoints import Weights
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from mergekit.io.tasks import LoaderCache
from mergekit.scripts.merge_raw_pytorch import SimpleLoaderCache
from test_recipes import (
    TOKENS,
    Models,
    array,
    floating,
    layer_of,
    raw_recipe,
    save_models,
    slice_recipe,
    state_dicts,
    write_recipe,
)

from mergekit_ram import cli
from mergekit_ram.method import magnitude
from mergekit_ram.method import stream as kernel
from mergekit_ram.report.findings import Inspection, percent, power, short_names

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def forget_loaders():
    yield
    LoaderCache().loaders.clear()
    SimpleLoaderCache().loaders.clear()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return make_models(tmp_path_factory.mktemp("qwen2"), "qwen2")


def make_models(directory, architecture: str, **options) -> Models:
    config, base = checkpoints.make_base(architecture, **options)
    agents = [checkpoints.change(base, i, fraction=0.1 * (1 + i)) for i in (1, 2, 3)]
    return save_models(directory, config, base, agents)


def run(command: str, recipe: Mapping, directory, *options: str) -> Result:
    file = write_recipe(recipe, directory)
    return CliRunner().invoke(cli.main, [command, str(file), "--quiet", *options])


def inspect(recipe: Mapping, directory, *options: str) -> Inspection:
    """Run the command; what it wrote as JSON."""
    path = directory / "found.json"
    result = run("inspect", recipe, directory, "--json", str(path), *options)
    assert result.exit_code == 0, result.output
    return Inspection.model_validate_json(path.read_text())


def expect(base: Weights, agents: Sequence[Weights], epsilon=lambda name: 1e-5) -> oracle.Overlap:
    """Counts over all tensors. An agent without a tensor left it as it is."""
    counts = [
        oracle.overlap(
            array(tensor),
            [array(agent.get(name, tensor)) for agent in agents],
            epsilon=epsilon(name),
        )
        for name, tensor in base.items()
    ]
    total = counts[0]
    for other in counts[1:]:
        total = total + other
    return total


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
    expected = expect(models.base, models.agents)
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
        expected = expect(inside, models.agents)
        part = layers[f"model.layers.{number}"]
        assert part.changed == expected.changed.tolist()
        assert part.sign_conflicts == expected.sign_conflicts
    (part,) = [part for part in found.module_types if part.name == "mlp.up_proj"]
    inside = {n: t for n, t in models.base.items() if "mlp.up_proj" in n}
    assert part.shared == expect(inside, models.agents).shared.tolist()
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
    expected = expect(models.base, models.agents, lambda name: 0.02)
    check_counts(found, expected)
    assert found.epsilon == (0.02, 0.02)
    factors = oracle.rescaling(expected, r=2, alpha=0.5)
    assert [agent.lambda_ for agent in found.agents] == pytest.approx(factors)


def test_sweep_and_histogram_equal_the_oracle_at_every_threshold(models, tmp_path):
    found = inspect(models.recipe("ram"), tmp_path)
    assert found.magnitudes.sampled_fraction == 1
    assert [point.epsilon for point in found.epsilon_sweep] == list(magnitude.SWEEP)
    for point in found.epsilon_sweep:
        expected = expect(models.base, models.agents, lambda _, e=point.epsilon: e)
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
    models = make_models(tmp_path / "models", "qwen2", **sizes)
    sampled = inspect(models.recipe("ram"), tmp_path)
    assert 0.1 < sampled.magnitudes.sampled_fraction < 0.5
    check_counts(sampled, expect(models.base, models.agents))
    exact = inspect(models.recipe("ram"), tmp_path, "--exact")
    assert exact.magnitudes.sampled_fraction == 1
    for one, other in zip(sampled.epsilon_sweep, exact.epsilon_sweep):
        expected = expect(models.base, models.agents, lambda _, e=one.epsilon: e)
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
    check_counts(found, expect(models.base, agents))
    totals = [sum(t.numel() for t in agent.values()) for agent in agents]
    assert [agent.total for agent in found.agents] == totals


def test_modules_of_an_encoder_and_a_decoder_are_inspected(tmp_path):
    models = make_models(tmp_path / "models", "t5")
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
    check_counts(found, expect(models.base, agents))


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
    check_counts(inspect(recipe, tmp_path), expect(base, agents))


def test_epsilon_by_filter_counts_each_tensor_with_its_own(models, tmp_path):
    epsilon = [{"filter": "mlp", "value": 0.02}, {"value": 1e-5}]
    found = inspect(models.recipe("ram", parameters={"epsilon": epsilon}), tmp_path)
    own = expect(models.base, models.agents, lambda n: 0.02 if "mlp" in n else 1e-5)
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
    check_counts(inspect(recipe, tmp_path), expect(floating(base), agents))


def test_tensor_union_and_intersection_are_taken_as_mergekit_pytorch_takes_them(models, tmp_path):
    base, agents = floating(models.base), [dict(agent) for agent in models.agents]
    del agents[0]["model.norm.weight"]
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    result = run("inspect", recipe, tmp_path)
    assert result.exit_code == 1
    assert "1 tensor missing: model.norm.weight" in result.output
    found = inspect(recipe, tmp_path, "--tensor-union")
    check_counts(found, expect(base, agents))
    found = inspect(recipe, tmp_path, "--tensor-intersection")
    del base["model.norm.weight"]
    check_counts(found, expect(base, agents))


def test_examples_of_the_project_can_be_inspected(tmp_path, monkeypatch):
    from test_recipes import EXAMPLES, ROOT

    script = ROOT / "example_yamls" / "make_agents.py"
    subprocess.run(
        [sys.executable, script, "agents"], cwd=tmp_path, check=True, capture_output=True
    )
    monkeypatch.chdir(tmp_path)
    for file in EXAMPLES:
        result = CliRunner().invoke(cli.main, ["inspect", str(file), "--quiet"])
        assert result.exit_code == 0, f"{file}: {result.output}"


# --- What a person sees ---------------------------------------------------------------------------


def test_output_fits_80_columns_and_needs_no_colour(models, tmp_path):
    result = run("inspect", models.recipe("ram"), tmp_path)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "\x1b" not in result.output
    changed = expect(models.base, models.agents).changed
    for name, count in zip(("agent0", "agent1", "agent2"), changed):
        assert re.search(rf"^{name} +{count:,} ", result.output, re.MULTILINE)
    for title in (
        "Agents",
        "Pairs of agents",
        "Magnitudes",
        "by epsilon",
        "by layer",
        "by module type",
        "Verdict",
    ):
        assert title in result.output


def test_long_names_of_many_agents_fit_80_columns(models, tmp_path):
    agents = [checkpoints.change(models.base, seed) for seed in range(6)]
    name = "Some-Organisation-7B-Instruct-trained-for-{}-by-GRPO"
    paths = [
        checkpoints.save(tmp_path / name.format(i), models.config, agent)
        for i, agent in enumerate(agents)
    ]
    many = Models(models.config, models.base, agents, models.base_path, paths)
    result = run("inspect", many.recipe("ram"), tmp_path)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80


def words(text: str) -> str:
    return " ".join(text.split())


def test_verdict_tells_sparse_from_dense_agents(models, tmp_path):
    sparse = words(run("inspect", models.recipe("ram"), tmp_path).output)
    assert "RAM is made for this" in sparse
    agents = [checkpoints.change(models.base, seed, fraction=1.0) for seed in (1, 2)]
    dense = save_models(tmp_path / "dense", models.config, models.base, agents)
    text = words(run("inspect", dense.recipe("ram"), tmp_path).output)
    assert "nearly dense" in text
    assert "RAM is made for this" not in text
    assert "agent0 and agent1 collide: they share 100% of what either changed" in text


def test_verdict_names_the_agents_that_collide_and_no_others(models, tmp_path):
    first = checkpoints.change(models.base, 1, fraction=0.2, names="mlp")
    twin = {n: t + (t - models.base[n]) for n, t in first.items()}
    apart = checkpoints.change(models.base, 2, fraction=0.2, names="self_attn")
    made = save_models(tmp_path / "made", models.config, models.base, [first, apart, twin])
    text = words(run("inspect", made.recipe("ram"), tmp_path).output)
    assert text.count("collide") == 1
    assert "agent0 and agent2 collide" in text
    assert "0% of the shared ones in opposite directions" in text


def test_verdict_says_where_epsilon_matters(models, tmp_path):
    small = {n: t + 2e-5 * (torch.rand(t.shape) < 0.3) * (t == 0) for n, t in models.base.items()}
    made = save_models(tmp_path / "made", models.config, models.base, [small])
    text = words(run("inspect", made.recipe("ram"), tmp_path).output)
    assert "at 1e-4 instead of 1e-5 100% of the updates would no longer count" in text
    text = words(run("inspect", made.recipe("ram"), tmp_path, "--epsilon", "1e-4").output)
    assert "no agent changed any element" in text


def test_unchanged_agent_is_named(models, tmp_path):
    agents = [models.agents[0], models.base]
    made = save_models(tmp_path / "made", models.config, models.base, agents)
    text = words(run("inspect", made.recipe("ram"), tmp_path).output)
    # A long path may be broken anywhere.
    assert "agent1doesnotdifferfromthebase" in text.replace(" ", "")


def test_model_card_section_is_all_that_is_printed(models, tmp_path):
    result = run("inspect", models.recipe("ramplus"), tmp_path, "--model-card")
    assert result.output.startswith("### Reinforced Agent Merging\n")
    changed = expect(models.base, models.agents).changed
    for path, count in zip(models.agent_paths, changed):
        assert re.search(rf"^\| {path} \| {count:,} ", result.output, re.MULTILINE)
    assert "Jaccard" in result.output


def test_json_keys_are_those_of_the_report(models, tmp_path):
    path = tmp_path / "found.json"
    run("inspect", models.recipe("ramplus"), tmp_path, "--json", str(path))
    found = json.loads(path.read_text())
    assert {"agents", "pairwise_shared", "sign_conflicts", "layers"} <= found.keys()
    for agent in found["agents"]:
        assert {
            "model",
            "total",
            "changed",
            "unique",
            "shared",
            "overlap_histogram",
            "rho",
            "lambda",
        } <= agent.keys()
        assert sum(agent["overlap_histogram"]) == agent["changed"]


def test_plots_are_drawn(models, tmp_path):
    result = run("inspect", models.recipe("ram"), tmp_path, "--plots", str(tmp_path / "plots"))
    assert result.exit_code == 0, result.output
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    names = ("overlap", "overlap_histogram", "layers", "magnitudes", "epsilon")
    assert drawn == {f"{name}.png" for name in names}
    for path in (tmp_path / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_plots_without_matplotlib_say_how_to_get_it(command, models, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    monkeypatch.setattr(checkpoints, "load_file", None)
    result = run(command, models.recipe("ram"), tmp_path, "--plots", str(tmp_path / "plots"))
    assert result.exit_code == 1
    assert "pip install 'mergekit-ram[plots]'" in result.output
    assert not (tmp_path / "plots").exists()


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from mergekit_ram.cli import main; "
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0; "
        "heavy = {'torch', 'mergekit', 'rich', 'pydantic', 'matplotlib', 'transformers', 'numpy'}; "
        "print(heavy & sys.modules.keys(), 'inspect' in result.output, 'compare' in result.output)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set() True True", done.stdout + done.stderr


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_mergekits_options_are_taken(command):
    text = CliRunner().invoke(cli.main, [command, "--help"]).output
    for option in ("--trust-remote-code", "--read-to-gpu", "--lora-merge-cache", "--num-threads"):
        assert option in text


@pytest.mark.parametrize("content", ["", "- 1", "models: [a]", "a: {b", "text"])
def test_file_that_is_no_recipe_is_told(content, tmp_path):
    file = tmp_path / "recipe.yml"
    file.write_text(content)
    result = CliRunner().invoke(cli.main, ["inspect", str(file)])
    assert result.exit_code == 1
    assert "recipe.yml is not a recipe" in words(result.output)


@pytest.mark.parametrize("command", ["inspect", "compare"])
@pytest.mark.parametrize("fault", ["no base", "not a recipe", "no such method", "missing tensor"])
def test_faults_are_messages(command, fault, models, tmp_path):
    recipe, told = models.recipe("ties", parameters={"weight": 1.0}), "no base_model"
    if fault == "no base":
        del recipe["base_model"]
    elif fault == "not a recipe":
        del recipe["models"]
        told = "not a recipe"
    elif fault == "no such method":
        recipe["merge_method"], told = "tie", "no merge method tie"
    else:
        weights = dict(models.agents[0])
        del weights["model.layers.1.mlp.up_proj.weight"]
        path = checkpoints.save(tmp_path / "broken", models.config, weights)
        recipe["models"][0]["model"], told = path, "1 tensor missing"
    result = run(command, recipe, tmp_path)
    assert result.exit_code == 1
    assert told in words(result.output)
    assert isinstance(result.exception, SystemExit)


def test_not_a_number_stops_the_pass(models, tmp_path):
    weights = {n: t.clone() for n, t in models.agents[0].items()}
    weights["model.norm.weight"][3] = float("nan")
    made = save_models(tmp_path / "made", models.config, models.base, [weights])
    result = run("inspect", made.recipe("ties", parameters={"weight": 1.0}), tmp_path)
    assert result.exit_code == 1
    assert "NaN or infinity in model.norm.weight" in result.output


def test_names_are_as_short_as_they_can_be():
    assert short_names(["a/b/one", "a/b/two"]) == ["one", "two"]
    assert short_names(["a/one/final", "a/two/final"]) == ["one/final", "two/final"]
    assert short_names(["org/model"]) == ["model"]
    assert short_names(["same", "same"]) == ["same", "same"]


def test_percentages_never_hide_a_few_or_a_missing_one():
    parts = (0, 1, 1e-6, 0.00123, 0.0321, 0.5, 0.9951, 0.999999)
    texts = ("0%", "100%", "<0.01%", "0.12%", "3.2%", "50%", "99.5%", ">99.99%")
    assert tuple(map(percent, parts)) == texts
    assert [power(v) for v in (1e-5, 3e-4, 0.1, 1.5e-5)] == ["1e-5", "3e-4", "0.1", "1.5e-05"]
