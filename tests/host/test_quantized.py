"""Quantized checkpoints are recognized in every format."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from click.testing import CliRunner
from mergekit.scripts import merge_raw_pytorch
from safetensors.torch import save_file

from mergekit_ram.host.checkpoint import Checkpoint
from support.recipes import recipe_of, write_recipe
from support.spoilt import merged

F8 = torch.float8_e4m3fn
QUANTIZED = {
    "float8": ({"l.weight": torch.ones(4, 4).to(F8)}, {}),
    "float8 e5m2": ({"l.weight": torch.ones(4, 4).to(torch.float8_e5m2)}, {}),
    "int8": ({"l.weight": torch.ones(4, 4).to(torch.int8)}, {}),
    "uint8": ({"l.weight": torch.ones(4, 4).to(torch.uint8)}, {}),
    "scale beside": ({"l.weight": torch.ones(4, 4), "l.weight_scale": torch.ones(1)}, {}),
    "scale elsewhere": ({"l.weight": torch.ones(4)}, {"l.weight_scale_inv": torch.ones(1)}),
    "gptq": ({"l.qweight": torch.ones(4).int()}, {"l.qzeros": torch.ones(1).int()}),
    "bitsandbytes": ({"l.weight": torch.ones(4)}, {"l.weight.absmax": torch.ones(1)}),
}


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_files_are_recognized_in_every_format(kind, suffix, tmp_path):
    weights = QUANTIZED[kind][0] | QUANTIZED[kind][1]
    file = tmp_path / f"model.{suffix}"
    save_file(weights, file) if suffix == "safetensors" else torch.save(weights, file)
    assert Checkpoint.of_file(str(file)).quantization


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_shards_are_recognized_wherever_the_scale_lies(kind, pickled, tmp_path):
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    places = {}
    for i, weights in enumerate(QUANTIZED[kind]):
        if weights:
            name = f"{stem}-{i}.{suffix}"
            save = torch.save if pickled else save_file
            save(weights, tmp_path / name)
            places |= dict.fromkeys(weights, name)
    index = tmp_path / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert Checkpoint.of_directory(str(tmp_path)).quantization


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
def test_float8_files_are_refused_by_mergekit_pytorch(suffix, tmp_path):
    files = [tmp_path / f"{i}.{suffix}" for i in range(3)]
    for i, file in enumerate(files):
        weights = {"a.weight": (torch.ones(4, 4) * i).to(F8 if i == 1 else torch.bfloat16)}
        save_file(weights, file) if suffix == "safetensors" else torch.save(weights, file)
    write_recipe(recipe_of(*map(str, files)), tmp_path)
    arguments = [str(tmp_path / "recipe.yml"), str(tmp_path / "merged")]
    result = CliRunner().invoke(merge_raw_pytorch.main, arguments)
    assert result.exit_code == 1
    assert "quantized" in result.output
    assert str(files[1]) in result.output
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("which", [0, 1])
def test_leftover_quantization_config_is_warned_of_and_left_out(which, models, tmp_path, caplog):
    file = models[which] / "config.json"
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    caplog.set_level(logging.WARNING)
    result = merged(tmp_path)
    assert result.exit_code == 0, result.output
    told = [r.message for r in caplog.records if "quantization_config" in r.message]
    assert len(told) == 1
    assert str(models[which]) in told[0]
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    assert told[0] in report["warnings"]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_plain_floats_are_not_taken_for_quantized(dtype, suffix, tmp_path):
    weights = {"l.weight": torch.ones(4, 4, dtype=dtype)}
    file = tmp_path / f"model.{suffix}"
    save_file(weights, file) if suffix == "safetensors" else torch.save(weights, file)
    assert Checkpoint.of_file(str(file)).quantization is None
