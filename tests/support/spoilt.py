"""Models whose files are spoilt, and what commands say of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner, Result
from mergekit.scripts import run_yaml

from mergekit_ram import cli
from support.recipes import recipe_of, write_recipe


def merged(directory: Path, *options: str) -> Result:
    """Run ``mergekit-yaml`` on the recipe that lies there."""
    arguments = [str(directory / "recipe.yml"), str(directory / "merged"), *options]
    return CliRunner().invoke(run_yaml.main, arguments)


def refused(directory: Path) -> str:
    """What both the check and the merge say of the recipe that lies there."""
    result = merged(directory)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert not (directory / "merged").exists()
    checked = CliRunner().invoke(cli.check, [str(directory / "recipe.yml")])
    assert checked.exit_code == 1
    assert isinstance(checked.exception, SystemExit), repr(checked.exception)
    return result.output + checked.output


def run(command, directory: Path, models: Sequence[Path], *arguments) -> Result:
    """Run a command on the recipe of a base and agents."""
    file = write_recipe(recipe_of(*map(str, models)), directory)
    return CliRunner().invoke(command, [str(file), *map(str, arguments)])


def refusals(directory: Path, models: Sequence[Path], *options) -> list[str]:
    """What check, inspect, compare and the merge say of a recipe that all of them must refuse."""
    out = directory / "merged"
    runs = [
        run(cli.check, directory, models, *options),
        run(cli.inspect, directory, models, *options),
        run(cli.compare, directory, models, *options),
        run(run_yaml.main, directory, models, out, *options),
    ]
    for result in runs:
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert not out.exists()
    return [result.output for result in runs]
