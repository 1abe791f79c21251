"""Merges through every entry point, run in a child that may be killed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import pytest
import torch
import transformers
from click.testing import CliRunner
from mergekit.scripts import multimerge, run_yaml

from mergekit_ram.report.record import Report
from support import checkpoints
from support.expected import STRONG, check, check_state_dict, expect, floating, plan
from support.recipes import MULTI, Models, raw_recipe, state_dicts, write_recipe

ENTRIES = ("yaml", "multi", "pytorch")


class Job:
    """One merge through an entry point: what is run, where the model goes, and what it has to be.

    mergekit-multi first merges a step that goes well, then the model in question.
    """

    def __init__(self, entry: str, models: Models, directory: Path, method="ramplus"):
        self.entry = entry
        self.out = directory / "merged"
        parameters = {} if method == "ram" else STRONG
        if entry == "pytorch":
            base, agents = state_dicts(models)
            recipe = raw_recipe(directory, base, agents, method, **parameters)
            self.command = raw_pytorch.main
            self.arguments = [write_recipe(recipe, directory), self.out]
            self.base = base
            self.expected = expect(method, plan(floating(base), agents, parameters))
            return
        recipe = models.recipe(method, parameters=parameters)
        self.expected = expect(method, plan(models.base, models.agents, parameters))
        if entry == "yaml":
            self.command = run_yaml.main
            self.arguments = [write_recipe(recipe, directory), self.out]
        else:
            content = MULTI.format(base=models.base_path, agents=models.agent_paths)
            file = directory / "multi.yml"
            file.write_text(content)
            steps = directory / "steps"
            self.command = multimerge.main
            self.arguments = [file, "-I", steps, "--out-path", self.out]
            self.first = steps / "halfway"
            self.expected = None

    def run(self, *options: str):
        arguments = [*map(str, self.arguments), *options]
        return CliRunner().invoke(self.command, arguments)

    def weights_of_finished(self) -> bool:
        """Whether the output passes for a model."""
        names = {path.name for path in self.out.iterdir()} if self.out.exists() else ()
        stems = ("model.safetensors", "pytorch_model.bin")
        weights = any(s in names or f"{s}.index.json" in names for s in stems)
        return weights and (self.entry == "pytorch" or "config.json" in names)

    def assert_finished(self) -> None:
        """The output is the whole model, and nothing is left over."""
        output = checkpoints.read(self.out)
        if self.entry == "pytorch":
            check_state_dict(output, self.expected, self.base)
        elif self.expected:
            check(output, self.expected)
        Report.model_validate_json((self.out / "ram_report.json").read_text())
        if self.entry != "pytorch":
            assert "### Reinforced" in (self.out / "README.md").read_text()
            transformers.AutoModelForCausalLM.from_pretrained(self.out)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        for directory in (self.out, *self.out.parents[:1], self.out.parent / "steps"):
            if directory.exists():
                assert [p for p in directory.iterdir() if "partial" in p.name] == []


def in_child(function: Callable[[], object], timeout: float = 120) -> int:
    """Run a function in a forked child; its exit code, minus the signal that killed it.

    Forked, for the import of mergekit takes longer than all these tests.
    """

    def target():
        torch.set_num_threads(1)
        function()

    child = multiprocessing.get_context("fork").Process(target=target)
    child.start()
    child.join(timeout)
    if child.is_alive():
        child.kill()
        pytest.fail("the child hangs")
    return child.exitcode


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}
