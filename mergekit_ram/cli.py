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


@main.command()
@click.option(
    "--out",
    "directory",
    type=click.Path(file_okay=False),
    help="Where to write models and recipes. [default: a new temporary directory]",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True),
    help="Write the scores to this file.",
)
def demo(directory: str | None, json_file: str | None) -> None:
    """Merge three agents that come with mergekit-ram, and score every merge.

    The agents were trained by reinforcement learning from one small base, each on another family of tasks. Needs no
    network and takes about a minute.
    """
    import tempfile
    from pathlib import Path

    from rich.console import Console

    console = Console()
    with console.status("importing mergekit") as status:
        import torch
        import transformers

        from mergekit_ram.demo import run_demo
        from mergekit_ram.demo.table import print_result

        # Models this small run best on one thread.
        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        target = Path(directory or tempfile.mkdtemp(prefix="mergekit-ram-demo-"))
        result = run_demo(target, progress=status.update)
    print_result(result, console)
    if json_file:
        Path(json_file).write_text(result.to_json() + "\n", encoding="utf-8")
