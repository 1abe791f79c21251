"""Recipes of the built-ins, of TIES and of DARE run unchanged."""

from __future__ import annotations

import sys

import pytest

from support import checkpoints
from support.commands import merge, run_command
from support.expected import METHODS, STRONG, check, expect, gradient, plan
from support.recipes import write_recipe
from support.tensors import BF16


def test_builtin_recipes_give_the_builtin_result(make_models, tmp_path):
    """Mergekit's own methods in a process without the plugin, the plugin's in this one, on the same
    recipes.
    """
    models = make_models("qwen2", tied=False)
    recipes = {
        "ram": models.recipe("ram", parameters={"epsilon": "5e-3"}, dtype="float32"),
        "ramplus_tl": models.recipe("ramplus_tl", parameters=STRONG, dtype="float32"),
        "default": models.recipe("ramplus_tl"),
        "bfloat16": models.recipe("ram", dtype="bfloat16"),
    }
    files = []
    for name, recipe in recipes.items():
        (tmp_path / name).mkdir()
        files.append(write_recipe(recipe, tmp_path / name))
    code = (
        "import sys, pathlib\n"
        "from mergekit.scripts.run_yaml import main\n"
        "import mergekit.merge_methods as methods\n"
        "assert 'mergekit_ram' not in sys.modules\n"
        "assert 'ramplus' not in methods.registry._METHODS\n"
        "for file in sys.argv[1:]:\n"
        "    out = str(pathlib.Path(file).parent / 'builtin')\n"
        "    main([file, out, '--quiet'], standalone_mode=False)\n"
    )
    run_command(sys.executable, "-c", code, *files, MERGEKIT_RAM_DISABLE="1")

    for name, recipe in recipes.items():
        ours = merge(recipe, tmp_path / name)
        theirs = checkpoints.read(tmp_path / name / "builtin")
        assert ours.keys() == theirs.keys()
        # The built-in rounds to bfloat16 after every step.
        tolerance = 2.0**-7 if name == "bfloat16" else 2.0**-21
        for tensor in ours:
            size = models.base[tensor].abs() + sum(
                (agent[tensor] - models.base[tensor]).abs() for agent in models.agents
            )
            error = (ours[tensor].double() - theirs[tensor].double()).abs()
            assert ours[tensor].dtype == theirs[tensor].dtype
            assert bool((error <= tolerance * size).all()), (name, tensor)


TIES_AND_DARE = {
    "ties": {"normalize": True, "int8_mask": True},
    "dare_ties": {"int8_mask": True, "rescale": False, "lambda": 0.5},
    "dare_linear": {"normalize": False, "lambda": 0.7},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("written_for", TIES_AND_DARE)
def test_ties_and_dare_recipes_need_only_another_method(written_for, method, make_models, tmp_path):
    models = make_models("mistral", tied=False, num_hidden_layers=4)
    recipe = models.recipe(
        written_for,
        agents=[
            {"density": [1, 0.7, 0.1], "weight": 1.0},
            {"density": 0.5, "weight": [0, 0.3, 0.7, 1]},
            {
                "density": 0.33,
                "weight": [{"filter": "mlp", "value": 0.5}, {"value": 0}],
            },
        ],
        parameters=TIES_AND_DARE[written_for],
        dtype="bfloat16",
    )
    if method == METHODS[0]:
        # It is a recipe of that method.
        (tmp_path / "original").mkdir()
        original = merge(recipe, tmp_path / "original", "--random-seed", "1")
        assert original.keys() == models.base.keys()

    def parameters_of(name: str) -> dict:
        settings = TIES_AND_DARE[written_for]
        return {
            "weight": [
                1.0,
                gradient([0, 0.3, 0.7, 1], name, 4),
                0.5 if "mlp" in name else 0.0,
            ],
            "lambda_": settings.get("lambda", 1.0),
            "normalize": settings.get("normalize", True),
        }

    output = merge({**recipe, "merge_method": method}, tmp_path)
    planned = plan(models.base, models.agents, parameters_of)
    check(output, expect(method, planned, dtype=BF16))
