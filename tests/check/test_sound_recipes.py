"""Recipes with nothing wrong have no problem."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from transformers import AutoModelForCausalLM, OPTConfig

from support import checkpoints
from support.commands import merge
from support.expected import METHODS
from support.recipes import EXAMPLES, TOKENS, Models, raw_recipe, save_models, state_dicts
from support.tensors import BF16, F32
from support.workshop import Workshop, assert_told, check_file, check_recipe, problems_of


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
