"""Vocabularies are aligned before counting."""

from __future__ import annotations

import logging

import pytest
import torch

from support.checkpoints import Weights
from support.commands import logged_counts, merge
from support.expected import METHODS, STRONG, check, expect, plan, true_counts
from support.recipes import VOCABULARY_WEIGHTS


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"tokenizer_source": "base"}, 48),
        ({"tokenizer_source": "union"}, 49),
        ({"tokenizer": {"source": "base", "pad_to_multiple_of": 32}}, 64),
        ({"tokenizer": {"source": "union", "pad_to_multiple_of": 32}}, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_tokenizer_settings_align_vocabularies_before_counting(
    settings, rows, method, spoken, tmp_path, caplog
):
    parameters = {} if method == "ram" else STRONG
    union = "union" in str(settings)

    def aligned(weights: Weights) -> Weights:
        result = dict(weights)
        for name in VOCABULARY_WEIGHTS:
            tensor = weights[name]
            if union:
                # Only one model has the token: all take its embedding.
                tensor = torch.cat([tensor, torch.full((1, 16), 0.5)])
            padding = tensor.mean(0, keepdim=True).expand(rows - len(tensor), -1)
            result[name] = torch.cat([tensor, padding])
        return result

    planned = plan(aligned(spoken.base), [aligned(a) for a in spoken.agents], parameters)
    recipe = spoken.recipe(method, parameters=parameters, **settings)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(recipe, tmp_path)
    assert output["lm_head.weight"].shape == (rows, 16)
    if method == "ramplus":
        assert logged_counts(caplog.text) == true_counts(planned)
    check(output, expect(method, planned))
