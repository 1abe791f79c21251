"""Configs and ways of reading that mergekit cannot do with: refused by file or option, with what to
do instead.
"""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import pytest
import torch
import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import merge_raw_pytorch, run_yaml

from mergekit_ram import cli


@pytest.fixture(autouse=True)
def forget_loaders():
    yield
    LoaderCache().loaders.clear()
    merge_raw_pytorch.SimpleLoaderCache().loaders.clear()


@pytest.fixture
def models(tmp_path) -> list[Path]:
    """Directories of a base and two agents, of pickles."""
    config, base = checkpoints.make_base("qwen2", tied=False)
    weights = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [tmp_path / f"model{i}" for i in range(3)]
    for path, its in zip(paths, weights, strict=True):
        checkpoints.save(path, config, its, pickle=True)
    return paths


def run(command, directory: Path, models, *arguments):
    base, *agents = map(str, models)
    recipe = {
        "merge_method": "ram",
        "base_model": base,
        "models": [{"model": agent} for agent in agents],
    }
    file = directory / "recipe.yml"
    file.write_text(yaml.safe_dump(recipe))
    return CliRunner().invoke(command, [str(file), *map(str, arguments)])


def refusals(directory: Path, models, *options) -> list[str]:
    """What check, inspect, compare and the merge say of a recipe that all of them must refuse."""
    out = directory / "merged"
    runs = [
        run(cli.check, directory, models, *options),
        run(cli.inspect, directory, models, *options),
        run(cli.compare, directory, models, *options),
        run(run_yaml.main, directory, models, out, *options),
    ]
    for result in runs:
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert not out.exists()
    return [result.output for result in runs]


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


# --- Pickles read lazily --------------------------------------------------------------------------


def with_gaps(weights):
    return {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in weights.items()}


UNREADABLE = {
    "parameters": lambda w: {n: torch.nn.Parameter(t) for n, t in w.items()},
    "views with gaps": with_gaps,
    "bool beside": lambda w: {**w, "mask": torch.ones(2, dtype=torch.bool)},
}


def pickled_as(change, models) -> None:
    for directory in models[1:]:
        file = directory / "pytorch_model.bin"
        torch.save(change(torch.load(file, weights_only=True)), file)


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_pickles_that_lazy_unpickling_misreads_are_refused_lazily_and_merged_otherwise(
    change, models, tmp_path
):
    expected = checkpoints.read(models[1])
    pickled_as(change, models)
    for message in refusals(tmp_path, models, "--lazy-unpickle"):
        assert str(models[1]) in message
        assert "without --lazy-unpickle" in message
    LoaderCache().loaders.clear()
    for command in (cli.check, cli.inspect, cli.compare):
        result = run(command, tmp_path, models)
        assert result.exit_code == 0, result.output
    result = run(run_yaml.main, tmp_path, models[:2], tmp_path / "merged")
    assert result.exit_code == 0, result.output
    for name, tensor in checkpoints.read(tmp_path / "merged").items():
        assert torch.allclose(tensor, expected[name], atol=1e-6)


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_files_that_lazy_unpickling_misreads_are_refused(change, models, tmp_path):
    pickled_as(change, models)
    files = [directory / "pytorch_model.bin" for directory in models]
    out = tmp_path / "merged"
    result = run(merge_raw_pytorch.main, tmp_path, files, out, "--lazy-unpickle")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert "without --lazy-unpickle" in result.output
    assert not out.exists()


def test_pickles_that_lazy_unpickling_reads_are_merged_lazily(models, tmp_path):
    """Also where an entry that is not merged could not be read."""
    expected = checkpoints.read(models[1])
    beside = {"beside": torch.tensor(1.0), "epoch": 3}
    pickled_as(lambda w: {**{n: t.T.contiguous().T for n, t in w.items()}, **beside}, models)
    out = tmp_path / "merged"
    result = run(run_yaml.main, tmp_path, models[:2], out, "--lazy-unpickle")
    assert result.exit_code == 0, result.output
    for name, tensor in checkpoints.read(out).items():
        assert torch.allclose(tensor, expected[name], atol=1e-6)
