"""The ``mergekit-ram`` command. Imports mergekit, which takes seconds, only once a command runs."""

from __future__ import annotations

import importlib.util
import json
import sys

import click

from mergekit_ram._version import __version__
from mergekit_ram.errors import MissingExtraError, RecipeError

# Options of commands that a recipe of ``mergekit-pytorch`` is read by.
TENSOR_SETTINGS = ("tensor_union", "tensor_intersection")


class MergeCommand(click.Command):
    """A command that also takes mergekit's merge options, imported once it runs or its help is
    shown.
    """

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
@click.option("--out", "out_path", type=click.Path(), help="Where the merged model would go.")
@click.option("--json", "as_json", is_flag=True, help="Print the problems as JSON.")
@click.option("--allow-crimes", is_flag=True, help="Allow mixing architectures.")
@click.option("--trust-remote-code", is_flag=True, help="Trust remote code of the models.")
@click.option(
    "--lazy-unpickle",
    is_flag=True,
    help="As for mergekit-yaml: see whether pickles can be read lazily.",
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

    Takes recipes of mergekit-yaml, mergekit-multi and mergekit-pytorch. Looks at configs, indexes
    and the headers of safetensors. Exits with 0 if the recipe can be merged and with 1 if not.
    """
    # Here and below: mergekit takes seconds to import.
    from mergekit.options import MergeOptions

    from mergekit_ram import api

    settings = {name: options.pop(name) for name in TENSOR_SETTINGS}
    found = api.check(recipe, out_path, options=MergeOptions(**options), **settings)
    if as_json:
        problems = [vars(problem) for problem in found.problems]
        click.echo(json.dumps({"recipe": recipe, "problems": problems}, indent=2))
    elif found.ok:
        click.echo(f"{recipe} can be merged")
    else:
        click.echo(str(RecipeError(found.method, found.problems)), err=True)
    sys.exit(0 if found.ok else 1)


@main.command(cls=MergeCommand)
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False))
@click.argument("out_path", type=click.Path(file_okay=False))
@click.option(
    "--ray",
    "ray_address",
    is_flag=False,
    flag_value="",
    metavar="[ADDRESS]",
    help="Merge on a Ray cluster: at the ADDRESS, else the one that RAY_ADDRESS names or that "
    "runs here, else one "
    "started on this machine (always with ADDRESS local). All machines must share the storage of "
    "models and output.",
)
def merge(recipe: str, out_path: str, ray_address: str | None, **options) -> None:
    """Merge by a RECIPE into OUT_PATH, as mergekit-yaml or mergekit-pytorch does, once the recipe
    is checked.
    """
    from mergekit_ram import api

    ray = False if ray_address is None else ray_address or True
    api.merge(recipe, out_path, options=merge_options(options), ray=ray)


def recipe_options(command):
    """What ``inspect`` and ``compare`` both take."""
    options = (
        click.argument("recipe", type=click.Path(exists=True, dir_okay=False)),
        click.option(
            "--json",
            "json_path",
            type=click.Path(dir_okay=False, writable=True),
            metavar="FILE",
            help="Write everything found to FILE.",
        ),
        click.option(
            "--plots",
            "plots_path",
            type=click.Path(file_okay=False, writable=True),
            metavar="DIR",
            help="Draw it as PNG files in DIR.",
        ),
        click.option(
            "--model-card",
            "as_card",
            is_flag=True,
            help="Print a Markdown section for a model card instead of tables.",
        ),
        click.option(
            "--tensor-union",
            is_flag=True,
            help="As for mergekit-pytorch: take tensors of any of the files.",
        ),
        click.option(
            "--tensor-intersection",
            is_flag=True,
            help="As for mergekit-pytorch: take tensors of all of the files.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@main.command(cls=MergeCommand)
@recipe_options
@click.option("--epsilon", type=float, help="In place of the recipe's own.")
@click.option("--r", type=float, help="The same, of ramplus.")
@click.option("--alpha", type=float, help="The same, of ramplus.")
@click.option(
    "--exact",
    is_flag=True,
    help="Measure magnitudes on all elements, not on an even sample of large tensors.",
)
def inspect(
    recipe: str,
    epsilon: float | None,
    r: float | None,
    alpha: float | None,
    exact: bool,
    json_path: str | None,
    plots_path: str | None,
    as_card: bool,
    **options,
) -> None:
    """See what the agents of a RECIPE changed and where they overlap.

    The recipe may name any merge method, if it has a base_model. Nothing is merged or written.
    """
    require_matplotlib(plots_path)
    from mergekit_ram import api
    from mergekit_ram.report.terminal import show_inspection

    settings = {name: options.pop(name) for name in TENSOR_SETTINGS}
    found = api.inspect(
        recipe,
        options=merge_options(options),
        epsilon=epsilon,
        r=r,
        alpha=alpha,
        exact=exact,
        **settings,
    )
    give_out(found, show_inspection, json_path, plots_path, as_card)


@main.command(cls=MergeCommand)
@recipe_options
@click.option(
    "--methods",
    default="ram,ramplus,ties,dare_ties,task_arithmetic,linear",
    show_default=True,
    help="Merge methods, separated by commas.",
)
def compare(
    recipe: str,
    methods: str,
    json_path: str | None,
    plots_path: str | None,
    as_card: bool,
    **options,
) -> None:
    """See what merge methods would keep of the agents of a RECIPE.

    Every method merges the recipe's models in memory, tensor by tensor. Nothing is written.
    """
    require_matplotlib(plots_path)
    from mergekit_ram import api
    from mergekit_ram.report.terminal import show_comparison

    settings = {name: options.pop(name) for name in TENSOR_SETTINGS}
    names = dict.fromkeys(name.strip() for name in methods.split(",") if name.strip())
    found = api.compare(recipe, list(names), options=merge_options(options), **settings)
    give_out(found, show_comparison, json_path, plots_path, as_card)


def require_matplotlib(plots_path: str | None) -> None:
    """Say that plots need matplotlib before anything is computed for them."""
    if plots_path and importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("--plots", "matplotlib", "plots")


def merge_options(options: dict):
    """mergekit's options of a command, in force."""
    from mergekit.options import MergeOptions

    found = MergeOptions(**options)
    found.apply_global_options()
    return found


def give_out(found, show, json_path: str | None, plots_path: str | None, as_card: bool) -> None:
    """Print what was found, and write it where that was asked for."""
    from rich.console import Console

    if as_card:
        click.echo(found.to_markdown(), nl=False)
    else:
        show(found, Console())
    if json_path:
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(found.to_json() + "\n")
    if plots_path:
        from mergekit_ram.report.plots import write_plots

        for path in write_plots(found, plots_path):
            click.echo(f"wrote {path}", err=True)


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

    The agents were trained by reinforcement learning from one small base, each on another family of
    tasks. Needs no network and takes about a minute.
    """
    import tempfile
    from pathlib import Path

    from rich.console import Console

    console = Console()
    with console.status("importing mergekit") as status:
        import torch
        import transformers

        from mergekit_ram.tools.demo.run import run_demo
        from mergekit_ram.tools.demo.table import print_result

        # Models this small run best on one thread.
        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        target = Path(directory or tempfile.mkdtemp(prefix="mergekit-ram-demo-"))
        result = run_demo(target, progress=status.update)
    print_result(result, console)
    if json_file:
        Path(json_file).write_text(result.to_json() + "\n", encoding="utf-8")
