"""Configs that mergekit cannot do with are refused by file, with what to do instead."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.scripts import run_yaml

from support import checkpoints
from support.spoilt import refusals

CONFIGS = {
    "not JSON": ("{", "not JSON"),
    "a list": ("[1]", "a list where"),
    "empty": ("", "not JSON"),
    "no architectures": ({"architectures": ...}, "names no architecture"),
    "null": ({"architectures": None}, "names no architecture"),
    "none": ({"architectures": []}, "names no architecture"),
    "two": ({"architectures": ["A", "B"]}, "not one name"),
}


@pytest.mark.parametrize("which", [0, 1], ids=["base", "agent"])
@pytest.mark.parametrize(("content", "told"), CONFIGS.values(), ids=CONFIGS)
def test_config_that_cannot_be_used_is_named(content, told, which, models, tmp_path):
    file = models[which] / "config.json"
    if not isinstance(content, str):
        entries = {**json.loads(file.read_text()), **content}
        content = json.dumps({k: v for k, v in entries.items() if v is not ...})
    file.write_text(content)
    for message in refusals(tmp_path, models):
        assert f"{file}: " in message
        assert told in message
        assert "1 problem" in message


def test_architecture_may_be_named_by_the_recipe(models, tmp_path):
    file = models[1] / "config.json"
    entries = {**json.loads(file.read_text()), "architectures": None}
    file.write_text(json.dumps(entries))
    recipe = {
        "merge_method": "ram",
        "base_model": str(models[0]),
        "models": [
            {
                "model": {
                    "model": {"path": str(models[1])},
                    "override_architecture": "Qwen2ForCausalLM",
                }
            }
        ],
    }
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    arguments = [str(tmp_path / "recipe.yml"), str(tmp_path / "merged")]
    result = CliRunner().invoke(run_yaml.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("named", [True, False])
def test_adapter_in_place_of_a_model_is_pointed_out(named, models, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"base_model_name_or_path": "org/its-base"} if named else {}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    checkpoints.save_state_dict(adapter / "adapter_model.safetensors", {"a": torch.zeros(1)})
    for message in refusals(tmp_path, [*models, adapter]):
        assert "it is a LoRA adapter" in message
        assert f"{'org/its-base' if named else 'base'}+{adapter}" in message
        assert "1 problem" in message
