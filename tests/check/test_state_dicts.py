"""Problems of the files that mergekit-pytorch merges."""

from __future__ import annotations

from pathlib import Path

import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import pytest
import torch

from support import checkpoints
from support.commands import invoke_refused
from support.recipes import raw_recipe, state_dicts, write_recipe
from support.workshop import assert_told, check_recipe, problems_of


def raw_refusal(recipe, directory: Path, *options) -> str:
    out = directory / "merged"
    file = write_recipe(recipe, directory)
    message = invoke_refused(raw_pytorch.main, file, out, *options)
    assert not out.exists()
    assert not list(directory.glob(".*partial*"))
    return message


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_all_problems_of_files_come_in_one_error(suffix, make_models, tmp_path, no_weight_is_read):
    base, agents = state_dicts(make_models())
    del agents[0]["model.norm.weight"]
    agents[1]["model.embed_tokens.weight"] = torch.zeros(50, 16)
    recipe = raw_recipe(tmp_path, base, agents, "ramplus", suffix, r=-1.0)
    recipe["models"] += [recipe["models"][0], {"model": str(tmp_path / f"no{suffix}")}]
    recipe["out_dtype"] = "int8"
    problems = problems_of(recipe, tmp_path)
    first, second, *_, last = (model["model"] for model in recipe["models"])
    assert_told(problems, first, "1 tensor missing: model.norm.weight")
    assert_told(problems, last, "No such file")
    assert_told(problems, "recipe", first, "same model")
    assert_told(problems, "recipe", "out_dtype: int8")
    message = raw_refusal(recipe, tmp_path)
    assert all(problem["what"] in message for problem in problems)

    # What only planning shows, once every file is there.
    recipe["models"].pop()
    problems = problems_of(recipe, tmp_path)
    assert_told(problems, first, "1 tensor missing: model.norm.weight")
    assert_told(problems, second, "model.embed_tokens.weight [50, 16]", "[48, 16]")
    assert_told(problems, "recipe", "r: -1.0", "more)")
    message = raw_refusal(recipe, tmp_path)
    assert all(problem["what"] in message for problem in problems)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda recipe: recipe.pop("base_model"), "no base_model"),
        (
            lambda recipe: recipe.update(models=[{"model": recipe["base_model"]}]),
            "no agent besides the base",
        ),
        (lambda recipe: recipe.update(models=[]), "no agent besides the base"),
        (lambda recipe: recipe.update(dtype="int64"), "dtype: int64"),
    ],
)
def test_problem_of_a_recipe_of_files(change, told, make_models, tmp_path, no_weight_is_read):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    change(recipe)
    assert_told(problems_of(recipe, tmp_path), "recipe", told)
    assert told in raw_refusal(recipe, tmp_path)


@pytest.mark.parametrize("nested", [True, False], ids=["state_dict", "number"])
def test_file_that_is_no_plain_state_dict_is_refused(nested, make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ram", ".bin")
    file = recipe["models"][0]["model"]
    content = {"state_dict": agents[0]} if nested else {**agents[0], "epoch": 3}
    torch.save(content, file)
    (problem,) = problems_of(recipe, tmp_path)
    assert problem["where"] == file
    assert "is not a tensor" in problem["what"]
    assert problem["what"] in raw_refusal(recipe, tmp_path)


def test_tensors_that_differ_are_fine_where_an_option_says_which_to_merge(make_models, tmp_path):
    base, agents = state_dicts(make_models())
    del agents[0]["model.norm.weight"]
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    assert len(problems_of(recipe, tmp_path)) == 1
    check_recipe(recipe, tmp_path, "--tensor-union")
    check_recipe(recipe, tmp_path, "--tensor-intersection")
    # What no agent has would not be merged.
    raw_pytorch.SimpleLoaderCache().loaders.clear()
    for agent in agents[1:]:
        del agent["model.norm.weight"]
    problems = problems_of(raw_recipe(tmp_path, base, agents, "ram"), tmp_path)
    assert [p["where"] for p in problems] == [m["model"] for m in recipe["models"]]
    # RAM needs the base's.
    raw_pytorch.SimpleLoaderCache().loaders.clear()
    agents[1]["more"] = torch.ones(3)
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    problems = problems_of(recipe, tmp_path, "--tensor-union")
    assert_told(problems, recipe["base_model"], "1 tensor missing: more")
    assert "missing: more" in raw_refusal(recipe, tmp_path, "--tensor-union")
    check_recipe(recipe, tmp_path, "--tensor-intersection")


def test_file_does_not_overwrite_an_input(make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ram")
    recipe["models"][0]["model"] = checkpoints.save_state_dict(
        tmp_path / "model.safetensors", agents[0]
    )
    (problem,) = problems_of(recipe, tmp_path, "--out", tmp_path)
    assert "is the input" in problem["what"]
    file = write_recipe(recipe, tmp_path)
    assert problem["what"] in invoke_refused(raw_pytorch.main, file, tmp_path)
