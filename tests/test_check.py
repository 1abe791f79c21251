"""Problems of recipes, found before a weight is read: all of them at once, and none where there is
none.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoints
import huggingface_hub
import mergekit.io.lazy_unpickle
import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.architecture import get_architecture_info
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.scripts import multimerge, run_yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_recipes import (  # noqa: F401 - the fixtures among them
    BF16,
    EXAMPLES,
    F32,
    INVALID,
    METHODS,
    MULTI,
    TOKENS,
    Models,
    forget_loaders,
    invoke,
    invoke_refused,
    make_models,
    merge,
    no_weight_is_read,
    raw_recipe,
    refusal,
    save_models,
    spoken,
    state_dicts,
    write_recipe,
)
from transformers import AutoModelForCausalLM, OPTConfig

from mergekit_ram.cli import main as mergekit_ram


def check_file(file: Path, *options) -> str:
    """``mergekit-ram check`` of a recipe that is fine; its output."""
    return invoke(mergekit_ram, "check", file, *options)


def check_recipe(recipe, directory: Path, *options) -> str:
    return check_file(write_recipe(recipe, directory), *options)


def problems_of(recipe, directory: Path, *options) -> list[dict[str, str]]:
    """Problems that ``mergekit-ram check --json`` finds in a recipe that is not fine."""
    file = write_recipe(recipe, directory)
    arguments = ["check", str(file), "--json", *map(str, options)]
    result = CliRunner().invoke(mergekit_ram, arguments, catch_exceptions=False)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["recipe"] == str(file)
    assert found["problems"]
    for problem in found["problems"]:
        assert problem.keys() == {"where", "what", "remedy"}
        assert all(problem.values())
    return found["problems"]


def assert_told(problems: list[dict[str, str]], where: str, *parts: str) -> None:
    """One problem there says all the parts."""
    said = [p["what"] + " " + p["remedy"] for p in problems if p["where"] == where]
    assert any(all(part in text for part in parts) for text in said), problems


# --- Each kind of problem -------------------------------------------------------------------------


class Workshop:
    """Copies of the models, to break one at a time."""

    def __init__(self, models: Models, directory: Path):
        self.directory = directory
        self.base = self._copy(models.base_path)
        self.agents = [self._copy(path) for path in models.agent_paths]

    def _copy(self, path: str) -> str:
        return shutil.copytree(path, self.directory / Path(path).name)

    def recipe(self, method="ram") -> dict:
        return {
            "merge_method": method,
            "base_model": str(self.base),
            "models": [{"model": str(agent)} for agent in self.agents],
        }

    def weights(self, agent: int) -> dict[str, torch.Tensor]:
        return load_file(self.agents[agent] / "model.safetensors")

    def save(self, agent: int, weights) -> None:
        file = self.agents[agent] / "model.safetensors"
        save_file(weights, file, metadata={"format": "pt"})

    def configure(self, agent: int, **entries) -> None:
        file = self.agents[agent] / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def missing_tensors(shop, recipe):
    weights = shop.weights(0)
    for i in range(3):
        del weights[f"model.layers.{i}.mlp.up_proj.weight"]
    del weights["model.norm.weight"]
    shop.save(0, weights)
    parts = ["4 tensors missing", "model.layers.0.mlp.up_proj.weight", "and 1 more"]
    return [(shop.agents[0], parts)]


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


def other_vocabulary(shop, recipe):
    weights = shop.weights(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name][:2]])
    shop.save(1, weights)
    parts = ["2 tensors", "model.embed_tokens.weight [50, 16]", "[48, 16]", "tokenizer"]
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


@pytest.fixture
def shop(make_models, tmp_path) -> Workshop:
    (tmp_path / "models").mkdir()
    return Workshop(make_models(tied=False), tmp_path / "models")


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


def test_nothing_is_written(shop, tmp_path):
    file = write_recipe(shop.recipe(), tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check_file(file, "--out", tmp_path / "merged")
    assert sorted(tmp_path.rglob("*")) == before


def test_disk_space_is_checked_where_the_output_goes(shop, tmp_path, monkeypatch):
    recipe = shop.recipe()
    needed = sum(t.numel() for t in shop.weights(0).values()) * 4
    asked = []

    def disk_usage(path):
        asked.append(Path(path))
        return shutil._ntuple_diskusage(needed, 1, free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    free = needed - 1
    out = tmp_path / "not" / "yet" / "there"
    (problem,) = problems_of(recipe, tmp_path, "--out", out)
    assert problem["where"] == "recipe"
    assert str(out) in problem["what"]
    assert asked == [tmp_path]
    assert "free" in refusal(recipe, tmp_path)

    check_recipe({**recipe, "out_dtype": "bfloat16"}, tmp_path, "--out", out)
    problems_of({**recipe, "dtype": "float64"}, tmp_path, "--out", out)
    free = needed
    check_recipe(recipe, tmp_path, "--out", out)


@pytest.mark.parametrize("which", ["base", "agent", "link"])
def test_output_is_not_an_input(which, shop, tmp_path):
    out = shop.base if which == "base" else shop.agents[0]
    if which == "link":
        out = tmp_path / "link"
        out.symlink_to(shop.agents[0])
    before = (shop.agents[0] / "model.safetensors").read_bytes()
    (problem,) = problems_of(shop.recipe(), tmp_path, "--out", out)
    assert str(out) in problem["what"]
    file = write_recipe(shop.recipe(), tmp_path)
    assert problem["what"] in invoke_refused(run_yaml.main, file, out)
    assert (shop.agents[0] / "model.safetensors").read_bytes() == before


def test_output_below_a_file_is_refused(shop, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "merged"):
        (problem,) = problems_of(shop.recipe(), tmp_path, "--out", out)
        assert "is a file" in problem["what"]


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


# --- Shards and indexes ---------------------------------------------------------------------------


def sharded(make_models, directory: Path, **settings) -> Workshop:
    (directory / "models").mkdir()
    return Workshop(make_models(shards=3, **settings), directory / "models")


def edit_index(directory: Path, edit: Callable[[dict], object]) -> Path:
    (file,) = directory.glob("*.index.json")
    content = json.loads(file.read_text())
    edited = edit(content)
    file.write_text(edited if isinstance(edited, str) else json.dumps(content))
    return file


INDEXES = {
    "not json": lambda index: "{",
    "empty file": lambda index: "",
    "list": lambda index: "[1]",
    "no weight_map": lambda index: index.pop("weight_map"),
    "empty weight_map": lambda index: index.update(weight_map={}),
    "list for a weight_map": lambda index: index.update(weight_map=["a"]),
    "numbers for files": lambda index: index.update(weight_map={"a": 1}),
    "null for a file": lambda index: index["weight_map"].update(a=None),
}


@pytest.mark.parametrize("edit", INDEXES.values(), ids=INDEXES)
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
def test_corrupt_index_is_named(edit, pickled, make_models, tmp_path, no_weight_is_read):
    shop = sharded(make_models, tmp_path, pickle=pickled)
    file = edit_index(shop.agents[1], edit)
    (problem,) = problems_of(shop.recipe(), tmp_path)
    assert problem["where"] == str(shop.agents[1])
    assert str(file) in problem["what"]
    assert problem["what"] in refusal(shop.recipe(), tmp_path)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize(
    "damage", ["missing", "truncated", "empty", "directory", "text", "other tensors"]
)
def test_damaged_shard_is_named(damage, pickled, make_models, tmp_path, no_weight_is_read):
    shop = sharded(make_models, tmp_path, pickle=pickled)
    file = sorted(shop.agents[2].glob("*-of-*"))[1]
    content = file.read_bytes()
    file.unlink()
    if damage == "directory":
        file.mkdir()
    elif damage == "other tensors":
        checkpoints.save_state_dict(file, {"other": torch.zeros(2)})
    elif damage != "missing":
        left = {"truncated": content[:-50], "empty": b"", "text": b"no weights at all"}
        file.write_bytes(left[damage])
    (problem,) = problems_of(shop.recipe(), tmp_path)
    assert problem["where"] == str(shop.agents[2])
    assert str(file) in problem["what"]
    assert problem["what"] in refusal(shop.recipe(), tmp_path)


def test_shard_without_permission_is_named(make_models, tmp_path, monkeypatch):
    shop = sharded(make_models, tmp_path)
    file = str(sorted(shop.agents[2].glob("*-of-*"))[1])
    real = open

    def forbidding(path, *args, **kwargs):  # as root, no mode keeps a file from us
        if str(path) == file:
            raise PermissionError(13, "Permission denied", file)
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", forbidding)
    (problem,) = problems_of(shop.recipe(), tmp_path)
    assert f"{file}: Permission denied" in problem["what"]


def test_damaged_shards_of_all_models_are_named_at_once(make_models, tmp_path):
    shop = sharded(make_models, tmp_path)
    files = [sorted(a.glob("*-of-*"))[i] for i, a in enumerate(shop.agents)]
    for file in files:
        file.write_bytes(file.read_bytes()[:-10])
    message = refusal(shop.recipe(), tmp_path)
    assert "3 problems" in message
    assert all(str(file) in message for file in files)


# --- Pickles --------------------------------------------------------------------------------------


class Exploit:
    """Unpickled, it would create a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mknod, (str(self.file),)


@pytest.mark.parametrize("lazy", [(), ("--lazy-unpickle",)], ids=["eager", "lazy"])
@pytest.mark.parametrize("form", ["torch", "legacy torch", "plain pickle"])
@pytest.mark.parametrize("entry", ["yaml", "sharded", "pytorch"])
def test_malicious_pickle_is_refused_and_not_run(entry, form, lazy, make_models, tmp_path):
    mark = tmp_path / "run"
    content = {"model.norm.weight": torch.ones(16), "more": Exploit(mark)}

    def plant(file: Path):
        if form == "plain pickle":
            file.write_bytes(pickle.dumps(content))
        else:
            zipped = form == "torch"
            torch.save(content, file, _use_new_zipfile_serialization=zipped)

    plant(tmp_path / "proof.bin")
    if form == "plain pickle":
        pickle.loads((tmp_path / "proof.bin").read_bytes())
    else:
        torch.load(tmp_path / "proof.bin", weights_only=False)
    assert mark.exists()
    mark.unlink()

    if entry == "pytorch":
        base, agents = state_dicts(make_models())
        recipe = raw_recipe(tmp_path, base, agents, "ram", ".bin")
        file, command = Path(recipe["models"][1]["model"]), raw_pytorch.main
    else:
        shards = 3 if entry == "sharded" else 1
        (tmp_path / "models").mkdir()
        models = make_models(pickle=True, shards=shards)
        shop = Workshop(models, tmp_path / "models")
        recipe, command = shop.recipe(), run_yaml.main
        file = sorted(shop.agents[1].glob("*.bin"))[0]
    plant(file)
    (problem,) = problems_of(recipe, tmp_path)
    assert str(file) in problem["what"]
    out = tmp_path / "merged"
    message = invoke_refused(command, write_recipe(recipe, tmp_path), out, *lazy)
    assert str(file) in message
    assert not out.exists()
    assert not mark.exists()


def test_shapes_of_pickles_are_compared(make_models, tmp_path, no_weight_is_read):
    (tmp_path / "models").mkdir()
    shop = Workshop(make_models(pickle=True), tmp_path / "models")
    file = shop.agents[1] / "pytorch_model.bin"
    weights = torch.load(file, weights_only=True)
    weights["model.norm.weight"] = torch.zeros(3)
    torch.save(weights, file)
    (problem,) = problems_of(shop.recipe(), tmp_path)
    assert "model.norm.weight [3] for the base's [16]" in problem["what"]


def test_check_reads_no_weights_of_pickles(make_models, tmp_path, monkeypatch):
    recipe = make_models(pickle=True).recipe("ramplus")

    def refuse(*_):
        raise AssertionError("a weight was read")

    lazy = mergekit.io.lazy_unpickle
    monkeypatch.setattr(lazy.DeferredLoad, "execute", refuse)
    monkeypatch.setattr("mergekit.io.loader.DumbPytorchLoader.__init__", refuse)
    monkeypatch.setattr("mergekit.io.ShardedTensorIndex.from_file", refuse)
    check_recipe(recipe, tmp_path)


@pytest.mark.parametrize("form", ["parameters", "legacy"])
def test_pickles_that_mergekit_loads_are_fine(form, make_models, tmp_path):
    (tmp_path / "models").mkdir()
    shop = Workshop(make_models(pickle=True), tmp_path / "models")
    file = shop.agents[1] / "pytorch_model.bin"
    weights = torch.load(file, weights_only=True)
    if form == "parameters":
        torch.save({n: torch.nn.Parameter(t) for n, t in weights.items()}, file)
    else:
        torch.save(weights, file, _use_new_zipfile_serialization=False)
    check_recipe(shop.recipe("ramplus"), tmp_path)
    merge(shop.recipe("ramplus"), tmp_path)


# --- mergekit-pytorch and mergekit-multi ----------------------------------------------------------


def raw_refusal(recipe, directory: Path, *options) -> str:
    out = directory / "merged"
    file = write_recipe(recipe, directory)
    message = invoke_refused(raw_pytorch.main, file, out, *options)
    assert not out.exists()
    assert not list(directory.glob(".*partial*"))
    return message


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_all_problems_of_files_come_in_one_error(suffix, make_models, tmp_path, no_weight_is_read):
    base, agents = state_dicts(make_models())
    del agents[0]["model.norm.weight"]
    agents[1]["model.embed_tokens.weight"] = torch.zeros(50, 16)
    recipe = raw_recipe(tmp_path, base, agents, "ramplus", suffix, r=-1.0)
    recipe["models"] += [recipe["models"][0], {"model": str(tmp_path / f"no{suffix}")}]
    recipe["out_dtype"] = "int8"
    problems = problems_of(recipe, tmp_path)
    first, second, *_, last = (model["model"] for model in recipe["models"])
    assert_told(problems, first, "1 tensor missing: model.norm.weight")
    assert_told(problems, last, "No such file")
    assert_told(problems, "recipe", first, "same model")
    assert_told(problems, "recipe", "out_dtype: int8")
    message = raw_refusal(recipe, tmp_path)
    assert all(problem["what"] in message for problem in problems)

    # What only planning shows, once every file is there.
    recipe["models"].pop()
    problems = problems_of(recipe, tmp_path)
    assert_told(problems, first, "1 tensor missing: model.norm.weight")
    assert_told(problems, second, "model.embed_tokens.weight [50, 16]", "[48, 16]")
    assert_told(problems, "recipe", "r: -1.0", "more)")
    message = raw_refusal(recipe, tmp_path)
    assert all(problem["what"] in message for problem in problems)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda recipe: recipe.pop("base_model"), "no base_model"),
        (
            lambda recipe: recipe.update(models=[{"model": recipe["base_model"]}]),
            "no agent besides the base",
        ),
        (lambda recipe: recipe.update(models=[]), "no agent besides the base"),
        (lambda recipe: recipe.update(dtype="int64"), "dtype: int64"),
    ],
)
def test_problem_of_a_recipe_of_files(change, told, make_models, tmp_path, no_weight_is_read):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    change(recipe)
    assert_told(problems_of(recipe, tmp_path), "recipe", told)
    assert told in raw_refusal(recipe, tmp_path)


@pytest.mark.parametrize("nested", [True, False], ids=["state_dict", "number"])
def test_file_that_is_no_plain_state_dict_is_refused(nested, make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ram", ".bin")
    file = recipe["models"][0]["model"]
    content = {"state_dict": agents[0]} if nested else {**agents[0], "epoch": 3}
    torch.save(content, file)
    (problem,) = problems_of(recipe, tmp_path)
    assert problem["where"] == file
    assert "is not a tensor" in problem["what"]
    assert problem["what"] in raw_refusal(recipe, tmp_path)


def test_tensors_that_differ_are_fine_where_an_option_says_which_to_merge(make_models, tmp_path):
    base, agents = state_dicts(make_models())
    del agents[0]["model.norm.weight"]
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    assert len(problems_of(recipe, tmp_path)) == 1
    check_recipe(recipe, tmp_path, "--tensor-union")
    check_recipe(recipe, tmp_path, "--tensor-intersection")
    # What no agent has would not be merged.
    raw_pytorch.SimpleLoaderCache().loaders.clear()
    for agent in agents[1:]:
        del agent["model.norm.weight"]
    problems = problems_of(raw_recipe(tmp_path, base, agents, "ram"), tmp_path)
    assert [p["where"] for p in problems] == [m["model"] for m in recipe["models"]]
    # RAM needs the base's.
    raw_pytorch.SimpleLoaderCache().loaders.clear()
    agents[1]["more"] = torch.ones(3)
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    problems = problems_of(recipe, tmp_path, "--tensor-union")
    assert_told(problems, recipe["base_model"], "1 tensor missing: more")
    assert "missing: more" in raw_refusal(recipe, tmp_path, "--tensor-union")
    check_recipe(recipe, tmp_path, "--tensor-intersection")


def test_file_does_not_overwrite_an_input(make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    recipe["models"][0]["model"] = checkpoints.save_state_dict(
        tmp_path / "model.safetensors", agents[0]
    )
    (problem,) = problems_of(recipe, tmp_path, "--out", tmp_path)
    assert "is the input" in problem["what"]
    file = write_recipe(recipe, tmp_path)
    assert problem["what"] in invoke_refused(raw_pytorch.main, file, tmp_path)


def multi_refusal(content: str, directory: Path) -> str:
    file = directory / "multi.yml"
    file.write_text(content)
    arguments = [file, "-I", directory / "steps", "--out-path", directory / "merged"]
    message = invoke_refused(multimerge.main, *arguments)
    assert list((directory / "steps").iterdir()) == []
    return message


def test_problems_of_all_steps_come_before_the_first_is_merged(shop, tmp_path, no_weight_is_read):
    content = MULTI.format(base=shop.base, agents=shop.agents)
    missing_tensors(shop, {})
    truncated = shop.agents[2] / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-1])
    content = content.replace("alpha: 10.0", "alpha: -1.0")
    told = ["4 tensors missing", str(truncated), "alpha: -1.0"]
    message = multi_refusal(content, tmp_path)
    assert all(part in message for part in told)
    assert message.count("alpha: -1.0") == 2
    problems = problems_of(content, tmp_path)
    assert_told(problems, "recipe halfway", "alpha: -1.0")
    assert_told(problems, "recipe without name", "alpha: -1.0")
    assert len(problems) == 4


def test_steps_without_problems_are_fine(shop, tmp_path, no_weight_is_read):
    check_recipe(MULTI.format(base=shop.base, agents=shop.agents), tmp_path)


# --- Models that are not at hand ------------------------------------------------------------------


@pytest.fixture
def hub(make_models, tmp_path, monkeypatch) -> Workshop:
    """Models on a hub of which only configs and headers can be had."""
    (tmp_path / "hub").mkdir()
    shop = Workshop(make_models(tied=False), tmp_path / "hub")
    real = ModelReference.config

    def config(self, trust_remote_code=False):
        path = self.model.path.replace("org/", f"{shop.directory}/")
        return real(ModelReference.parse(path), trust_remote_code)

    def metadata(repo, revision=None):
        file = str(shop.directory / repo.removeprefix("org/") / "model.safetensors")
        return huggingface_hub.utils.SafetensorsRepoMetadata(
            metadata=None,
            sharded=False,
            weight_map={},
            files_metadata={
                "model.safetensors": huggingface_hub.utils._safetensors.SafetensorsFileMetadata(
                    metadata={},
                    tensors={
                        name: huggingface_hub.utils._safetensors.TensorInfo(
                            dtype="F32", shape=list(tensor.shape), data_offsets=(0, 0)
                        )
                        for name, tensor in load_file(file).items()
                    },
                )
            },
        )

    def refuse(*_, **__):
        raise AssertionError("a model was downloaded")

    monkeypatch.setattr(ModelReference, "config", config)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", refuse)
    return shop


def hub_recipe(shop: Workshop) -> dict:
    return {
        "merge_method": "ramplus",
        "base_model": f"org/{shop.base.name}",
        "models": [{"model": f"org/{agent.name}"} for agent in shop.agents],
    }


def test_models_on_the_hub_are_checked_before_they_are_downloaded(hub, tmp_path):
    recipe = hub_recipe(hub)
    check_recipe(recipe, tmp_path)
    missing_tensors(hub, recipe)
    other_vocabulary(hub, recipe)
    recipe["parameters"] = {"alpha": -1.0}
    problems = problems_of(recipe, tmp_path)
    assert_told(problems, f"org/{hub.agents[0].name}", "4 tensors missing")
    assert_told(problems, f"org/{hub.agents[1].name}", "tokenizer")
    assert_told(problems, "recipe", "alpha: -1.0")
    message = refusal(recipe, tmp_path)
    assert all(problem["what"] in message for problem in problems)


def test_check_leaves_mergekits_loaders_alone(hub, shop, tmp_path):
    cache = LoaderCache()
    before = dict(cache.loaders)
    check_recipe(hub_recipe(hub), tmp_path)
    assert cache.loaders == before
    assert "loaders" not in vars(cache)
    merge(shop.recipe(), tmp_path)


@pytest.fixture
def with_lora(shop) -> dict:
    """A recipe whose first agent is a LoRA on the base."""
    adapter = shop.directory / "adapter"
    model = AutoModelForCausalLM.from_pretrained(shop.base)
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, settings).save_pretrained(adapter)
    recipe = shop.recipe("ramplus")
    recipe["models"][0]["model"] = f"{shop.base}+{adapter}"
    return recipe


def test_lora_is_checked_without_being_merged(with_lora, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the LoRA was merged")

    monkeypatch.setattr("peft.PeftModel.from_pretrained", refuse)
    check_recipe(with_lora, tmp_path)
    with_lora["parameters"] = {"alpha": -1.0}
    (problem,) = problems_of(with_lora, tmp_path)
    cache = ["--lora-merge-cache", str(tmp_path / "cache")]
    assert problem["what"] in refusal(with_lora, tmp_path, *cache)
    assert not (tmp_path / "cache").exists()


def test_lora_merges_where_it_has_a_cache(with_lora, tmp_path):
    assert "--lora-merge-cache" in refusal(with_lora, tmp_path)
    cache = ["--lora-merge-cache", str(tmp_path / "cache")]
    assert "model.norm.weight" in merge(with_lora, tmp_path, *cache)


# --- Recipes with nothing wrong -------------------------------------------------------------------


def slices(models: Models) -> dict:
    sources = [models.base_path, *models.agent_paths]
    return {
        "merge_method": "ramplus",
        "base_model": models.base_path,
        "slices": [
            {"sources": [{"model": m, "layer_range": taken} for m in sources]}
            for taken in ([0, 2], [1, 3])
        ],
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "qwen2", "tied": True},
        {"architecture": "qwen2", "tied": False},
        {"architecture": "llama", "tied": False, "shards": 3},
        {"architecture": "mistral", "pickle": True},
        {"architecture": "llama", "pickle": True, "shards": 2},
        {"architecture": "gemma2"},
        {"architecture": "glm4", "tied": False},
        {"architecture": "t5"},
        {"dtypes": (BF16, BF16, F32)},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_good_checkpoints_have_no_problem(settings, method, make_models, tmp_path):
    recipe = make_models(**settings).recipe(method)
    check_recipe(recipe, tmp_path, "--out", tmp_path / "merged")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_examples_have_no_problem(example, make_models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = make_models(tied=False, num_hidden_layers=4)
    content = yaml.safe_load(example.read_text())
    names = model_paths(content)
    for name, path in zip(names, [models.base_path, *models.agent_paths] * 2):
        if not os.path.exists(name):
            shutil.copytree(path, name)
    if "tokenizer" in content:
        for name in names:
            checkpoints.make_tokenizer(TOKENS).save_pretrained(name)
    check_file(example)


def model_paths(content: dict) -> list[str]:
    """The base of a recipe, then its agents."""
    config = MergeConfiguration.model_validate(content)
    base = config.base_model.model.path
    paths = sorted(model.model.path for model in config.referenced_models())
    return [base, *(path for path in paths if path != base)]


def test_good_recipes_of_other_forms_have_no_problem(make_models, tmp_path):
    models = make_models("llama", tied=False)
    check_recipe(slices(models), tmp_path)
    recipe = models.recipe("ram")
    recipe["models"].insert(0, {"model": models.base_path})
    check_recipe(recipe, tmp_path)
    check_recipe({**recipe, "dtype": "bfloat16", "out_dtype": "float32"}, tmp_path)


def test_tied_agents_of_an_untied_base_have_no_problem(make_models, tmp_path):
    untied, tied = make_models(tied=False), make_models(tied=True)
    recipe = untied.recipe("ram")
    recipe["models"][0]["model"] = tied.agent_paths[0]
    check_recipe(recipe, tmp_path)
    merge(recipe, tmp_path)


def test_missing_optional_tensors_are_no_problem(make_models, tmp_path):
    (tmp_path / "models").mkdir()
    shop = Workshop(make_models("glm4", tied=False), tmp_path / "models")
    weights = shop.weights(0)
    name = "model.layers.1.self_attn.q_proj.bias"
    del weights[name]
    shop.save(0, weights)
    check_recipe(shop.recipe("ram"), tmp_path)
    assert name in merge(shop.recipe("ram"), tmp_path)


@pytest.mark.parametrize("source", ["base", "union"])
@pytest.mark.parametrize("padding", [None, 32])
def test_vocabularies_that_are_aligned_are_no_problem(source, padding, spoken, tmp_path):
    recipe = spoken.recipe("ram")
    assert "tokenizer" in str(problems_of(recipe, tmp_path))
    check_recipe(recipe, tmp_path, "--unsafe-truncate-embeddings")
    recipe["tokenizer"] = {"source": source, "pad_to_multiple_of": padding}
    check_recipe(recipe, tmp_path)
    merge(recipe, tmp_path)


def test_modules_have_no_problem(make_models, tmp_path):
    models = make_models("t5")
    config = MergeConfiguration.model_validate(models.recipe("ram"))
    names = get_architecture_info(config, MergeOptions()).modules
    recipe = models.recipe("ramplus")
    recipe["modules"] = dict.fromkeys(names, {"models": recipe.pop("models")})
    check_recipe(recipe, tmp_path)


def opt(directory: Path, *, layers: int = 2, agents: int = 2) -> Models:
    """Of an architecture that mergekit only knows from the weights."""
    config = OPTConfig(
        vocab_size=48,
        hidden_size=16,
        ffn_dim=24,
        num_attention_heads=2,
        num_hidden_layers=layers,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    )
    config.architectures = ["OPTForCausalLM"]
    model = AutoModelForCausalLM.from_config(config)
    base = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    seeds = range(1, 1 + agents)
    return save_models(directory, config, base, [checkpoints.change(base, seed) for seed in seeds])


def test_architecture_without_description_has_no_problem(tmp_path):
    models = opt(tmp_path)
    check_recipe(models.recipe("ramplus"), tmp_path)
    merge(models.recipe("ramplus"), tmp_path)
    file = Path(models.agent_paths[0]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    LoaderCache().loaders.clear()
    assert_told(
        problems_of(models.recipe("ramplus"), tmp_path),
        models.agent_paths[0],
        f"{file}: ",
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("method", METHODS)
def test_good_files_have_no_problem(suffix, method, make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, method, suffix)
    check_recipe(recipe, tmp_path, "--out", tmp_path / "merged")
