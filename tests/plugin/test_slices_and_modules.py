"""Slices and modules merge by one ratio over all of them."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

from support.checkpoints import Weights
from support.commands import logged_counts, merge
from support.everywhere import everywhere, save_models
from support.expected import METHODS, STRONG, Planned, check, expect, layer_of, plan, true_counts


def test_layer_used_twice_counts_once_per_output_tensor(make_models, tmp_path, caplog):
    models = make_models("llama", tied=False)
    places = [(0, 2), (1, 3)]
    recipe = models.recipe("ramplus", parameters=STRONG)
    del recipe["models"]
    recipe["slices"] = [
        {
            "sources": [
                {"model": path, "layer_range": list(layers)}
                for path in (models.base_path, *models.agent_paths)
            ]
        }
        for layers in places
    ]
    sources = [layer for start, stop in places for layer in range(start, stop)]

    def stacked(weights: Weights) -> Weights:
        result = {n: t for n, t in weights.items() if layer_of(n) is None}
        for layer, source in enumerate(sources):
            for name, tensor in weights.items():
                if layer_of(name) == source:
                    result[name.replace(f"layers.{source}.", f"layers.{layer}.")] = tensor
        return result

    planned = plan(stacked(models.base), [stacked(a) for a in models.agents], STRONG)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(recipe, tmp_path, "--clone-tensors")
    assert logged_counts(caplog.text) == true_counts(planned)
    check(output, expect("ramplus", planned))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "merged")
    assert config.num_hidden_layers == 4


def test_modules_merge_their_own_agents_by_one_ratio_over_all(make_models, tmp_path, caplog):
    models = make_models("t5")
    first, second, third = models.agent_paths
    recipe = models.recipe("ramplus", parameters=STRONG)
    del recipe["models"]

    def of(*paths):
        return {"models": [{"model": path} for path in paths]}

    def sliced(*paths):
        sources = [{"model": path, "layer_range": [0, 2]} for path in paths]
        return {"slices": [{"sources": sources}], "parameters": {"lambda": 0.5}}

    recipe["modules"] = {
        "encoder": sliced(models.base_path, first, third),
        "decoder": of(first, second),
        "shared": of(second, third),
    }
    present = {
        "encoder": (0, 2),
        "decoder": (0, 1),
        "shared": (1, 2),
    }
    planned = {}
    for name, tensor in models.base.items():
        agents = [
            agent[name] if i in present[name.split(".")[0]] else tensor
            for i, agent in enumerate(models.agents)
        ]
        scale = {"lambda_": 0.5} if name.startswith("encoder") else {}
        planned[name] = Planned(tensor, agents, {**STRONG, **scale})
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(recipe, tmp_path)
    assert sorted(logged_counts(caplog.text)) == sorted(true_counts(planned))
    check(output, expect("ramplus", planned))


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
