"""The numbers of ``ram_report.json`` are the oracle's."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
import torch
from mergekit.io.tasks import LoadTensor
from mergekit.scripts import multimerge

import mergekit_ram
from mergekit_ram.method import stream as kernel
from mergekit_ram.report.record import Report
from support import checkpoints, oracle
from support.commands import invoke, merge, merge_raw
from support.expected import METHODS, STRONG, Plan, floating, overlap_of, plan
from support.recipes import MULTI, raw_recipe, save_models, state_dicts
from support.reports import read_report, strong


def layer(name: str) -> str:
    found = re.match(r"(model\.layers\.\d+)\.", name)
    return found[1] if found else re.sub(r"\.(weight|bias)$", "", name)


def module_type(name: str) -> str:
    name = re.sub(r"^model\.layers\.\d+\.", "", name)
    return re.sub(r"\.(weight|bias)$", "", name)


def check_numbers(report: Report, planned: Plan, method: str) -> None:
    """Every number of a report of agents that have every tensor, of one scale of parameters."""
    counts = overlap_of(planned)
    assert report.total == counts.total
    assert report.pairwise_shared == counts.pairwise.tolist()
    assert report.pairwise_conflicts == counts.pairwise_conflicts.tolist()
    assert report.sign_conflicts == counts.sign_conflicts
    factors = lambdas(planned, method)
    for i, agent in enumerate(report.agents):
        assert agent.total == counts.total
        assert agent.changed == counts.changed[i]
        assert agent.unique == counts.unique[i]
        assert agent.shared == counts.shared[i]
        assert agent.overlap_histogram == counts.histogram[i].tolist()
        assert sum(agent.overlap_histogram) == agent.changed
        assert agent.rho == pytest.approx(counts.shared[i] / counts.unique[i])
        assert agent.lambda_range == pytest.approx((min(factors[i]), max(factors[i])))
        if method == "ramplus_tl":
            assert agent.lambda_ is None
        else:
            assert agent.lambda_ == pytest.approx(factors[i][0])
    check_parts(report.layers, planned, layer)
    check_parts(report.module_types, planned, module_type)


def lambdas(planned: Plan, method: str) -> list[list[float]]:
    """λ of every agent in every tensor."""
    if method == "ram":
        return [[1.0] for _ in next(iter(planned.values())).agents]
    scopes = [planned]
    if method == "ramplus_tl":
        scopes = [{name: tensor} for name, tensor in planned.items()]
    rescalings = [oracle.rescaling(overlap_of(scope), **STRONG) for scope in scopes]
    return [list(factors) for factors in zip(*rescalings)]


def check_parts(parts, planned: Plan, name_of) -> None:
    expected: dict[str, Plan] = {}
    for name, tensor in planned.items():
        expected.setdefault(name_of(name), {})[name] = tensor
    assert sorted(part.name for part in parts) == sorted(expected)
    for part in parts:
        counts = overlap_of(expected[part.name])
        assert part.total == counts.total
        assert part.changed == counts.changed.tolist()
        assert part.unique == counts.unique.tolist()
        assert part.shared == counts.shared.tolist()
        assert part.sign_conflicts == counts.sign_conflicts


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_report_of_a_model_holds_the_oracles_counts(method, make_models, tmp_path):
    models = make_models()
    merge(models.recipe(method, parameters=strong(method)), tmp_path)
    report = read_report(tmp_path / "merged")
    check_numbers(report, plan(models.base, models.agents), method)
    assert report.schema_version == 1
    assert report.method == method
    assert report.base_model == models.base_path
    assert [agent.model for agent in report.agents] == models.agent_paths
    assert report.warnings == []
    layers = [part.name for part in report.layers if "layers" in part.name]
    assert layers == [f"model.layers.{i}" for i in range(3)]


@pytest.mark.parametrize("method", METHODS)
def test_report_of_state_dicts_holds_the_oracles_counts(method, make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, method, **strong(method))
    merge_raw(recipe, tmp_path)
    report = read_report(tmp_path / "merged")
    planned = plan(floating(base), agents)
    for part in ("empty", "scale"):
        assert part in {p.name for p in report.layers}
    check_numbers(report, planned, method)


def test_report_of_every_step_is_beside_its_model(make_models, tmp_path):
    models = make_models()
    file = tmp_path / "multi.yml"
    file.write_text(MULTI.format(base=models.base_path, agents=models.agent_paths))
    steps, out = tmp_path / "steps", tmp_path / "merged"
    invoke(multimerge.main, file, "-I", steps, "--out-path", out)
    first = plan(models.base, models.agents[:2])
    check_numbers(read_report(steps / "halfway"), first, "ramplus")
    halfway = checkpoints.read(steps / "halfway")
    second = plan(models.base, [halfway, models.agents[2]])
    check_numbers(read_report(out), second, "ramplus")


def test_report_holds_recipe_and_versions(make_models, tmp_path):
    models = make_models()
    recipe = models.recipe(
        "ramplus",
        parameters={"r": 0.5, "epsilon": [1e-5, 1e-4]},
        agents=[{"weight": [{"filter": "mlp", "value": 2.0}, {"value": 1.0}]}],
        dtype="bfloat16",
    )
    merge(recipe, tmp_path)
    report = read_report(tmp_path / "merged")
    kept = report.recipe
    assert kept["merge_method"] == "ramplus"
    assert kept["base_model"] == models.base_path
    assert [model["model"] for model in kept["models"]] == models.agent_paths
    assert kept["parameters"] == recipe["parameters"]
    assert kept["dtype"] == "bfloat16"
    assert kept["models"][0]["parameters"]["weight"][0]["filter"] == "mlp"
    assert report.versions == {
        "mergekit-ram": mergekit_ram.__version__,
        "mergekit": importlib.metadata.version("mergekit"),
        "torch": importlib.metadata.version("torch"),
    }
    # What it holds can be merged again, with the same result.
    first = checkpoints.read(tmp_path / "merged")
    (tmp_path / "again").mkdir()
    again = merge(kept, tmp_path / "again")
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_agent_without_a_tensor_counts_only_what_it_has(make_models, tmp_path):
    models = make_models("glm4", tied=False)
    (tmp_path / "models").mkdir()
    name = "model.layers.1.self_attn.q_proj.bias"
    agents = [dict(agent) for agent in models.agents]
    del agents[0][name]
    models = save_models(tmp_path / "models" / "m", models.config, models.base, agents)
    merge(models.recipe("ram"), tmp_path)
    report = read_report(tmp_path / "merged")
    everything = sum(tensor.numel() for tensor in models.base.values())
    assert report.total == everything
    without = everything - models.base[name].numel()
    assert [a.total for a in report.agents] == [without, everything, everything]
    counts = overlap_of(plan(models.base, models.agents))
    assert [a.changed for a in report.agents] == counts.changed.tolist()


def test_report_of_slices_counts_every_output_layer(make_models, tmp_path):
    models = make_models("llama", tied=False)
    sources = [models.base_path, *models.agent_paths]
    recipe = models.recipe("ramplus", parameters=STRONG)
    del recipe["models"]
    taken = ([0, 2], [1, 3])
    recipe["slices"] = [
        {"sources": [{"model": m, "layer_range": span} for m in sources]} for span in taken
    ]
    merge(recipe, tmp_path)
    planned = {}
    for out, source in enumerate([0, 1, 1, 2]):
        for name, tensor in plan(models.base, models.agents).items():
            if f"layers.{source}." in name:
                renamed = name.replace(f"layers.{source}.", f"layers.{out}.")
                planned[renamed] = tensor
            elif "layers" not in name:
                planned[name] = tensor
    check_numbers(read_report(tmp_path / "merged"), planned, "ramplus")


@pytest.mark.parametrize("options", [["--multi-gpu"], ["--async-write"]], ids=str)
def test_options_do_not_change_the_report(options, make_models, tmp_path, monkeypatch):
    if options == ["--multi-gpu"]:
        pytest.importorskip("mergekit.multigpu_executor")
        options = ["--low-cpu-memory"]
    models = make_models()
    merge(models.recipe("ramplus", parameters=STRONG), tmp_path, *options)
    report = read_report(tmp_path / "merged")
    check_numbers(report, plan(models.base, models.agents), "ramplus")


# --- Cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "counted", "loads"), [("ram", 0, 1), ("ramplus", 1, 2), ("ramplus_tl", 1, 1)]
)
def test_report_takes_no_pass_of_its_own(
    method, counted, loads, make_models, tmp_path, monkeypatch
):
    passes: dict[str, list[str]] = {"count": [], "merge": [], "load": []}
    load = LoadTensor.execute

    def counting_load(self):
        passes["load"].append(f"{self.model}:{self.tensor}")
        return load(self)

    monkeypatch.setattr(LoadTensor, "execute", counting_load)
    streamed = {"count": kernel._Stream.count, "merge": kernel._Stream.merge}
    for name, function in streamed.items():

        def wrapper(self, name=name, function=function):
            passes[name].append(str(tuple(self.shape)))
            return function(self)

        monkeypatch.setattr(kernel._Stream, name, wrapper)
    models = make_models()
    merge(models.recipe(method), tmp_path)
    tensors = len(models.base)
    assert read_report(tmp_path / "merged").total
    assert len(passes["merge"]) == tensors
    assert len(passes["count"]) == counted * tensors
    for load in set(passes["load"]):
        assert passes["load"].count(load) == loads, load
