"""Architectures that mergekit cannot merge, or not under that name."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from mergekit.scripts import run_yaml

from mergekit_ram import cli
from support import checkpoints
from support.everywhere import (
    assert_merged,
    everywhere,
    refused_everywhere,
    run,
    save_models,
    write,
)
from support.recipes import recipe_of


@pytest.mark.parametrize("name", ["FSDPQwen2ForCausalLM", "DeepSpeedQwen2ForCausalLM"])
def test_wrapper_left_before_an_architecture_is_warned_of_and_left_out(name, tmp_path, caplog):
    models, paths = save_models(
        tmp_path, configure=lambda config: config.update(architectures=[name])
    )
    caplog.set_level(logging.WARNING)
    assert_merged(everywhere(tmp_path, recipe_of(*paths)), models)
    assert any("wrapper" in record.message for record in caplog.records)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_other_architecture_is_told_how_to_be_overridden(tmp_path):
    _, paths = save_models(tmp_path)
    file = tmp_path / "model1" / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["MyOwnForCausalLM"]}
    file.write_text(json.dumps(config))
    result = run(cli.main, "check", write(tmp_path, recipe_of(*paths)))
    assert result.exit_code == 1
    assert "override_architecture" in result.output
    assert "--allow-crimes" in result.output


def test_bert_is_a_limit_of_mergekit(tmp_path):
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = transformers.BertModel(config)
    for i in range(3):
        model.save_pretrained(tmp_path / f"bert{i}")
    paths = [str(tmp_path / f"bert{i}") for i in range(3)]
    for said in refused_everywhere(tmp_path, recipe_of(*paths)):
        assert "this is a limit of mergekit" in said


def test_model_that_needs_remote_code_is_told_the_option_in_whole_sentences(tmp_path):
    _, paths = save_models(
        tmp_path,
        configure=lambda config: config.update(
            model_type="my_own",
            auto_map={"AutoConfig": "configuration_my_own.MyOwnConfig"},
        ),
    )
    for path in paths:
        with open(f"{path}/configuration_my_own.py", "w") as file:
            file.write("import transformers\n")
    for said in refused_everywhere(tmp_path, recipe_of(*paths)):
        assert "--trust-remote-code" in said
        assert "[...]" not in said
        assert "update mergekit" not in said


def test_multimodal_model_is_refused_in_a_line(tmp_path):
    text = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    config.architectures = ["Gemma3ForConditionalGeneration"]
    torch.manual_seed(0)
    weights = transformers.Gemma3ForConditionalGeneration(config).state_dict()
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    paths = [checkpoints.save(tmp_path / f"model{i}", config, weights) for i in range(3)]
    file = write(tmp_path, recipe_of(*paths))
    checked = run(cli.main, "check", file)
    merged = run(run_yaml.main, file, tmp_path / "merged")
    for result in (checked, merged):
        assert result.exit_code == 1
        assert "this is a limit of mergekit" in result.output
        assert "text_config" not in result.output
        said = result.output.splitlines()
        assert max(len(line) for line in said if "loader cache" not in line) < 400
