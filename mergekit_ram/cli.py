"""The ``mergekit-ram`` command. Imports mergekit, which takes seconds, only once a command runs."""

from __future__ import annotations

import json
import sys

import click

from mergekit_ram import __version__


@click.group()
@click.version_option(__version__, package_name="mergekit-ram")
def main() -> None:
    """Reinforced Agent Merging for mergekit."""


@main.command()
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--out", "out_path", type=click.Path(), help="Where the merged model would go."
)
@click.option("--json", "as_json", is_flag=True, help="Print the problems as JSON.")
@click.option("--allow-crimes", is_flag=True, help="Allow mixing architectures.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Trust remote code of the models."
)
@click.option(
    "--unsafe-truncate-embeddings",
    is_flag=True,
    help="As for mergekit-yaml: cut embeddings of several sizes to the smallest.",
)
@click.option(
    "--tensor-intersection",
    is_flag=True,
    help="As for mergekit-pytorch: merge the tensors that all models have.",
)
@click.option(
    "--tensor-union",
    is_flag=True,
    help="As for mergekit-pytorch: merge every tensor that a model has.",
)
def check(recipe: str, out_path: str | None, as_json: bool, **options) -> None:
    """Find what is wrong with a RECIPE before a weight is read.

    Takes recipes of mergekit-yaml, mergekit-multi and mergekit-pytorch. Looks at configs, indexes and the headers of
    safetensors. Exits with 0 if the recipe can be merged and with 1 if not.
    """
    from mergekit.options import MergeOptions

    from mergekit_ram.check import RecipeError
    from mergekit_ram.recipes import check_file

    choice = {
        name: options.pop(name) for name in ("tensor_union", "tensor_intersection")
    }
    method, problems = check_file(recipe, MergeOptions(**options), out_path, **choice)
    if as_json:
        found = [vars(problem) for problem in problems]
        click.echo(json.dumps({"recipe": recipe, "problems": found}, indent=2))
    elif problems:
        click.echo(str(RecipeError(method, problems)), err=True)
    else:
        click.echo(f"{recipe} can be merged")
    sys.exit(1 if problems else 0)
