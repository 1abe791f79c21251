"""What the plugin does to mergekit's functions and to the process: other plugins, early imports, garbage, exceptions."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import pickle
import subprocess
import sys
import textwrap

import checkpoints
import peft
import pytest
import ray
import torch
import transformers
import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import run_yaml

from mergekit_ram import cli, errors, garbage


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


# --- Exceptions -----------------------------------------------------------------------------------------------------

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


# --- Hooks ----------------------------------------------------------------------------------------------------------

PLUGIN = """
    import functools, mergekit.merge
    original = mergekit.merge.run_merge
    @functools.wraps(original)
    def other(*args, **kwargs):
        print("the other plugin")
        return original(*args, **kwargs)
    mergekit.merge.run_merge = other
"""
ORDERS = {
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
    assert result.stdout.count("the other plugin") == (
        "plugin" in order.split("ours")[0]
    )


# --- Garbage --------------------------------------------------------------------------------------------------------


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
def test_only_a_command_that_ends_with_the_merge_spares_its_imports(
    command, frozen, monkeypatch
):
    monkeypatch.setattr(sys, "argv", [command])
    before = gc.get_freeze_count()
    assert before == 0
    try:
        garbage.spare_imports()
        garbage.spare_imports()
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.unfreeze()


# --- Agents with an adapter: planned twice, merged anywhere ---------------------------------------------------------


def test_agent_with_an_adapter_merges_on_ray_and_warns_once(paths, tmp_path, caplog):
    model = transformers.AutoModelForCausalLM.from_pretrained(paths[0])
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    agents = [paths[1], f"{paths[0]}+{tmp_path / 'adapter'}"]
    recipe = write_recipe(tmp_path, paths[0], *agents, dtype="bfloat16")
    cache = ["--lora-merge-cache", str(tmp_path / "cache")]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    try:
        merged = []
        for name, options in (("local", []), ("remote", ["--ray"])):
            caplog.set_level(logging.WARNING)
            caplog.clear()
            out = tmp_path / name
            arguments = ["merge", recipe, str(out), *cache, *options]
            result = CliRunner().invoke(cli.main, arguments)
            assert result.exit_code == 0, result.output
            told = [r.message for r in caplog.records if "rounds" in r.message]
            assert len(told) == 1
            merged.append(checkpoints.read(out))
    finally:
        ray.shutdown()
    local, remote = merged
    assert local.keys() == remote.keys()
    for name, tensor in local.items():
        assert torch.equal(tensor.view(torch.int16), remote[name].view(torch.int16))
