"""What the plugin does to mergekit's functions and to the process: other plugins, early imports,
garbage, exceptions.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import checkpoints
import huggingface_hub
import peft
import pytest
import ray
import torch
import transformers
import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import run_yaml

from mergekit_ram import cli, errors
from mergekit_ram.host import garbage


@pytest.fixture(autouse=True)
def forget_loaders():
    yield
    LoaderCache().loaders.clear()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    config, base = checkpoints.make_base("qwen2", tied=False)
    models = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    return [
        checkpoints.save(directory / f"model{i}", config, weights)
        for i, weights in enumerate(models)
    ]


def write_recipe(directory, base, *agents, **entries) -> str:
    content = {
        "merge_method": "ramplus",
        "base_model": base,
        "models": [{"model": agent} for agent in agents],
        **entries,
    }
    file = directory / "recipe.yml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


# --- Exceptions -----------------------------------------------------------------------------------

EXAMPLES = {
    "NonFiniteError": ([1, 0, 2],),
    "OutputOverflowError": (3, torch.float16),
    "NonFiniteWeightsError": ("a.weight", {"model": 2}),
    "OverflowedWeightsError": ("a.weight", 2, "float16"),
    "MalformedRecipeError": ("recipe.yml", ["line 3: expected a list"]),
    "UnplannableError": ("ram", [errors.Problem("recipe", "it is bad", "mend it")]),
    "RecipeError": ("ram", [errors.Problem("recipe", "it is bad", "mend it")]),
}
EXCEPTIONS = [
    found
    for name, found in vars(errors).items()
    if inspect.isclass(found)
    and issubclass(found, BaseException)
    and found.__module__ == errors.__name__
    and not name.startswith("_")
]


@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_every_exception_comes_back_from_a_pickle_the_same(kind):
    error = kind(*EXAMPLES.get(kind.__name__, ("what happened",)))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


# --- Hooks ----------------------------------------------------------------------------------------

PLUGIN = """
    import functools, mergekit.merge
    original = mergekit.merge.run_merge
    @functools.wraps(original)
    def other(*args, **kwargs):
        print("the other plugin")
        return original(*args, **kwargs)
    mergekit.merge.run_merge = other
"""
CARELESS = PLUGIN.replace("@functools.wraps(original)", "")
ORDERS = {
    "a careless plugin before ours": ("DISABLED", CARELESS, "import mergekit_ram"),
    "a careless plugin after ours": (
        "import mergekit_ram",
        CARELESS,
        "mergekit_ram._autoload.install()",
    ),
    "another plugin before ours": ("DISABLED", PLUGIN, "import mergekit_ram"),
    "another plugin after ours": ("import mergekit_ram", PLUGIN),
    "a command imported before ours": (
        "DISABLED",
        "from mergekit.scripts.run_yaml import main",
        "import mergekit_ram",
    ),
    "a function imported before ours": (
        "DISABLED",
        "from mergekit.merge import run_merge",
        "import mergekit_ram",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_merges_are_ours_whatever_was_imported_first(order, paths, tmp_path):
    first, *steps = ORDERS[order]
    if first == "DISABLED":
        start = "import os; os.environ['MERGEKIT_RAM_DISABLE'] = '1'"
    else:
        steps, start = [first, *steps], ""
    recipe, out = write_recipe(tmp_path, *paths), str(tmp_path / "merged")
    run = f"""
        import sys
        sys.argv = ["mergekit-yaml", {recipe!r}, {out!r}]
        if "run_merge" in globals():
            import yaml
            from mergekit.config import MergeConfiguration
            from mergekit.options import MergeOptions
            config = MergeConfiguration.model_validate(yaml.safe_load(open({recipe!r})))
            run_merge(config, {out!r}, MergeOptions())
        else:
            from mergekit.scripts.run_yaml import main
            main()
    """
    program = "\n".join(textwrap.dedent(part) for part in (start, *steps, run))
    environment = {"MERGEKIT_RAM_DISABLE": "1"} if first == "DISABLED" else {}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "merged" / "ram_report.json").exists()
    assert result.stdout.count("the other plugin") == ("plugin" in order.split("ours")[0])


def test_reloaded_module_is_extended_again():
    program = """
        import importlib, mergekit_ram, mergekit.merge
        importlib.reload(mergekit.merge)
        print(mergekit.merge.run_merge._extended_by_mergekit_ram)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert result.stdout.strip() == "True", result.stderr


# --- Garbage --------------------------------------------------------------------------------------


def state():
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()


@pytest.mark.parametrize("outcome", ["ends", "fails"])
def test_garbage_collector_is_as_it_was_after_a_merge(outcome, paths, tmp_path):
    before = state()
    agents = paths[1:] if outcome == "ends" else [str(tmp_path / "nowhere")]
    recipe = write_recipe(tmp_path, paths[0], *agents)
    result = CliRunner().invoke(run_yaml.main, [recipe, str(tmp_path / "merged")])
    assert (result.exit_code == 0) == (outcome == "ends"), result.output
    assert state() == before


@pytest.mark.parametrize(
    ("command", "frozen"),
    [
        ("/usr/bin/mergekit-yaml", True),
        ("mergekit-ram.exe", True),
        ("mergekit-evolve", False),
        ("notebook", False),
        ("", False),
    ],
)
def test_only_a_command_that_ends_with_the_merge_spares_its_imports(command, frozen, monkeypatch):
    monkeypatch.setattr(sys, "argv", [command])
    before = gc.get_freeze_count()
    assert before == 0
    try:
        garbage.spare_imports()
        garbage.spare_imports()
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.unfreeze()


# --- Whatever a recipe may name merges on Ray as it does here -------------------------------------


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


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
    assert_same_on_ray(write_recipe(tmp_path, *files), tmp_path)


def test_error_of_a_worker_is_of_its_own_kind(cluster, paths, tmp_path):
    weights = checkpoints.read(paths[1])
    weights["model.norm.weight"][3] = float("nan")
    bad = tmp_path / "bad"
    shutil.copytree(paths[1], bad)
    checkpoints.save_state_dict(bad / "model.safetensors", weights)
    recipe = write_recipe(tmp_path, paths[0], bad.as_posix(), paths[2])
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
    recipe = write_recipe(tmp_path, *(f"me/model{i}" for i in range(3)))
    assert_same_on_ray(recipe, tmp_path, *cache)


def test_agent_with_an_adapter_merges_on_ray_and_warns_once(cluster, paths, tmp_path, caplog):
    model = transformers.AutoModelForCausalLM.from_pretrained(paths[0])
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    agents = [paths[1], f"{paths[0]}+{tmp_path / 'adapter'}"]
    recipe = write_recipe(tmp_path, paths[0], *agents, dtype="bfloat16")
    cache = ["--lora-merge-cache", str(tmp_path / "cache")]
    caplog.set_level(logging.WARNING)
    assert_same_on_ray(recipe, tmp_path, *cache)
    told = [r.message for r in caplog.records if "rounds" in r.message]
    assert len(told) == 2  # one a merge
