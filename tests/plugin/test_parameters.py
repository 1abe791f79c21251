"""Every parameter reaches every tensor, by agent, filter and gradient."""

from __future__ import annotations

import logging

import yaml

from support.commands import logged_counts, merge
from support.expected import STRONG, check, expect, gradient, plan, true_counts


def test_filters_and_gradients_reach_every_parameter(make_models, tmp_path):
    models = make_models("llama", tied=False, num_hidden_layers=4)
    parameters = {
        "epsilon": [1e-2, 1e-5],
        "lambda": [{"filter": "mlp", "value": [1.0, 0.5]}, {"value": 1.5}],
        "normalize": [{"filter": "self_attn", "value": False}, {"value": True}],
        "shared": [
            {"filter": "q_proj", "value": "ties"},
            {"filter": "lm_head", "value": "drop"},
            {"value": "mean"},
        ],
        "r": [{"filter": "layers.2.", "value": 2.0}, {"value": 0.5}],
        "alpha": [10.0, 5.0],
        "ratio": [{"filter": "norm", "value": "changed"}, {"value": "unique"}],
    }
    agents = [
        {"weight": [0.5, 2.0], "density": [{"filter": "q_proj", "value": 0.3}]},
        {"keep_unique": [{"filter": "down_proj", "value": False}]},
        {"weight": [{"filter": "embed", "value": 3.0}, {"value": [1.0, 2.0, 0.25]}]},
    ]

    def parameters_of(name: str) -> dict:
        shared = {"q_proj": "ties", "lm_head": "drop"}
        return {
            "epsilon": gradient([1e-2, 1e-5], name, 4),
            "lambda_": gradient([1.0, 0.5], name, 4) if "mlp" in name else 1.5,
            "normalize": "self_attn" not in name,
            "shared": next((v for k, v in shared.items() if k in name), "mean"),
            "r": 2.0 if "layers.2." in name else 0.5,
            "alpha": gradient([10.0, 5.0], name, 4),
            "ratio": "changed" if "norm" in name else "unique",
            "weight": [
                gradient([0.5, 2.0], name, 4),
                1.0,
                3.0 if "embed" in name else gradient([1.0, 2.0, 0.25], name, 4),
            ],
            "density": [0.3 if "q_proj" in name else 1.0, 1.0, 1.0],
            "keep_unique": [True, "down_proj" not in name, True],
        }

    recipe = models.recipe("ramplus", agents=agents, parameters=parameters)
    output = merge(recipe, tmp_path)
    check(output, expect("ramplus", plan(models.base, models.agents, parameters_of)))


def test_epsilon_by_filter_counts_each_tensor_with_its_own(make_models, tmp_path, caplog):
    models = make_models()
    epsilon = [{"filter": "mlp", "value": 2e-2}, {"value": 1e-2}]
    recipe = models.recipe("ramplus", parameters={**STRONG, "epsilon": epsilon})

    def parameters_of(name):
        return {**STRONG, "epsilon": 2e-2 if "mlp" in name else 1e-2}

    planned = plan(models.base, models.agents, parameters_of)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(recipe, tmp_path)
    assert logged_counts(caplog.text) == true_counts(planned)
    check(output, expect("ramplus", planned))


def test_epsilon_in_scientific_notation_is_a_number(make_models, tmp_path):
    models = make_models()
    recipe = yaml.safe_dump(models.recipe("ram")) + "parameters:\n  epsilon: 1e-2\n"
    assert yaml.safe_load(recipe)["parameters"]["epsilon"] == "1e-2"
    output = merge(recipe, tmp_path)
    check(output, expect("ram", plan(models.base, models.agents, {"epsilon": 1e-2})))


def test_base_among_the_models_is_no_agent(make_models, tmp_path):
    models = make_models()
    recipe = models.recipe("ramplus", parameters=STRONG)
    # Parameters of the base have no meaning, and do no harm.
    base = {"model": models.base_path, "parameters": {"weight": 7.0, "density": 0.5}}
    recipe["models"].insert(1, base)
    check(
        merge(recipe, tmp_path),
        expect("ramplus", plan(models.base, models.agents, STRONG)),
    )


def test_weights_without_normalization_scale_before_the_threshold(make_models, tmp_path):
    models = make_models()
    weight = [0.25, 1.0, -2.0]
    recipe = models.recipe(
        "ramplus",
        agents=[{"weight": w} for w in weight],
        parameters={**STRONG, "normalize": False, "epsilon": 5e-3},
    )
    parameters = {**STRONG, "normalize": False, "epsilon": 5e-3, "weight": weight}
    output = merge(recipe, tmp_path)
    check(output, expect("ramplus", plan(models.base, models.agents, parameters)))
