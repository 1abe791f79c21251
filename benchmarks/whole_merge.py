"""Times and weighs whole merges of 430 M parameters: ours, mergekit's built-ins, other methods and plain copying.

    python benchmarks/whole_merge.py --json whole_merge.json

Every merge is a ``mergekit-yaml`` of its own. The checkpoints are made once, 3.4 GB of them; all of them stay in
the page cache on a machine with 8 GB to spare, unless ``--cold`` takes them out.
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import click
import yaml
from rich.table import Table
from rounds import (
    Run,
    console,
    in_new_process,
    interleave,
    run_process,
    write_report,
)

AGENTS = 3
_GB = 1e9
_LIMIT, _IMPORT = "read all, write one", "import mergekit"


@dataclass(frozen=True)
class Recipe:
    """A merge of the agents.

    Attributes:
        built_in: run mergekit's own method of that name, not ours.
        parameters: of every agent.
    """

    method: str
    built_in: bool = False
    base: bool = True
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path, directory: Path) -> None:
        content = {
            "merge_method": self.method,
            "models": [
                {
                    "model": str(directory / f"agent-{i}"),
                    "parameters": {"weight": 1.0, **self.parameters},
                }
                for i in range(AGENTS)
            ],
            "dtype": "bfloat16",
        }
        if self.built_in:
            for model in content["models"]:
                del model["parameters"]
        if self.base:
            content["base_model"] = str(directory / "base")
        path.write_text(yaml.safe_dump(content))


RECIPES = {
    "built-in ram": Recipe("ram", built_in=True),
    "built-in ramplus_tl": Recipe("ramplus_tl", built_in=True),
    "ram": Recipe("ram"),
    "ramplus_tl": Recipe("ramplus_tl"),
    "ramplus": Recipe("ramplus"),
    "ties": Recipe("ties", parameters={"density": 0.5}),
    "dare_ties": Recipe("dare_ties", parameters={"density": 0.5}),
    "task_arithmetic": Recipe("task_arithmetic"),
    "linear": Recipe("linear", base=False),
}
DEFAULT_RECIPES = tuple(RECIPES)[:5]


class Workplace:
    """Where the checkpoints lie and the merges are written.

    Args:
        keep: names of the merges to keep.
        options: more of ``mergekit-yaml``'s.
        cold: read from the disk in every run.
    """

    def __init__(
        self,
        directory: Path,
        outputs: Path,
        keep: Sequence[str],
        options: Sequence[str] = (),
        cold: bool = False,
    ):
        self.directory = directory
        self.outputs = outputs
        self.keep = keep
        self.options = options
        self.cold = cold

    def limit(self) -> Run:
        self._cool()
        output = self.outputs / "copy"
        read_write = checkpoints.read_all_write_one
        seconds = in_new_process(read_write, self.directory, AGENTS, output)
        shutil.rmtree(output)
        return Run(seconds)

    def import_mergekit(self) -> Run:
        return run_process([sys.executable, "-c", "import mergekit.scripts.run_yaml"])

    def merge(self, name: str) -> Run:
        recipe, config = RECIPES[name], self.outputs / "recipe.yml"
        recipe.write(config, self.directory)
        output = self.output(name)
        shutil.rmtree(output, ignore_errors=True)
        program = Path(sys.executable).with_name("mergekit-yaml")
        disabled = {"MERGEKIT_RAM_DISABLE": "1"} if recipe.built_in else {}
        click.echo(f"{name} …", err=True)
        self._cool()
        options = ("--no-copy-tokenizer", "--quiet", *self.options)
        run = run_process([program, config, output, *options], disabled)
        click.echo(f"  {run.seconds:.1f} s, {run.peak_bytes / _GB:.1f} GB", err=True)
        if name not in self.keep:
            shutil.rmtree(output)
        return run

    def _cool(self) -> None:
        if self.cold:
            checkpoints.evict(self.directory)

    def output(self, name: str) -> Path:
        return self.outputs / name.replace(" ", "-")


def compare(
    workplace: Workplace, names: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Ours against the built-in of the same name, where both were run; what was kept for it goes."""
    compared = {}
    for name in names:
        built_in = f"built-in {name}"
        if built_in in names:
            paths = workplace.output(name), workplace.output(built_in)
            compared[name] = in_new_process(checkpoints.difference, *paths)
    return compared


def runs_table(best: Mapping[str, Run]) -> Table:
    table = Table(title="whole merges, best run", title_justify="left")
    columns = ("seconds", "beyond import", "built-in ram / it", "peak GB")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    built_in = beyond_import("built-in ram", best)
    for name, run in best.items():
        own = beyond_import(name, best)
        table.add_row(
            name,
            f"{run.seconds:.1f}",
            f"{own:.1f}" if own else "",
            f"{built_in / own:.1f}" if built_in and own else "",
            f"{run.peak_bytes / _GB:.2f}" if run.peak_bytes else "",
        )
    return table


def beyond_import(name: str, best: Mapping[str, Run]) -> float:
    """Seconds of the merge itself; 0 for the import and for a merge that was not run."""
    if name not in best:
        return 0.0
    if name == _LIMIT:
        return best[name].seconds
    return best[name].seconds - best[_IMPORT].seconds


@click.command()
@checkpoints.directory_option
@click.option(
    "--recipe",
    "recipes",
    type=click.Choice(list(RECIPES)),
    multiple=True,
    default=DEFAULT_RECIPES,
    show_default=True,
    help="What to merge; repeat for several.",
)
@click.option("--all", "everything", is_flag=True, help="Merge by every recipe.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Most runs of each; the best counts.",
)
@click.option(
    "--patience",
    default=30.0,
    show_default=True,
    help="Seconds of runs after which a recipe gets no more.",
)
@click.option(
    "--cold", is_flag=True, help="Take the checkpoints out of the page cache each time."
)
@click.option(
    "--option",
    "options",
    multiple=True,
    help="Another option for mergekit-yaml, as --option=--async-write; repeat for several.",
)
@click.option(
    "--json",
    "report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write everything measured here.",
)
def main(directory, recipes, everything, repeats, patience, cold, options, report):
    """Time whole merges of three agents of 430 M parameters in bfloat16."""
    names = (
        list(RECIPES) if everything else [name for name in RECIPES if name in recipes]
    )
    directory = directory.resolve()
    if not checkpoints.made(directory, AGENTS):
        click.echo(f"making checkpoints in {directory} …", err=True)
        in_new_process(checkpoints.make, directory, AGENTS)
    kept = [name for name in names if f"built-in {name}" in names]
    kept += [f"built-in {name}" for name in kept]
    with tempfile.TemporaryDirectory(dir=directory) as outputs:
        workplace = Workplace(directory, Path(outputs), kept, options, cold)
        workplace.limit(), workplace.import_mergekit()  # into the page cache
        contenders = {_LIMIT: workplace.limit, _IMPORT: workplace.import_mergekit}
        contenders |= {n: functools.partial(workplace.merge, n) for n in names}
        best = interleave(contenders, least=1, most=repeats, patience=patience)
        differences = compare(workplace, names)
    out = console()
    millions = checkpoints.DEFAULT.parameters() / 1e6
    out.print(f"{millions:.0f} M parameters, {AGENTS} agents, bfloat16")
    out.print(runs_table(best))
    for name, (greatest, fraction) in differences.items():
        out.print(
            f"{name} and built-in {name}: greatest difference {greatest:.3g}, "
            f"{fraction:.2%} of the elements differ"
        )
    if report:
        write_report(
            report,
            runs={name: run._asdict() for name, run in best.items()},
            differences=differences,
        )


if __name__ == "__main__":
    main()
