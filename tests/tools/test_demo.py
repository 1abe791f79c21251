"""The demo from end to end: real merges of the bundled agents, scored by real generation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mergekit_ram.cli import main
from mergekit_ram.report.record import Report
from mergekit_ram.tools.demo.evaluate import score
from mergekit_ram.tools.demo.families import FAMILIES, draw
from mergekit_ram.tools.demo.run import CHECKPOINTS, COMPARED, agent_name

pytestmark = pytest.mark.slow

MODEL = "model.safetensors"
FEW = 40


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, dict, str]:
    """Its directory, its JSON and what it printed."""
    directory = tmp_path_factory.mktemp("demo") / "out"
    file = directory.parent / "scores.json"
    arguments = ["demo", "--out", str(directory), "--json", str(file)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return directory, json.loads(file.read_text()), result.output


@pytest.fixture(scope="module")
def scores(demo) -> dict[str, dict[str, float]]:
    return {found["method"]: found["scores"] for found in demo[1]["methods"]}


def test_json_has_every_model_and_the_mean_of_its_scores(demo):
    _, found, _ = demo
    names = [method["method"] for method in found["methods"]]
    assert names == ["base", *map(agent_name, FAMILIES), *COMPARED]
    for method in found["methods"]:
        assert list(method["scores"]) == list(FAMILIES)
        assert all(0 <= value <= 1 for value in method["scores"].values())
        assert method["mean"] == pytest.approx(sum(method["scores"].values()) / 3)


def test_every_path_that_the_demo_names_is_there(demo):
    directory, found, output = demo
    for method in found["methods"]:
        assert (Path(method["model"]) / MODEL).exists()
    assert all(Path(plot).stat().st_size > 1000 for plot in found["plots"])
    report = directory / "merged" / "ram" / "ram_report.json"
    assert str(report) in output
    agents = Report.model_validate_json(report.read_text()).agents
    assert [Path(agent.model).name for agent in agents] == list(FAMILIES)
    assert all(0 < agent.changed < agent.total for agent in agents)


def test_table_shows_the_scores_of_the_json(demo):
    _, found, output = demo
    for method in found["methods"]:
        (line,) = (x for x in output.splitlines() if f"│ {method['method']} " in x)
        for value in (*method["scores"].values(), method["mean"]):
            assert f"{100 * value:.1f}" in line


@pytest.mark.parametrize("family", FAMILIES)
def test_agent_is_better_than_the_base_at_what_it_was_trained_on(scores, family):
    assert scores[agent_name(family)][family] > scores["base"][family] + 0.02


def test_model_of_zeros_scores_nothing(demo, tmp_path):
    directory, _, _ = demo
    model = directory / "merged" / "ram"
    assert min(score(model, count=FEW).values()) > 0.1
    for file in model.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / MODEL)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    save_file(zeros, tmp_path / MODEL, {"format": "pt"})
    assert max(score(tmp_path, count=FEW).values()) <= 0.02


def test_score_is_that_of_generating_token_by_token(demo):
    """An independent greedy decoder, one prompt at a time and without padding, finds the same
    number right.
    """
    model_path = demo[0] / "merged" / "ramplus"
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    for family, expected in score(model_path, count=FEW).items():
        right = 0
        for task in draw(family, "test", FEW):
            ids = tokenizer(task.prompt).input_ids
            written = ""
            while len(written) <= len(task.answer) and "<end>" not in written:
                with torch.inference_mode():
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
                written += tokenizer.decode(ids[-1:])
            right += written == task.answer + "<end>"
        # Rounding differs between a batch and one prompt: one near-tie may fall otherwise.
        assert abs(right - expected * FEW) <= 1, family


def test_written_recipe_runs_with_mergekit_yaml(demo, tmp_path):
    directory, _, _ = demo
    recipe = directory / "recipes" / "ramplus.yml"
    command = Path(sys.executable).parent / "mergekit-yaml"
    subprocess.run([command, recipe, tmp_path / "merged", "--quiet"], check=True)
    again = load_file(tmp_path / "merged" / MODEL)
    before = load_file(directory / "merged" / "ramplus" / MODEL)
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_splits_share_no_prompt_and_draws_can_be_repeated():
    for family in FAMILIES:
        drawn = {split: draw(family, split, 300) for split in ("train", "validation", "test")}
        assert drawn["test"] == draw(family, "test", 300)
        assert drawn["test"] != draw(family, "test", 300, seed=1)
        prompts = {task.prompt for tasks in drawn.values() for task in tasks}
        assert len(prompts) == 900


def test_bundled_checkpoints_are_small_and_bfloat16():
    files = list(CHECKPOINTS.rglob(f"*/{MODEL}"))
    assert len(files) == 4
    assert sum(file.stat().st_size for file in CHECKPOINTS.rglob("*")) < 4e6
    for file in files:
        assert {t.dtype for t in load_file(file).values()} == {torch.bfloat16}
