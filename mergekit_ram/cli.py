"""The ``mergekit-ram`` command. Imports mergekit, which takes seconds, only once a command runs."""

from __future__ import annotations

import json
import sys

import click

from mergekit_ram import __version__


class MergeCommand(click.Command):
    """A command that also takes mergekit's merge options, imported once it runs or its help is shown."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from mergekit.options import add_merge_options

        @click.command
        @add_merge_options
        def command() -> None: ...

        return [*self.params, *command.params, self.get_help_option(ctx)]


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


@main.command(cls=MergeCommand)
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False))
@click.argument("out_path", type=click.Path(file_okay=False))
@click.option(
    "--ray",
    "ray_address",
    is_flag=False,
    flag_value="",
    metavar="[ADDRESS]",
    help="Merge on a Ray cluster: at the ADDRESS, else the one that RAY_ADDRESS names or that runs here, else one "
    "started on this machine (always with ADDRESS local). All machines must share the storage of models and output.",
)
def merge(recipe: str, out_path: str, ray_address: str | None, **options) -> None:
    """Merge by a RECIPE into OUT_PATH, as mergekit-yaml does, once the recipe is checked."""
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    merge_options = MergeOptions(**options)
    merge_options.apply_global_options()
    if ray_address is not None:
        from mergekit_ram.cluster import ClusterOptions

        merge_options = ClusterOptions.beside(out_path, merge_options, ray_address)
    with open(recipe, encoding="utf-8") as file:
        source = file.read()
    config = MergeConfiguration.model_validate(yaml.safe_load(source))
    run_merge(config, out_path, options=merge_options, config_source=source)
