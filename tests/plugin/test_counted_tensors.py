"""The model-wide ratio: which tensors of a plan count."""

from __future__ import annotations

import logging

import pytest
import torch

from support import checkpoints
from support.commands import logged_counts, logged_totals, merge
from support.expected import METHODS, STRONG, check, expect, plan, total_elements, true_counts
from support.recipes import save_models


def test_tied_weights_count_once(make_models, tmp_path, caplog):
    models = make_models("qwen2", tied=True)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(models.recipe("ramplus", parameters=STRONG), tmp_path)
    assert "lm_head.weight" not in output
    assert logged_counts(caplog.text) == true_counts(plan(models.base, models.agents))
    assert logged_totals(caplog.text) == {total_elements(output)}


def test_agent_with_tied_weights_lends_its_embedding_to_an_untied_head(make_models, tmp_path):
    config, base = checkpoints.make_base("qwen2", tied=False)
    base["lm_head.weight"] = base["model.embed_tokens.weight"].clone()
    agents = [checkpoints.change(base, seed) for seed in (1, 2)]
    models = save_models(tmp_path, config, base, agents)
    tied = dict(agents[1])
    del tied["lm_head.weight"]
    models.agent_paths[1] = checkpoints.save(tmp_path / "tied", config, tied)

    head = {"lm_head.weight": tied["model.embed_tokens.weight"]}
    planned = plan(base, [agents[0], {**tied, **head}], STRONG)
    output = merge(models.recipe("ramplus", parameters=STRONG), tmp_path)
    check(output, expect("ramplus", planned))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lacking", [(0, 1, 2, 3), (2,), (1, 3), (1, 2, 3)], ids=str)
def test_optional_tensor_counts_where_it_is_merged(lacking, method, make_models, tmp_path, caplog):
    models = make_models("glm4", tied=False)
    weights = [
        {n: t for n, t in w.items() if i not in lacking or not n.endswith("k_proj.bias")}
        for i, w in enumerate([models.base, *models.agents])
    ]
    models = save_models(tmp_path, models.config, weights[0], weights[1:])
    parameters = {} if method == "ram" else STRONG
    planned = plan(models.base, models.agents, parameters)
    assert any(name.endswith("k_proj.bias") for name in planned) == (0 not in lacking)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(models.recipe(method, parameters=parameters), tmp_path)
    if method == "ramplus":
        assert logged_counts(caplog.text) == true_counts(planned)
    check(output, expect(method, planned))


@pytest.mark.parametrize("method", METHODS)
def test_tensor_of_integers_is_copied_and_not_counted(method, make_models, tmp_path, caplog):
    models = make_models("llama")
    norm = {"model.norm.weight": torch.arange(16)}
    models = save_models(
        tmp_path,
        models.config,
        {**models.base, **norm},
        [{**agent, **norm} for agent in models.agents],
    )
    parameters = {} if method == "ram" else STRONG
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(models.recipe(method, parameters=parameters), tmp_path)
    (name,) = norm
    assert torch.equal(output.pop(name), norm[name])
    del models.base[name]
    planned = plan(models.base, models.agents, parameters)
    if method == "ramplus":
        assert logged_counts(caplog.text) == true_counts(planned)
        assert logged_totals(caplog.text) == {total_elements(models.base)}
    check(output, expect(method, planned))
