"""Slips of the pen in recipes, and files that are none."""

from __future__ import annotations

import logging

import pytest
from mergekit.scripts import run_yaml

from support.everywhere import refused_everywhere, run, save_models, write
from support.expected import METHODS
from support.recipes import recipe_of

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
