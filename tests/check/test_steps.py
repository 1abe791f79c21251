"""Problems of all steps of mergekit-multi, before the first is merged."""

from __future__ import annotations

from pathlib import Path

from mergekit.scripts import multimerge

from support.commands import invoke_refused
from support.recipes import MULTI
from support.workshop import assert_told, check_recipe, missing_tensors, problems_of


def multi_refusal(content: str, directory: Path) -> str:
    file = directory / "multi.yml"
    file.write_text(content)
    arguments = [file, "-I", directory / "steps", "--out-path", directory / "merged"]
    message = invoke_refused(multimerge.main, *arguments)
    assert list((directory / "steps").iterdir()) == []
    return message


def test_problems_of_all_steps_come_before_the_first_is_merged(shop, tmp_path, no_weight_is_read):
    content = MULTI.format(base=shop.base, agents=shop.agents)
    missing_tensors(shop, {})
    truncated = shop.agents[2] / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-1])
    content = content.replace("alpha: 10.0", "alpha: -1.0")
    told = ["4 tensors missing", str(truncated), "alpha: -1.0"]
    message = multi_refusal(content, tmp_path)
    assert all(part in message for part in told)
    assert message.count("alpha: -1.0") == 2
    problems = problems_of(content, tmp_path)
    assert_told(problems, "recipe halfway", "alpha: -1.0")
    assert_told(problems, "recipe without name", "alpha: -1.0")
    assert len(problems) == 4


def test_steps_without_problems_are_fine(shop, tmp_path, no_weight_is_read):
    check_recipe(MULTI.format(base=shop.base, agents=shop.agents), tmp_path)
