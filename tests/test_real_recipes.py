"""Recipes as users write them: paths, wrappers' names, layers of the base alone, slips of the pen,
files that are none.
"""

from __future__ import annotations

import json
import logging

import checkpoints
import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import merge_raw_pytorch, run_yaml

from mergekit_ram import cli

METHODS = ("ram", "ramplus", "ramplus_tl")


@pytest.fixture(autouse=True)
def forget_loaders():
    yield
    LoaderCache().loaders.clear()
    merge_raw_pytorch.SimpleLoaderCache().loaders.clear()


def save_models(directory, name="model", configure=None):
    config, base = checkpoints.make_base("qwen2", tied=False)
    models = [base, *(checkpoints.change(base, seed) for seed in range(2))]
    paths = [
        checkpoints.save(directory / f"{name}{i}", config, weights)
        for i, weights in enumerate(models)
    ]
    for path in paths if configure else ():
        with open(f"{path}/config.json") as file:
            content = json.load(file)
        configure(content)
        with open(f"{path}/config.json", "w") as file:
            json.dump(content, file)
    return models, paths


def recipe_of(base, *agents, method="ram", **entries):
    return {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": agent} for agent in agents],
        **entries,
    }


def write(directory, recipe):
    file = directory / "recipe.yml"
    text = recipe if isinstance(recipe, str) else yaml.safe_dump(recipe)
    file.write_text(text, encoding="utf-8")
    return str(file)


def run(command, *arguments):
    result = CliRunner().invoke(command, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    return result


def everywhere(directory, recipe):
    """Check, inspect, compare and merge a recipe; the merged weights."""
    file = write(directory, recipe)
    for command in (["check"], ["inspect"], ["compare", "--methods", "ram,ramplus"]):
        result = run(cli.main, command[0], file, *command[1:])
        assert result.exit_code == 0, f"{command}: {result.output}"
    result = run(run_yaml.main, file, directory / "merged")
    assert result.exit_code == 0, result.output
    return checkpoints.read(directory / "merged")


def refused_everywhere(directory, recipe) -> list[str]:
    """What check, inspect, compare and merge say, in one line each."""
    file = write(directory, recipe)
    said = []
    for arguments in (
        ["check", file],
        ["inspect", file],
        ["compare", file],
        ["merge", file, str(directory / "merged")],
    ):
        result = run(cli.main, *arguments)
        assert result.exit_code == 1, f"{arguments}: {result.output}"
        assert "Traceback" not in result.output
        said.append(" ".join(result.output.split()))
    assert not (directory / "merged").exists()
    return said


def assert_merged(output, models, epsilon=1e-5):
    base, *agents = models
    for name, tensor in base.items():
        deltas = torch.stack([agent[name].double() - tensor.double() for agent in agents])
        changed = deltas.abs() > epsilon
        mean = (deltas * changed).sum(0) / changed.sum(0).clamp(min=1)
        assert torch.allclose(output[name].double(), tensor.double() + mean, atol=1e-6)


# --- Paths ----------------------------------------------------------------------------------------

NAMES = ("my model", "a#b", "it's", "tab\there", "größe ∆", 'say "yes"', "a: b")


@pytest.mark.parametrize("name", NAMES)
def test_paths_of_any_letters_merge(name, tmp_path):
    models, paths = save_models(tmp_path, name)
    assert_merged(everywhere(tmp_path, recipe_of(*paths)), models)
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    assert [agent["model"] for agent in report["agents"]] == paths[1:]
    assert [entry["model"] for entry in report["recipe"]["models"]] == paths[1:]


@pytest.mark.parametrize("spelling", ["{}/", "./{}", "../here/{}", "{}/../{}"])
def test_relative_paths_and_trailing_slashes_merge(spelling, tmp_path, monkeypatch):
    directory = tmp_path / "here"
    models, _ = save_models(directory)
    monkeypatch.chdir(directory)
    paths = [spelling.format(f"model{i}", f"model{i}") for i in range(3)]
    assert_merged(everywhere(directory, recipe_of(*paths)), models)


def test_path_with_a_plus_is_told_how_to_be_written_and_then_merges(tmp_path):
    models, paths = save_models(tmp_path, "a+b")
    for said in refused_everywhere(tmp_path, recipe_of(*paths)):
        assert "`+` separates a model from its adapter" in said
    written = [{"model": {"path": path}} for path in paths]
    output = everywhere(tmp_path, recipe_of(*written))
    assert_merged(output, models)
    # What the report says of the recipe merges again.
    report = json.loads((tmp_path / "merged" / "ram_report.json").read_text())
    (tmp_path / "again").mkdir()
    LoaderCache().loaders.clear()
    assert_merged(everywhere(tmp_path / "again", report["recipe"]), models)


# --- Names of architectures -----------------------------------------------------------------------


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


# --- Layers of the base alone ---------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("empty", [False, True])
def test_slices_of_the_base_alone_go_through(empty, method, tmp_path):
    models, (base, *agents) = save_models(tmp_path)

    def sources(paths, layers):
        return {"sources": [{"model": path, "layer_range": layers} for path in paths]}

    slices = [sources([base, *agents], [0, 2]), sources([base], [2, 3])]
    if empty:
        slices.insert(1, sources([base, *agents], [2, 2]))
    recipe = {"merge_method": method, "base_model": base, "slices": slices}
    output = everywhere(tmp_path, recipe)
    alone = [name for name in models[0] if ".layers.2." in name]
    assert alone
    for name in alone:
        assert torch.equal(output[name], models[0][name])
    merged = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(output[merged], models[0][merged])


# --- Slips of the pen -----------------------------------------------------------------------------


def warnings_of(tmp_path, caplog, method, **parameters):
    _, paths = save_models(tmp_path)
    caplog.set_level(logging.WARNING)
    caplog.clear()
    file = write(tmp_path, recipe_of(*paths, method=method, parameters=parameters))
    result = run(run_yaml.main, file, tmp_path / "merged")
    assert result.exit_code == 0, result.output
    return [record.message for record in caplog.records]


@pytest.mark.parametrize(
    ("method", "word", "meant"),
    [
        ("ram", "wieght", "weight"),
        ("ram", "lamda", "lambda"),
        ("ram", "epsilom", "epsilon"),
        ("ramplus", "aplha", "alpha"),
        ("ram", "alpha", "ramplus"),
        ("ram", "gibberish", "gibberish"),
    ],
)
def test_parameter_that_the_method_does_not_take_is_warned_of_once(
    method, word, meant, tmp_path, caplog
):
    told = [w for w in warnings_of(tmp_path, caplog, method, **{word: 0.5}) if word in w]
    assert len(told) == 1
    assert meant in told[0]


@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_ties_and_dare_are_not_warned_of(method, tmp_path, caplog):
    parameters = {"density": 0.5, "weight": 1.0, "int8_mask": True, "rescale": True}
    told = warnings_of(tmp_path, caplog, method, **parameters)
    assert not [w for w in told if any(name in w for name in parameters)]


# --- What is no recipe ----------------------------------------------------------------------------

MALFORMED = {
    "bad YAML": ("merge_method: ram\nmodels: [\n", "line"),
    "a tab": ("merge_method: ram\n\tmodels: []\n", "line 2"),
    "a list": ("- ram\n", "expected"),
    "text": ("hello", "expected"),
    "nothing": ("", "it is empty"),
    "a number for a list": ("merge_method: ram\nmodels: 3\n", "a list"),
    "a list for a dtype": (
        "merge_method: ram\nbase_model: x\nmodels: []\ndtype: [a]\n",
        "text",
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_file_that_is_no_recipe_is_told_with_the_place(fault, tmp_path):
    text, expected = MALFORMED[fault]
    for said in refused_everywhere(tmp_path, text):
        assert "recipe.yml" in said
        assert expected in said
        assert "pydantic" not in said


@pytest.mark.parametrize("method", METHODS)
def test_impossible_recipe_is_told_by_the_methods_own_name(method, tmp_path):
    _, paths = save_models(tmp_path)
    recipe = recipe_of(paths[0], paths[0], method=method)
    for said in refused_everywhere(tmp_path, recipe)[3:]:
        assert f"merge_method {method} " in said


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
