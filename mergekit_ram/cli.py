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
@click.option("--lora-merge-cache", help="Path to store merged LoRA models.")
def check(recipe: str, out_path: str | None, as_json: bool, **options) -> None:
    """Find what is wrong with a RECIPE before a weight is read.

    Looks at configs, indexes and safetensors headers. Exits with 0 if the recipe can be merged and with 1 if not.
    """
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.options import MergeOptions

    from mergekit_ram.check import RecipeError
    from mergekit_ram.check import check as find_problems
    from mergekit_ram.methods import METHODS

    with open(recipe, encoding="utf-8") as file:
        try:
            config = MergeConfiguration.model_validate(yaml.safe_load(file))
        except (yaml.YAMLError, ValueError, RuntimeError) as error:
            raise click.ClickException(f"{recipe} is not a recipe: {error}") from None
    names = [method.spec.name for method in METHODS]
    if config.merge_method not in names:
        raise click.ClickException(
            f"{recipe} uses merge_method {config.merge_method}; this checks {', '.join(names)}"
        )
    problems = find_problems(config, MergeOptions(**options), out_path)
    if as_json:
        found = [vars(problem) for problem in problems]
        click.echo(json.dumps({"recipe": recipe, "problems": found}, indent=2))
    elif problems:
        click.echo(str(RecipeError(config.merge_method, problems)), err=True)
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
