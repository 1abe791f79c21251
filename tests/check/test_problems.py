"""Problems of recipes, found before a weight is read, all of them at once."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mergekit_ram.cli import main as mergekit_ram
from support.commands import invoke_refused, refusal
from support.expected import METHODS
from support.recipes import INVALID, write_recipe
from support.workshop import assert_told, check_file, missing_tensors, other_vocabulary, problems_of


def base_lacks_a_tensor(shop, recipe):
    weights = load_file(shop.base / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, shop.base / "model.safetensors")
    return [(shop.base, ["1 tensor missing", "model.norm.weight"])]


def other_shapes(shop, recipe):
    weights = shop.weights(1)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        weights[name] = torch.cat([weights[name]] * 2)
    shop.save(1, weights)
    parts = ["2 tensors of another shape", "model.norm.weight [32] for the base's [16]"]
    return [(shop.agents[1], parts)]


def other_number_of_layers(shop, recipe):
    shop.configure(2, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    return [(shop.agents[2], ["2 layers", "3"])]


def other_architecture(shop, recipe):
    shop.configure(1, architectures=["LlamaForCausalLM"], model_type="llama")
    return [(shop.agents[1], ["LlamaForCausalLM", "Qwen2ForCausalLM"])]


def no_such_model(shop, recipe):
    missing = str(shop.directory / "nowhere")
    recipe["models"].append({"model": missing})
    return [(missing, ["no such directory"])]


def no_such_base(shop, recipe):
    recipe["base_model"] = str(shop.directory / "nowhere")
    return [(recipe["base_model"], ["no such directory"])]


def corrupt_config(shop, recipe):
    (shop.agents[0] / "config.json").write_text("{")
    return [(shop.agents[0], ["config"])]


def no_weights(shop, recipe):
    (shop.agents[0] / "model.safetensors").unlink()
    return [(shop.agents[0], ["no model.safetensors"])]


def truncated_safetensors(shop, recipe):
    file = shop.agents[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return [(shop.agents[0], [str(file), "incomplete"])]


def empty_safetensors(shop, recipe):
    file = shop.agents[0] / "model.safetensors"
    file.write_bytes(b"")
    return [(shop.agents[0], [str(file), "damaged"])]


def directory_for_a_file(shop, recipe):
    file = shop.agents[0] / "model.safetensors"
    file.unlink()
    file.mkdir()
    return [(shop.agents[0], [str(file), "directory"])]


def float8(shop, recipe):
    weights = shop.weights(0)
    for i in range(3):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.ones(1)
    shop.save(0, weights)
    return [(shop.agents[0], ["quantized", "F8_E4M3", "dequantize"])]


def scales(shop, recipe):
    weights = shop.weights(0)
    weights["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(24, 1)
    shop.save(0, weights)
    return [(shop.agents[0], ["quantized", "weight_scale", "dequantize"])]


def gptq(shop, recipe):
    weights = shop.weights(1)
    for i in range(3):
        module = f"model.layers.{i}.mlp.up_proj"
        del weights[f"{module}.weight"]
        for part in ("qweight", "qzeros", "g_idx"):
            weights[f"{module}.{part}"] = torch.zeros(2, 24, dtype=torch.int32)
    shop.save(1, weights)
    shop.configure(1, quantization_config={"quant_method": "gptq", "bits": 4})
    return [(shop.agents[1], ["quantized", "gptq", "dequantize"])]


def awq(shop, recipe):
    weights = shop.weights(1)
    weights["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(4, dtype=torch.int32)
    shop.save(1, weights)
    shop.configure(1, quantization_config={"quant_method": "awq", "bits": 4})
    return [(shop.agents[1], ["quantized", "awq"])]


def bitsandbytes(shop, recipe):
    weights = shop.weights(2)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = torch.zeros(192, 1, dtype=torch.uint8)
    weights[f"{name}.absmax"] = torch.ones(6)
    weights[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(9, dtype=torch.uint8)
    shop.save(2, weights)
    return [(shop.agents[2], ["quantized", name])]


def bitsandbytes_by_config(shop, recipe):
    weights = shop.weights(2)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = torch.zeros_like(weights[name], dtype=torch.int8)
    shop.save(2, weights)
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    shop.configure(2, quantization_config=settings)
    return [(shop.agents[2], ["quantized", "bitsandbytes"])]


def no_agent(shop, recipe):
    recipe["models"] = [{"model": str(shop.base)}]
    return [("recipe", ["no agent besides the base"])]


def no_base(shop, recipe):
    del recipe["base_model"]
    return [("recipe", ["no base_model"])]


def base_not_in_its_slice(shop, recipe):
    sources = [{**m, "layer_range": [0, 3]} for m in recipe.pop("models")]
    recipe["slices"] = [{"sources": sources}]
    return [("recipe", ["slices[0]", str(shop.base), "not among the sources"])]


def slice_beyond_the_model(shop, recipe):
    models = [{"model": str(shop.base)}, *recipe.pop("models")]
    recipe["slices"] = [{"sources": [{**m, "layer_range": [1, 4]} for m in models]}]
    return [(shop.agents[0], ["slices[0]", "[1, 4]", "3"])]


def slice_of_unequal_ranges(shop, recipe):
    models = [{"model": str(shop.base)}, *recipe.pop("models")]
    ranges = [[0, 3], [0, 3], [0, 2], [1, 3]]
    sources = [{**m, "layer_range": r} for m, r in zip(models, ranges)]
    recipe["slices"] = [{"sources": sources}]
    return [("recipe", ["slices[0]", "[2, 3] layers"])]


def more_layers_than_the_config_allows(shop, recipe):
    """Qwen2's config lists the type of every layer, which mergekit does not lengthen."""
    models = [{"model": str(shop.base)}, *recipe.pop("models")]
    recipe["slices"] = [
        {"sources": [{**m, "layer_range": taken} for m in models]} for taken in ([0, 2], [1, 3])
    ]
    return [("recipe", ["config is not valid", "num_hidden_layers", "4"])]


def agent_twice(shop, recipe):
    recipe["models"].append({"model": str(shop.agents[0])})
    return [("recipe", [str(shop.agents[0]), "same model", "listed before"])]


def agent_twice_by_symlink(shop, recipe):
    link = shop.directory / "link"
    link.symlink_to(shop.agents[0])
    recipe["models"].append({"model": str(link)})
    return [("recipe", [str(link), "same model", str(shop.agents[0])])]


def agent_twice_by_spelling(shop, recipe):
    spelling = f"{shop.directory}/./../{shop.directory.name}/{shop.agents[0].name}/"
    recipe["models"].append({"model": spelling})
    return [("recipe", [spelling, "same model", str(shop.agents[0])])]


def base_by_symlink(shop, recipe):
    link = shop.directory / "link"
    link.symlink_to(shop.base)
    recipe["models"].append({"model": str(link)})
    return [("recipe", [str(link), "same model", "the base"])]


def bad_parameter(shop, recipe):
    recipe["parameters"] = {"epsilon": -1.0}
    return [("recipe", ["epsilon: -1.0", "(in model.", "more)"])]


def bad_dtype(shop, recipe):
    recipe["dtype"] = "float15"
    return [("recipe", ["dtype: float15"])]


def integer_out_dtype(shop, recipe):
    recipe["out_dtype"] = "int64"
    return [("recipe", ["out_dtype: int64"])]


def lora_without_adapter(shop, recipe):
    adapter = shop.directory / "adapter"
    adapter.mkdir()
    recipe["models"][0]["model"] += f"+{adapter}"
    return [(recipe["models"][0]["model"], ["adapter_config.json is missing"])]


KINDS = [
    missing_tensors,
    base_lacks_a_tensor,
    other_shapes,
    other_vocabulary,
    other_number_of_layers,
    other_architecture,
    no_such_model,
    no_such_base,
    corrupt_config,
    no_weights,
    truncated_safetensors,
    empty_safetensors,
    directory_for_a_file,
    float8,
    scales,
    gptq,
    awq,
    bitsandbytes,
    bitsandbytes_by_config,
    no_agent,
    no_base,
    base_not_in_its_slice,
    slice_beyond_the_model,
    slice_of_unequal_ranges,
    more_layers_than_the_config_allows,
    agent_twice,
    agent_twice_by_symlink,
    agent_twice_by_spelling,
    base_by_symlink,
    bad_parameter,
    bad_dtype,
    integer_out_dtype,
    lora_without_adapter,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_problem_is_found_before_a_weight_is_read(kind, shop, tmp_path, no_weight_is_read):
    recipe = shop.recipe("ramplus")
    told = kind(shop, recipe)
    cache = ("--lora-merge-cache", str(tmp_path / "cache"))
    problems = problems_of(recipe, tmp_path)
    for where, parts in told:
        assert_told(problems, str(where), *parts)
    found = {problem["where"] for problem in problems}
    if kind is not slice_beyond_the_model:
        assert found == {str(where) for where, _ in told}, problems
    message = refusal(recipe, tmp_path, *cache)
    assert f"merge_method ramplus cannot merge this recipe: {len(problems)}" in message
    for problem in problems:
        assert problem["what"] in message
        assert problem["remedy"] in message
    assert "cannot be planned" not in message


def test_all_problems_come_in_one_error(shop, tmp_path, no_weight_is_read):
    recipe = shop.recipe("ramplus")
    told = [
        *missing_tensors(shop, recipe),
        *other_vocabulary(shop, recipe),
        *other_number_of_layers(shop, recipe),
        *agent_twice(shop, recipe),
        *agent_twice_by_symlink(shop, recipe),
        *bad_parameter(shop, recipe),
        *bad_dtype(shop, recipe),
        *no_such_model(shop, recipe),
    ]
    del recipe["dtype"]
    recipe["out_dtype"] = "float15"
    for method in METHODS:
        recipe["merge_method"] = method
        problems = problems_of(recipe, tmp_path)
        for where, parts in told:
            assert_told(problems, str(where), *parts)
        message = refusal(recipe, tmp_path)
        assert all(problem["what"] in message for problem in problems)
        lines = message.splitlines()
        # Every model once, its problems under it.
        assert sum(line == str(shop.agents[0]) for line in lines) == 1


@pytest.mark.parametrize(("method", "parameters", "agents", "told"), INVALID)
def test_unusable_parameter_is_a_problem(
    method, parameters, agents, told, make_models, tmp_path, no_weight_is_read
):
    recipe = make_models().recipe(method, parameters=parameters, agents=agents)
    (problem,) = problems_of(recipe, tmp_path)
    assert all(part in problem["what"] for part in told)


def test_text_and_exit_code_for_a_person(shop, tmp_path):
    recipe = shop.recipe()
    file = write_recipe(recipe, tmp_path)
    assert check_file(file) == f"{file} can be merged\n"
    assert json.loads(check_file(file, "--json"))["problems"] == []
    missing_tensors(shop, recipe)
    result = CliRunner().invoke(mergekit_ram, ["check", str(file)])
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "merge_method ram cannot merge this recipe: 1 problem"
    assert lines[1] == str(shop.agents[0])
    assert lines[2].startswith("  - 4 tensors missing: ")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("merge_method: linear\nmodels: [{model: a}]", "uses merge_method linear"),
        ("- a\n- b", "is not a recipe"),
        ("{", "is not a recipe"),
        ("", "is not a recipe"),
        ("models: [{model: a}]", "merge_method"),
        ("merge_method: ram\nmodels: []", "is not a recipe"),
        ("merge_method: ram\nmodels: [a, b]", "is not a recipe"),
        ("merge_method: ram\nmodels: 7", "is not a recipe"),
    ],
)
def test_file_that_is_no_recipe(content, told, tmp_path):
    file = write_recipe(content, tmp_path)
    message = invoke_refused(mergekit_ram, "check", file)
    assert told in message
    assert str(file) in message
