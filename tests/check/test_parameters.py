"""Parameters that no merge can use are refused before a weight is read."""

from __future__ import annotations

import re

import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import pytest
import yaml
from mergekit.merge_methods import merge_state_dicts, merge_tensors
from mergekit.scripts import multimerge

from support.commands import invoke_refused, plan_recipe, refusal
from support.recipes import INVALID, raw_recipe, write_recipe


@pytest.mark.parametrize(("method", "parameters", "agents", "told"), INVALID)
def test_invalid_parameter_is_refused_before_a_weight_is_read(
    method, parameters, agents, told, make_models, tmp_path, no_weight_is_read
):
    models = make_models()
    recipe = models.recipe(method, parameters=parameters, agents=agents)
    message = refusal(recipe, tmp_path)
    for part in (method, *told, "(in model."):
        assert part in message


def test_problems_in_different_tensors_come_in_one_error(make_models, tmp_path, no_weight_is_read):
    models = make_models()
    recipe = models.recipe(
        "ramplus",
        parameters={
            "epsilon": [{"filter": "q_proj", "value": -1.0}, {"value": 1e-5}],
            "alpha": [{"filter": "layers.1.mlp.up_proj", "value": -2.0}, {"value": 1}],
        },
        agents=[
            {"density": [{"filter": "k_proj", "value": 3.0}, {"value": 1}]},
            {"weight": [{"filter": "embed_tokens", "value": 0}, {"value": 1}]},
            {"weight": [{"filter": "embed_tokens", "value": 0}, {"value": 1}]},
        ],
    )
    recipe["models"][0]["parameters"]["weight"] = 0
    lines = refusal(recipe, tmp_path).splitlines()
    for parts in (
        ["epsilon", "-1.0", "q_proj"],
        ["alpha", "-2.0", "layers.1.mlp.up_proj"],
        ["density", "3.0", "k_proj"],
        ["weight", "0", "embed_tokens"],
    ):
        assert any(all(part in line for part in parts) for line in lines), parts


def test_invalid_parameter_is_refused_by_every_entry_point(
    make_models, tmp_path, no_weight_is_read
):
    models = make_models()
    recipe = models.recipe("ramplus", parameters={"r": -1.0})
    name = "model.embed_tokens.weight"
    told = r"r: -1\.0.*model\."
    with pytest.raises(ValueError, match=told):
        plan_recipe(recipe).plan_in_memory()
    with pytest.raises(ValueError, match=told):
        merge_state_dicts(
            {"base": models.base, 0: models.agents[0]},
            "ramplus",
            base="base",
            parameters={"r": -1.0},
        )
    with pytest.raises(ValueError, match=rf"r: -1\.0.*{name}"):
        merge_tensors(
            [models.base[name], models.agents[0][name]],
            "ramplus",
            base_index=0,
            name=name,
            parameters={"r": -1.0},
        )
    raw = raw_recipe(tmp_path, models.base, models.agents, "ramplus", r=-1.0)
    message = invoke_refused(raw_pytorch.main, write_recipe(raw, tmp_path), tmp_path / "merged")
    assert re.search(told, message)
    assert not (tmp_path / "merged").exists()
    multi = yaml.safe_dump_all([{"name": "first", **recipe}])
    file = tmp_path / "multi.yml"
    file.write_text(multi)
    message = invoke_refused(multimerge.main, file, "-I", tmp_path / "steps")
    assert re.search(told, message)
    assert not (tmp_path / "steps" / "first").exists()


def test_agents_are_needed_only_where_there_is_a_base(make_models, tmp_path):
    models = make_models()
    recipe = models.recipe("ramplus")
    del recipe["base_model"]
    assert "no base_model" in refusal(recipe, tmp_path)
