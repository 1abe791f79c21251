"""``ram_report.json``, the card's section and the warnings of whole merges, against the oracle's
counts.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

import checkpoints
import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import oracle
import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoadTensor
from mergekit.scripts import multimerge, run_yaml
from pydantic import ValidationError
from test_recipes import (  # noqa: F401 - the fixtures among them
    BF16,
    F32,
    METHODS,
    MULTI,
    Models,
    Plan,
    Planned,
    array,
    floating,
    forget_loaders,
    invoke,
    make_models,
    merge,
    merge_raw,
    overlap_of,
    plan,
    raw_recipe,
    save_models,
    state_dicts,
    write_recipe,
)

import mergekit_ram
from mergekit_ram.method import stream as kernel
from mergekit_ram.report.record import Report

FILE = "ram_report.json"
STRONG = {"r": 1.0, "alpha": 10.0}


def read_report(directory: Path) -> Report:
    """The report beside a model, which is all of the file and nothing else."""
    text = (directory / FILE).read_text()
    report = Report.model_validate_json(text)
    assert report.to_json() + "\n" == text
    assert Report.model_validate(json.loads(text)) == report
    assert not list(directory.glob("*.partial"))
    return report


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


def strong(method: str) -> dict:
    return {} if method == "ram" else STRONG


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


# --- Card -----------------------------------------------------------------------------------------


def table(card: str) -> list[list[str]]:
    lines = card[card.index("### Reinforced Agent Merging") :].splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("method", METHODS)
def test_model_card_describes_the_agents(method, make_models, tmp_path):
    models = make_models()
    merge(models.recipe(method, parameters=strong(method)), tmp_path)
    report = read_report(tmp_path / "merged")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert card.startswith("---\n")  # mergekit's own front matter
    assert card.count("### Reinforced Agent Merging") == 1
    assert f"{report.total:,}" in card
    _, _, *rows = table(card)
    assert [row[0] for row in rows] == models.agent_paths
    for row, agent in zip(rows, report.agents, strict=True):
        assert row[1].startswith(f"{agent.changed:,} (")
        assert row[2:4] == [f"{agent.unique:,}", f"{agent.shared:,}"]
        assert float(row[4]) == pytest.approx(agent.rho, rel=1e-3)
        factors = [float(part) for part in row[5].split(" – ")]
        assert factors[0] == pytest.approx(agent.lambda_range[0], rel=1e-3)
        assert factors[-1] == pytest.approx(agent.lambda_range[1], rel=1e-3)


def test_no_card_where_mergekit_writes_none(make_models, tmp_path):
    merge(make_models().recipe("ram"), tmp_path, "--no-write-model-card")
    assert not (tmp_path / "merged" / "README.md").exists()
    read_report(tmp_path / "merged")


def test_other_methods_have_no_report(make_models, tmp_path):
    merge(make_models().recipe("linear", parameters={"weight": 1.0}), tmp_path)
    assert not (tmp_path / "merged" / FILE).exists()


# --- Privacy --------------------------------------------------------------------------------------


@pytest.fixture
def at_home(make_models, tmp_path, monkeypatch) -> Path:
    """Models in the user's home, named relative to where the user is."""
    home = tmp_path / "home" / "someone"
    home.mkdir(parents=True)
    models = make_models()
    save_models(home / "models", models.config, models.base, models.agents)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    return home


RELATIVE = {
    "merge_method": "ramplus",
    "base_model": "./models/base",
    "models": [{"model": f"./models/agent{i}"} for i in range(3)],
}


@pytest.mark.parametrize("damaged", [False, True], ids=["merged", "refused"])
@pytest.mark.parametrize("entry", ["yaml", "multi", "pytorch"])
def test_home_is_not_named(entry, damaged, at_home, caplog):
    caplog.set_level(logging.INFO)
    recipe = dict(RELATIVE)
    command, options = run_yaml.main, ["merged"]
    if entry == "pytorch":
        command = raw_pytorch.main
        recipe["base_model"] += "/model.safetensors"
        recipe["models"] = [{"model": m["model"] + "/model.safetensors"} for m in recipe["models"]]
    elif entry == "multi":
        command, options = multimerge.main, ["-I", ".", "--out-path", "merged"]
    file = write_recipe(recipe, Path("."))
    if damaged:
        shard = Path("models/agent1/model.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1])
    result = CliRunner().invoke(command, [str(file), *options, "-v"])
    assert result.exit_code == (1 if damaged else 0), result.output
    said = result.output + caplog.text
    if damaged:
        assert "models/agent1/model.safetensors" in said
    else:
        assert "changed" in caplog.text
        written = [f for f in Path("merged").iterdir() if f.suffix != ".safetensors"]
        assert Path("merged") / FILE in written
        said += "".join(path.read_text() for path in written)
        assert "./models/agent1" in said
    assert str(at_home) not in said


def test_recipe_that_names_the_home_keeps_its_names(at_home, tmp_path):
    recipe = yaml.safe_load(yaml.safe_dump(RELATIVE).replace("./models", f"{at_home}/models"))
    merge(recipe, tmp_path)
    report = read_report(tmp_path / "merged")
    assert [agent.model for agent in report.agents] == [
        f"{at_home}/models/agent{i}" for i in range(3)
    ]


# --- Warnings -------------------------------------------------------------------------------------


def warnings_of(recipe: Mapping, directory: Path, caplog) -> list[str]:
    """What a merge warns of: logged once each, and kept in the report."""
    caplog.clear()
    merge(recipe, directory)
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("mergekit_ram") and record.levelno >= logging.WARNING
    ]
    assert logged == read_report(directory / "merged").warnings
    return logged


def with_agents(make_models, directory: Path, agents, dtypes=None) -> Models:
    models = make_models()
    base = models.base
    if dtypes:
        base, *agents = [
            checkpoints.cast(weights, dtype)
            for weights, dtype in zip([base, *agents], dtypes, strict=True)
        ]
    return save_models(directory / "models", models.config, base, agents)


@pytest.mark.parametrize("method", METHODS)
def test_identical_agent_is_warned_of_once(method, make_models, tmp_path, caplog):
    base = make_models().base
    agents = [base, checkpoints.change(base, 1), checkpoints.change(base, 2)]
    models = with_agents(make_models, tmp_path, agents)
    (warning,) = warnings_of(models.recipe(method), tmp_path, caplog)
    assert models.agent_paths[0] in warning
    assert "does not differ from the base" in warning


@pytest.mark.parametrize("method", METHODS)
def test_dense_agent_is_warned_of_once(method, make_models, tmp_path, caplog):
    base = make_models().base
    dense = checkpoints.change(base, 1, fraction=0.95)
    agents = [checkpoints.change(base, 2, fraction=0.85), dense]
    models = with_agents(make_models, tmp_path, agents)
    (warning,) = warnings_of(models.recipe(method), tmp_path, caplog)
    assert models.agent_paths[1] in warning
    for part in ("95%", "dense", "LoRA", "epsilon", "ties"):
        assert part in warning


@pytest.mark.parametrize("method", METHODS)
def test_nothing_above_epsilon_is_warned_of_once(method, make_models, tmp_path, caplog):
    models = make_models()
    recipe = models.recipe(method, parameters={"epsilon": 10.0})
    (warning,) = warnings_of(recipe, tmp_path, caplog)
    assert "no agent changed any element" in warning
    assert "epsilon" in warning
    merged = checkpoints.read(tmp_path / "merged")
    assert all(torch.equal(merged[name], t) for name, t in models.base.items())


@pytest.mark.parametrize("method", METHODS)
def test_rounding_of_float32_agents_is_warned_of_once(method, make_models, tmp_path, caplog):
    base = make_models().base
    agents = [checkpoints.change(base, seed) for seed in (1, 2)]
    models = with_agents(make_models, tmp_path, agents, (BF16, F32, BF16))
    recipe = models.recipe(method, dtype="bfloat16")
    (warning,) = warnings_of(recipe, tmp_path, caplog)
    assert models.agent_paths[0] in warning
    assert models.agent_paths[1] not in warning
    for part in ("bfloat16", "float32", "out_dtype"):
        assert part in warning
    # What it recommends is not warned of, nor is nothing rounded.
    recipe |= {"dtype": "float32", "out_dtype": "bfloat16"}
    assert warnings_of(recipe, tmp_path, caplog) == []
    assert warnings_of(models.recipe(method), tmp_path, caplog) == []


def test_pickled_float32_agents_are_warned_of(make_models, tmp_path, caplog):
    recipe = make_models(pickle=True).recipe("ram", dtype="float16")
    (warning,) = warnings_of(recipe, tmp_path, caplog)
    assert "float16" in warning


@pytest.mark.parametrize("method", METHODS)
def test_sparse_agents_are_not_warned_of(method, make_models, tmp_path, caplog):
    assert warnings_of(make_models().recipe(method), tmp_path, caplog) == []


def test_state_dicts_are_warned_of_too(make_models, tmp_path, caplog):
    base, agents = state_dicts(make_models())
    agents[0] = dict(base)
    recipe = raw_recipe(tmp_path, base, agents, "ramplus")
    recipe["dtype"] = "bfloat16"
    merge_raw(recipe, tmp_path)
    logged = [r.getMessage() for r in caplog.records if r.name.startswith("mergekit_ram")]
    warnings = read_report(tmp_path / "merged").warnings
    assert [text for text in logged if text in warnings] == warnings
    assert len(warnings) == 2
    assert any("does not differ" in text for text in warnings)
    assert any("float32" in text for text in warnings)


# --- The file -------------------------------------------------------------------------------------


def a_report() -> Report:
    return Report(
        versions={},
        method="ram",
        base_model="base",
        recipe={},
        total=0,
        agents=[],
        pairwise_shared=[],
        pairwise_conflicts=[],
        sign_conflicts=0,
        layers=[],
        module_types=[],
    )


def test_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    a_report().write(str(tmp_path))
    before = (tmp_path / FILE).read_text()

    def fail(*_):
        raise OSError(28, "No space left on device")

    changed = a_report().model_copy(update={"method": "ramplus"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            changed.write(str(tmp_path))
    assert (tmp_path / FILE).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    changed.write(str(tmp_path))
    assert Report.model_validate_json((tmp_path / FILE).read_text()) == changed


def test_schema_has_a_version_and_refuses_other_files():
    assert a_report().schema_version == 1
    for text in ("{}", '{"schema_version": 1}', "[]"):
        with pytest.raises(ValidationError):
            Report.model_validate_json(text)


def test_json_keys_are_those_that_are_documented(make_models, tmp_path):
    merge(make_models().recipe("ramplus"), tmp_path)
    content = json.loads((tmp_path / "merged" / FILE).read_text())
    assert content["agents"][0].keys() == {
        "model",
        "total",
        "changed",
        "unique",
        "shared",
        "overlap_histogram",
        "rho",
        "lambda",
        "lambda_range",
    }
    for key in (
        "schema_version",
        "versions",
        "method",
        "recipe",
        "pairwise_shared",
        "sign_conflicts",
        "layers",
    ):
        assert key in content
