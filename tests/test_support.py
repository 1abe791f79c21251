"""The comparison with the oracle sees what it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.expected import STRONG, expect, plan
from support.tensors import F32, array


def test_oracle_comparison_sees_a_millionth_and_a_sign_bit(make_models):
    models = make_models()
    planned = plan(models.base, models.agents, STRONG)
    expected = expect("ramplus", planned)["model.norm.weight"]
    right = torch.from_numpy(expected.merged.value).to(F32)
    expected.check("right", right)

    size = np.abs(expected.merged.value) * (expected.merged.changers > 0)
    wrong = right.clone()
    wrong[int(np.argmax(size))] *= 1 + 2**-20
    with pytest.raises(AssertionError, match="1 of"):
        expected.check("wrong", wrong)

    element = int(np.argmax((expected.merged.changers == 0) & (array(right) == 0)))
    wrong = right.clone()
    wrong[element] = 0.0
    with pytest.raises(AssertionError, match="bits"):
        expected.check("wrong", wrong)


def test_model_wide_ratio_differs_visibly_from_tensor_local_and_from_one_tensor_more(
    make_models,
):
    models = make_models()
    planned = plan(models.base, models.agents, STRONG)
    wide = expect("ramplus", planned)
    local = expect("ramplus_tl", planned)
    twice = expect("ramplus", {**planned, "again": planned["model.embed_tokens.weight"]})
    for other in (local, twice):
        name = "model.layers.0.mlp.up_proj.weight"
        output = torch.from_numpy(other[name].merged.value).to(F32)
        with pytest.raises(AssertionError, match="are wrong"):
            wide[name].check(name, output)
