"""The same merge through every entry point of mergekit."""

from __future__ import annotations

import logging

import pytest
import torch
from mergekit.merge_methods import PerGroupValues, merge_state_dicts, merge_tensors
from mergekit.scripts import multimerge

from support import checkpoints
from support.commands import (
    invoke,
    logged_counts,
    merge,
    merge_in_memory,
    merge_raw,
    run_command,
    script,
)
from support.expected import (
    METHODS,
    STRONG,
    check,
    check_state_dict,
    expect,
    floating,
    plan,
    true_counts,
)
from support.recipes import MULTI, raw_recipe, state_dicts, write_recipe
from support.tensors import BF16, F32


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_mergekit_pytorch_merges_state_dicts(suffix, method, make_models, tmp_path, caplog):
    base, agents = state_dicts(make_models())
    parameters = {} if method == "ram" else STRONG
    planned = plan(floating(base), agents, parameters)
    recipe = raw_recipe(tmp_path, base, agents, method, suffix, **parameters)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge_raw(recipe, tmp_path)
    if method == "ramplus":
        assert logged_counts(caplog.text) == true_counts(planned)
    check_state_dict(output, expect(method, planned), base)


def test_mergekit_pytorch_command_merges_by_the_model_wide_ratio(make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ramplus", **STRONG)
    recipe |= {"dtype": "bfloat16", "out_dtype": "float32"}
    file = write_recipe(recipe, tmp_path)
    text = run_command(script("mergekit-pytorch"), file, tmp_path / "merged", "-v")
    planned = plan(floating(base), agents, STRONG)
    expected = expect("ramplus", planned, dtype=BF16, out_dtype=F32)
    check_state_dict(checkpoints.read(tmp_path / "merged"), expected, base)
    assert len(logged_counts(text)) == len(agents)


def test_mergekit_pytorch_takes_filters_weights_and_dtypes(make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ramplus", **STRONG)
    recipe["parameters"]["lambda"] = [{"filter": "mlp", "value": 0.5}, {"value": 1.0}]
    recipe["models"][1]["parameters"] = {"weight": 3.0}
    recipe["out_dtype"] = "bfloat16"

    def parameters_of(name):
        scale = 0.5 if "mlp" in name else 1.0
        return {**STRONG, "lambda_": scale, "weight": [1.0, 3.0, 1.0]}

    planned = plan(floating(base), agents, parameters_of)
    expected = expect("ramplus", planned, out_dtype=BF16)
    check_state_dict(merge_raw(recipe, tmp_path), expected, base)


@pytest.mark.parametrize("option", ["--tensor-union", "--tensor-intersection"])
def test_mergekit_pytorch_counts_what_it_merges_of_differing_models(option, make_models, tmp_path):
    base, agents = state_dicts(make_models())
    missing = "model.embed_tokens.weight"
    del agents[1][missing]
    recipe = raw_recipe(tmp_path, base, agents, "ramplus", **STRONG)
    merged = floating(base)
    if option == "--tensor-intersection":
        del merged[missing]
    output = merge_raw(recipe, tmp_path, option)
    planned = plan(merged, agents, STRONG)
    check_state_dict(output, expect("ramplus", planned), base)


@pytest.mark.parametrize("as_command", [False, True], ids=["in process", "command"])
def test_mergekit_multi_merges_every_step_by_its_own_ratio(as_command, make_models, tmp_path):
    models = make_models("llama")
    file = tmp_path / "multi.yml"
    file.write_text(MULTI.format(base=models.base_path, agents=models.agent_paths))
    arguments = file, "-I", tmp_path / "steps", "--out-path", tmp_path / "merged"
    if as_command:
        run_command(script("mergekit-multi"), *arguments)
    else:
        invoke(multimerge.main, *arguments)
    halfway = checkpoints.read(tmp_path / "steps" / "halfway")
    check(halfway, expect("ramplus", plan(models.base, models.agents[:2], STRONG)))
    planned = plan(models.base, [halfway, models.agents[2]], STRONG)
    check(checkpoints.read(tmp_path / "merged"), expect("ramplus", planned))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("out_dtype", [None, BF16])
def test_merge_state_dicts_takes_the_ratio_over_all_its_groups(out_dtype, method, make_models):
    base, agents = state_dicts(make_models())
    parameters = {} if method == "ram" else STRONG
    output = merge_state_dicts(
        {"base": base, **dict(enumerate(agents))},
        method,
        base="base",
        parameters=parameters,
        out_dtype=out_dtype,
    )
    planned = plan(floating(base), agents, parameters)
    check_state_dict(output, expect(method, planned, out_dtype=out_dtype), base)


def test_merge_state_dicts_takes_values_by_agent_and_by_group(make_models):
    base, agents = state_dicts(make_models())
    names = list(base)
    scales = [0.5 if "mlp" in name else 1.0 for name in names]
    output = merge_state_dicts(
        [base, *agents],
        "ramplus",
        base=0,
        parameters={
            **STRONG,
            "weight": {1: 1.0, 2: 3.0, 3: 0.5},
            "lambda": PerGroupValues(scales),
        },
    )
    settings = {
        name: {**STRONG, "weight": [1.0, 3.0, 0.5], "lambda_": scale}
        for name, scale in zip(names, scales, strict=True)
    }
    planned = plan(floating(base), agents, settings.__getitem__)
    check_state_dict(output, expect("ramplus", planned), base)


@pytest.mark.parametrize("method", METHODS)
def test_merge_tensors_takes_the_ratio_of_its_only_group(method, make_models):
    models = make_models()
    parameters = {} if method == "ram" else STRONG
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = [weights[name] for weights in (models.agents[0], models.base, *models.agents[1:])]
    before = [tensor.clone() for tensor in tensors]
    output = merge_tensors(tensors, method, base_index=1, parameters=parameters)
    planned = {name: plan(models.base, models.agents, parameters)[name]}
    check({name: output}, expect(method, planned))
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("method", METHODS)
def test_plan_in_memory_gives_what_mergekit_yaml_gives(method, make_models, tmp_path):
    models = make_models("mistral")
    parameters = {} if method == "ram" else STRONG
    recipe = models.recipe(method, parameters=parameters, out_dtype="bfloat16")
    output = merge_in_memory(recipe)
    planned = plan(models.base, models.agents, parameters)
    check(output, expect(method, planned, out_dtype=BF16))
    saved = merge(recipe, tmp_path)
    assert all(torch.equal(saved[name], output[name]) for name in saved)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings", [{}, {"layer_granularity": 1, "filters": ["mlp"]}, {"smooth": True}]
)
def test_evolve_searches_the_weights_of_agents(method, settings, make_models):
    genome_module = pytest.importorskip("mergekit.evo.genome")
    models = make_models("llama", tied=False)
    genome = genome_module.ModelGenome(
        genome_module.ModelGenomeDefinition(
            models=models.agent_paths,
            merge_method=method,
            base_model=models.base_path,
            **settings,
        )
    )
    genotype = genome.initial_genotype(random=False) * 1.5
    assert genotype.shape[-1] == 1
    config = genome.genotype_merge_config(genotype)
    output = merge_in_memory(config.model_dump(mode="json", exclude_none=True))
    parameters = {"weight": [0.5] * 3, "normalize": False}
    planned = plan(models.base, models.agents, parameters)
    check(output, expect(method, planned, dtype=BF16))
