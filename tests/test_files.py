"""Files of checkpoints as real life has them: what cannot be read is refused by name, what mergekit
merges is merged.
"""

from __future__ import annotations

import json
import logging
import os
import struct

import checkpoints
import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import merge_raw_pytorch, run_yaml
from safetensors.torch import save_file

from mergekit_ram import cli
from mergekit_ram.host.checkpoint import Checkpoint

F8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def forget_loaders():
    yield
    LoaderCache().loaders.clear()
    merge_raw_pytorch.SimpleLoaderCache().loaders.clear()


@pytest.fixture
def models(tmp_path):
    """Directories of a base and two agents, and the recipe's file."""
    config, base = checkpoints.make_base("qwen2", tied=False)
    weights = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [tmp_path / f"model{i}" for i in range(3)]
    for path, its in zip(paths, weights, strict=True):
        checkpoints.save(path, config, checkpoints.cast(its, torch.bfloat16), shards=2)
    write_recipe(tmp_path / "recipe.yml", *paths)
    return paths


def write_recipe(file, base, *agents, method="ram"):
    content = {
        "merge_method": method,
        "base_model": str(base),
        "models": [{"model": str(agent)} for agent in agents],
    }
    file.write_text(yaml.safe_dump(content))


def merged(tmp_path, *options):
    arguments = [str(tmp_path / "recipe.yml"), str(tmp_path / "merged"), *options]
    return CliRunner().invoke(run_yaml.main, arguments)


def refused(tmp_path) -> str:
    """What both the check and the merge say of the recipe."""
    result = merged(tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert not (tmp_path / "merged").exists()
    checked = CliRunner().invoke(cli.check, [str(tmp_path / "recipe.yml")])
    assert checked.exit_code == 1
    assert isinstance(checked.exception, SystemExit), repr(checked.exception)
    return result.output + checked.output


# --- Indexes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        "/dev/zero",
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "ABSOLUTE",
        "fifo",
        "directory.safetensors",
        "link-to-device",
        "absent.safetensors",
    ],
)
def test_index_entry_that_is_no_file_of_the_model_is_refused(entry, models, tmp_path):
    agent = models[1]
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    os.mkfifo(agent / "fifo")
    (agent / "directory.safetensors").mkdir()
    (agent / "link-to-device").symlink_to("/dev/zero")
    if entry == "ABSOLUTE":
        entry = str(tmp_path / "secret.safetensors")
    index = agent / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = entry
    index.write_text(json.dumps(content))
    said = refused(tmp_path)
    assert entry in said
    assert str(agent) in said


def test_links_of_the_hubs_cache_to_its_blobs_are_files(models, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(models[1].iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(f"../blobs/{i}")
    assert not Checkpoint.of_directory(str(models[1])).faults
    assert merged(tmp_path).exit_code == 0


# --- Damaged headers ------------------------------------------------------------------------------


def safetensors_file(header, data=b"\0" * 8, length=None) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def tensor(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "empty": b"",
    "length beyond the file": safetensors_file({"a": tensor([2], 0, 8)}, length=10**6),
    "length of 2 to the 63": safetensors_file({"a": tensor([2], 0, 8)}, length=1 << 63),
    "negative offset": safetensors_file({"a": tensor([2], -8, 0)}),
    "offset beyond the file": safetensors_file({"a": tensor([200], 0, 800)}),
    "huge offset": safetensors_file({"a": tensor([2], 1 << 70, (1 << 70) + 8)}),
    "overlapping spans": safetensors_file({"a": tensor([2], 0, 8), "b": tensor([1], 4, 8)}),
    "size of 2 to the 63": safetensors_file({"a": tensor([1 << 63], 0, 8)}),
    "product over 2 to the 64": safetensors_file({"a": tensor([1 << 40, 1 << 40], 0, 8)}),
    "zero times 2 to the 63": safetensors_file({"a": tensor([0, 1 << 63], 0, 0)}, b""),
    "no JSON": safetensors_file(b"{" * 100),
    "a list": safetensors_file([1, 2]),
    "no text": safetensors_file(b"\xff" * 100),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_damaged_headers_are_refused_by_file(damage, models, tmp_path):
    file = models[1] / "model-00001-of-00002.safetensors"
    file.write_bytes(HEADERS[damage])
    assert str(file) in refused(tmp_path)


def test_header_of_200_megabytes_is_refused_without_reading_it(models, tmp_path):
    file = models[1] / "model-00001-of-00002.safetensors"
    with open(file, "wb") as sparse:
        sparse.write(struct.pack("<Q", 200_000_000))
        sparse.truncate(200_000_100)
    assert str(file) in refused(tmp_path)


def test_index_of_more_than_200_megabytes_is_refused_without_reading_it(models, tmp_path):
    index = models[1] / "model.safetensors.index.json"
    with open(index, "wb") as sparse:
        sparse.truncate(300_000_000)
    assert str(index) in refused(tmp_path)


# --- Quantized weights ----------------------------------------------------------------------------

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
    write_recipe(tmp_path / "recipe.yml", *files)
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


# --- Pickles --------------------------------------------------------------------------------------

BESIDE = {
    "bool": torch.tensor([True, False]),
    "complex": torch.ones(2, dtype=torch.complex64),
    "int": torch.arange(3),
    "no elements": torch.zeros(0, 3),
    "no dimensions": torch.tensor(1.0),
    "none": None,
    "a number": 3,
    "a dictionary": {"lr": 0.1},
}


def as_pickled(kind, weights):
    first = "model.norm.weight"
    changed = dict(weights)
    if kind == "parameter":
        changed = {name: torch.nn.Parameter(w) for name, w in weights.items()}
    elif kind == "strided":
        wide = torch.stack([weights[first], weights[first]], 1)
        changed[first] = wide[:, 0]
    elif kind == "shared":
        whole = torch.cat([weights[first], weights[first]])
        changed[first] = whole[: weights[first].numel()]
        changed["unused"] = whole
    else:
        changed["unused"] = BESIDE[kind]
    return changed


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", [*BESIDE, "parameter", "strided", "shared"])
def test_pickles_are_merged_as_mergekit_merges_them(kind, zipped, tmp_path):
    config, base = checkpoints.make_base("qwen2", tied=False)
    weights = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [tmp_path / f"model{i}" for i in range(3)]
    for path, its in zip(paths, weights, strict=True):
        path.mkdir()
        config.save_pretrained(path)
        torch.save(
            as_pickled(kind, its),
            path / "pytorch_model.bin",
            _use_new_zipfile_serialization=zipped,
        )
    write_recipe(tmp_path / "recipe.yml", *paths)
    checked = CliRunner().invoke(cli.check, [str(tmp_path / "recipe.yml")])
    assert checked.exit_code == 0, checked.output
    result = merged(tmp_path)
    assert result.exit_code == 0, result.output
    output = checkpoints.read(tmp_path / "merged")
    for name, tensor in base.items():
        agents = [agent[name].double() for agent in weights[1:]]
        deltas = torch.stack([agent - tensor.double() for agent in agents])
        changed = deltas.abs() > 1e-5
        mean = (deltas * changed).sum(0) / changed.sum(0).clamp(min=1)
        assert torch.allclose(output[name].double(), tensor.double() + mean, atol=1e-6)


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_nested_pickles_are_refused_with_what_to_do(key, models, tmp_path):
    weights = checkpoints.read(models[1])
    for file in models[1].glob("model*"):
        file.unlink()
    torch.save({key: weights, "epoch": 3}, models[1] / "pytorch_model.bin")
    said = refused(tmp_path)
    assert "save the weights alone" in said.replace("\n", " ")
    assert key in said


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_plain_floats_are_not_taken_for_quantized(dtype, suffix, tmp_path):
    weights = {"l.weight": torch.ones(4, 4, dtype=dtype)}
    file = tmp_path / f"model.{suffix}"
    save_file(weights, file) if suffix == "safetensors" else torch.save(weights, file)
    assert Checkpoint.of_file(str(file)).quantization is None
