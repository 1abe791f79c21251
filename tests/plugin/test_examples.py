"""Every example recipe gives what it says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import transformers
from mergekit.scripts import run_yaml

from support import ROOT, checkpoints, oracle
from support.checkpoints import Weights
from support.commands import invoke, logged_counts, run_command, script
from support.expected import (
    Plan,
    Planned,
    check,
    expect,
    gradient,
    layer_of,
    overlap_of,
    plan,
    true_counts,
)
from support.recipes import EXAMPLES
from support.tensors import BF16, array

LAYERS = 4
NAMES = ("coder", "tool_user", "reader")


def example_filters(name: str) -> dict:
    return {
        "weight": [
            gradient([1.0, 0.5, 0.25], name, LAYERS),
            2.0 if "self_attn" in name else 1.0,
            1.0,
        ],
        "keep_unique": [True, True, "mlp" not in name],
        "epsilon": 1e-2 if "embed_tokens" in name else 1e-5,
        "r": gradient([0.1, 0.4], name, LAYERS),
    }


def example_ties_weights(name: str) -> dict:
    return {
        "weight": [
            1.0,
            gradient([0, 0.3, 0.7, 1], name, LAYERS),
            0.5 if "mlp" in name else 0.0,
        ]
    }


def example_slices(base: Weights, agents: Sequence[Weights]) -> Plan:
    planned = {}
    for name, tensor in base.items():
        coder, tool_user, reader = (agent[name] for agent in agents)
        late = name == "model.norm.weight" or (layer_of(name) or 0) >= 2
        merged = [coder, tensor, reader] if late else [coder, tool_user, tensor]
        planned[name] = Planned(tensor, merged, {"lambda_": 0.8} if late else {})
    return planned


# Example → method and oracle's parameters, or its whole plan.
EXPECTED_EXAMPLES = {
    "ram": ("ram", {}),
    "ramplus": ("ramplus", {"r": 0.1, "alpha": 0.2, "epsilon": 1e-5}),
    "ramplus_tl": ("ramplus_tl", {"r": 0.1, "alpha": 0.2}),
    "weights": ("ram", {"weight": [2.0, 1.0, 0.5], "lambda_": 0.9}),
    "filters_and_gradients": ("ramplus", example_filters),
    "slices": ("ramplus", example_slices),
    "from_ties_to_ram": ("ram", example_ties_weights),
    "arm": ("ram", {}),
    "arm_r": ("ramplus", {"r": 0.2, "alpha": 1, "ratio": "changed"}),
    "arm_r_v2": ("ramplus", {"r": 0.2, "alpha": 1}),
    "arm_ties": ("ram", {"shared": "ties", "density": [0.1] * 3}),
    "arm_unique": (
        "ram",
        {"shared": "drop", "keep_unique": [True, False, False], "lambda_": 1 / 3},
    ),
}
AUTHORS = {
    "arm": oracle.arm,
    "arm_r": lambda base, agents: oracle.arm_r(base, agents, 1.2),
    "arm_r_v2": lambda base, agents: oracle.arm_r_v2(base, agents, 1.2),
    "arm_ties": oracle.arm_ties,
    "arm_unique": lambda base, agents: oracle.arm_unique(base, agents, 0),
}


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> tuple[Path, Weights, list[Weights]]:
    """The directory that holds the examples' checkpoints, the base's weights and the agents'."""
    directory = tmp_path_factory.mktemp("examples")
    command = ROOT / "example_yamls" / "make_agents.py"
    run_command(sys.executable, command, "agents", cwd=directory)
    base, *agents = [checkpoints.read(directory / "agents" / name) for name in ("base", *NAMES)]
    return directory, base, agents


def expect_example(name: str, base: Weights, agents: Sequence[Weights]):
    method, parameters = EXPECTED_EXAMPLES[name]
    if parameters is example_slices:
        return expect(method, example_slices(base, agents), dtype=BF16)
    return expect(method, plan(base, agents, parameters), dtype=BF16)


def test_every_example_has_an_expectation():
    assert {file.stem for file in EXAMPLES} == EXPECTED_EXAMPLES.keys()


def test_example_agents_change_a_fifth_of_the_elements_and_overlap_partly(example):
    _, base, agents = example
    assert base["model.embed_tokens.weight"].dtype == BF16
    counts = overlap_of(plan(base, agents))
    for changed, unique in zip(counts.changed, counts.unique, strict=True):
        assert 0.15 < changed / counts.total < 0.25
        assert 0.3 < unique / changed < 0.7


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_recipe_gives_what_it_says(file, example, tmp_path, monkeypatch):
    directory, base, agents = example
    monkeypatch.chdir(directory)
    invoke(run_yaml.main, file, tmp_path / "merged")
    output = checkpoints.read(tmp_path / "merged")
    check(output, expect_example(file.stem, base, agents))
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    if file.stem in AUTHORS:
        check_like_the_authors(AUTHORS[file.stem], output, base, agents)


def check_like_the_authors(authors, output: Weights, base: Weights, agents) -> None:
    """Equal to the authors' formulas, rounded to bfloat16, wherever float32 decides as float64
    does.
    """
    arrays = [
        {name: array(tensor) for name, tensor in weights.items()} for weights in (base, *agents)
    ]
    for name, theirs in authors(arrays[0], arrays[1:]).items():
        size = sum(np.abs(weights[name]) for weights in arrays)
        allowed = 0.51 * oracle.ulp(theirs, "bfloat16") + 2.0**-22 * size
        assert np.all(np.abs(array(output[name]) - theirs) <= allowed), name


def test_mergekit_yaml_command_merges_an_example_that_transformers_loads(example, tmp_path):
    directory, base, agents = example
    recipe = ROOT / "example_yamls" / "ramplus.yml"
    text = run_command(script("mergekit-yaml"), recipe, tmp_path / "merged", "-v", cwd=directory)
    check(checkpoints.read(tmp_path / "merged"), expect_example("ramplus", base, agents))
    assert logged_counts(text) == true_counts(plan(base, agents))
    assert "Measuring overlap" in text

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    logits = model(**tokenizer("merge the agents", return_tensors="pt")).logits
    assert model.dtype == BF16 and logits.isfinite().all()
