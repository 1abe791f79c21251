"""Commands in this process and in others, what they log and refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import mergekit.scripts.merge_raw_pytorch as raw_pytorch
from click.testing import CliRunner
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.merge import _model_out_config
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.scripts import run_yaml

from support import checkpoints
from support.checkpoints import Weights
from support.recipes import recipe_of, write_recipe


def invoke(command, *arguments) -> str:
    """Run a command in this process; its output. Whatever it raises comes out."""
    result = CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def invoke_refused(command, *arguments) -> str:
    """Run a command that must end with an error message for its user; the message."""
    result = CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output


def merge(recipe: Mapping | str, directory: Path, *options: str) -> Weights:
    """Run ``mergekit-yaml`` in this process."""
    out = directory / "merged"
    invoke(run_yaml.main, write_recipe(recipe, directory), out, *options)
    return checkpoints.read(out)


def refusal(recipe: Mapping | str, directory: Path, *options: str) -> str:
    """Run ``mergekit-yaml`` on a recipe that it must refuse; its message."""
    out = directory / "merged"
    message = invoke_refused(run_yaml.main, write_recipe(recipe, directory), out, *options)
    assert not out.exists()
    assert [p.name for p in directory.iterdir() if "partial" in p.name] == []
    return message


def merge_raw(recipe: Mapping, directory: Path, *options: str) -> Weights:
    file = write_recipe(recipe, directory)
    invoke(raw_pytorch.main, file, directory / "merged", *options)
    return checkpoints.read(directory / "merged")


def plan_recipe(recipe: Mapping, options: MergeOptions | None = None) -> MergePlanner:
    options = options or MergeOptions(quiet=True)
    config = MergeConfiguration.model_validate(recipe)
    architecture = get_architecture_info(config, options)
    out_config = _model_out_config(config, architecture)
    return MergePlanner(config, architecture, options, out_config)


def merge_in_memory(recipe: Mapping) -> Weights:
    tasks = plan_recipe(recipe).plan_in_memory()
    results = Executor(tasks).run(quiet=True)
    return {task.weight_info.name: tensor for task, tensor in results}


def run_command(*command, cwd=None, **environment) -> str:
    """Run a command in a process of its own; its output."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(name: str) -> Path:
    """A command that pip put beside this interpreter."""
    return Path(sys.executable).with_name(name)


LOGGED = re.compile(r"changed (\d+) of (\d+) elements: (\d+) unique, (\d+) shared")


def logged_counts(text: str) -> list[tuple[int, int, int]]:
    """(changed, unique, shared) of every agent, as ``ramplus`` logs it."""
    return [tuple(map(int, found.group(1, 3, 4))) for found in LOGGED.finditer(text)]


def logged_totals(text: str) -> set[int]:
    """The elements that the agents' changes were counted among."""
    return {int(found[2]) for found in LOGGED.finditer(text)}


def run_merge(directory: Path, paths: Sequence[str], method: str, *options: str, **entries):
    """Run ``mergekit-yaml`` on a base and agents; click's result, whatever it is."""
    file = write_recipe(recipe_of(*paths, method=method, **entries), directory)
    arguments = [str(file), str(directory / "merged"), *options]
    return CliRunner().invoke(run_yaml.main, arguments)
