"""Models on the Hub and LoRAs are checked before they are fetched or merged."""

from __future__ import annotations

import huggingface_hub
import pytest
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.commands import merge, refusal
from support.workshop import (
    Workshop,
    assert_told,
    check_recipe,
    missing_tensors,
    other_vocabulary,
    problems_of,
)


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
