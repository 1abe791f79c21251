"""Whatever a recipe may name merges on Ray as it does here."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import huggingface_hub
import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache

from mergekit_ram import cli, errors
from support import checkpoints
from support.recipes import write_ramplus


def assert_same_on_ray(recipe, directory, *options):
    """Merge here and on the cluster, and compare bit for bit."""
    merged = []
    for name, ray_options in (("local", []), ("remote", ["--ray"])):
        arguments = ["merge", recipe, str(directory / name), *options, *ray_options]
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == 0, result.output
        merged.append(checkpoints.read(directory / name))
        LoaderCache().loaders.clear()
    local, remote = merged
    assert local.keys() == remote.keys()
    for name, tensor in local.items():
        assert torch.equal(tensor.view(torch.int8), remote[name].view(torch.int8)), name
    reports = [
        json.loads((directory / name / "ram_report.json").read_text())
        for name in ("local", "remote")
    ]
    assert reports[0] == reports[1]


def test_files_of_weights_merge_on_ray(cluster, paths, tmp_path):
    files = [
        checkpoints.save_state_dict(tmp_path / f"{i}.safetensors", checkpoints.read(path))
        for i, path in enumerate(paths)
    ]
    assert_same_on_ray(write_ramplus(tmp_path, *files), tmp_path)


def test_error_of_a_worker_is_of_its_own_kind(cluster, paths, tmp_path):
    weights = checkpoints.read(paths[1])
    weights["model.norm.weight"][3] = float("nan")
    bad = tmp_path / "bad"
    shutil.copytree(paths[1], bad)
    checkpoints.save_state_dict(bad / "model.safetensors", weights)
    recipe = write_ramplus(tmp_path, paths[0], bad.as_posix(), paths[2])
    arguments = ["merge", recipe, str(tmp_path / "merged"), "--ray"]
    with pytest.raises(errors.NonFiniteWeightsError, match="1 in .*bad"):
        cli.main(arguments, standalone_mode=False)
    assert not (tmp_path / "merged").exists()


def test_models_of_the_hub_merge_on_ray(cluster, paths, tmp_path, monkeypatch):
    for i, path in enumerate(paths):
        repository = tmp_path / "hub" / f"models--me--model{i}"
        for part in ("blobs", "refs", "snapshots/abc"):
            (repository / part).mkdir(parents=True)
        (repository / "refs" / "main").write_text("abc")
        for file in Path(path).iterdir():
            shutil.copy(file, repository / "blobs" / file.name)
            link = repository / "snapshots" / "abc" / file.name
            link.symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    # mergekit asks the Hub for a repository's files even where all of them are in the cache.
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: ["model.safetensors"])
    cache = ["--transformers-cache", str(tmp_path / "hub")]
    recipe = write_ramplus(tmp_path, *(f"me/model{i}" for i in range(3)))
    assert_same_on_ray(recipe, tmp_path, *cache)


def test_agent_with_an_adapter_merges_on_ray_and_warns_once(cluster, paths, tmp_path, caplog):
    model = transformers.AutoModelForCausalLM.from_pretrained(paths[0])
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    agents = [paths[1], f"{paths[0]}+{tmp_path / 'adapter'}"]
    recipe = write_ramplus(tmp_path, paths[0], *agents, dtype="bfloat16")
    cache = ["--lora-merge-cache", str(tmp_path / "cache")]
    caplog.set_level(logging.WARNING)
    assert_same_on_ray(recipe, tmp_path, *cache)
    told = [r.message for r in caplog.records if "rounds" in r.message]
    assert len(told) == 2  # one a merge
