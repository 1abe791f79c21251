"""Times and weighs whole merges of 430 M parameters: ours, mergekit's own methods and copying.

    python benchmarks/whole_merge.py --json whole_merge.json

Every merge is a ``mergekit-yaml`` of its own. The checkpoints are made once, 3.4 GB of them; all of
them stay in the page cache on a machine with 8 GB to spare, unless ``--cold`` takes them out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import checkpoints
import click
import harness
from checkpoints import METHODS, TOOLS
from harness import Run

_LIMIT, _IMPORT = "read all, write one", "import mergekit"
_SECONDS = dict.fromkeys(("seconds", "beyond import", "/ limit", "built-in ram / it"), ".1f")
_COLUMNS = {"merge": "", **_SECONDS, "peak GB": ".2f"}
RECIPES, DEFAULT = click.Choice(list(METHODS)), tuple(METHODS)[:5]


def rows(best: Mapping[str, Run]) -> list[tuple]:
    """Of every merge, and of the limit, which imports nothing."""
    imported, limit = best[_IMPORT].seconds, best[_LIMIT].seconds
    beyond = {name: run.seconds - imported for name, run in best.items()}
    beyond[_LIMIT] = limit
    built_in = beyond.get("built-in ram")
    found = [(_IMPORT, imported, *[None] * 4)]
    for name, run in best.items():
        if name != _IMPORT:
            own = beyond[name]
            faster, peak = built_in and built_in / own, run.peak_bytes / harness.GB or None
            found.append((name, run.seconds, own, own / limit, faster, peak))
    return found


@click.command()
@harness.directory_option
@harness.several("--recipe", "recipes", type=RECIPES, default=DEFAULT, help="What to merge")
@harness.option("--all", "everything", is_flag=True, help="Every recipe, inspect and compare.")
@harness.repeats_option(2)
@harness.patience_option(30.0)
@harness.option(
    "--cold", is_flag=True, help="Take the checkpoints out of the page cache each time."
)
@harness.several("--option", "options", help="Another of mergekit-yaml, as --option=--async-write")
@harness.tiny_option
@harness.json_option
def main(directory, recipes, everything, repeats, patience, cold, options, tiny, report):
    """Time whole merges of three agents of 430 M parameters in bfloat16."""
    sizes = checkpoints.TINY if tiny else checkpoints.Sizes()
    models = checkpoints.make_once(directory, sizes)

    def run(contender: Callable[..., Run], *arguments) -> Run:
        if cold:
            checkpoints.evict(models)
        return contender(*arguments)

    limit = harness.in_new_process, checkpoints.read_all_write_one, models
    contenders = {_IMPORT: checkpoints.import_mergekit, _LIMIT: functools.partial(run, *limit)}
    contenders[_IMPORT](), contenders[_LIMIT]()  # into the page cache
    for name in METHODS:
        if everything or name in recipes:
            merge = checkpoints.merge, name, models, *options
            contenders[name] = functools.partial(run, *merge)
    for name in TOOLS if everything else ():
        contenders[name] = functools.partial(run, checkpoints.look, name, models)
    bounds = {"least": 1, "most": repeats, "patience": patience}
    best = harness.interleave(contenders, **bounds, description="merging")
    title = f"Whole merges of {sizes.parameters() / 1e6:.0f} M parameters, 3 agents, bfloat16"
    plot = ("merge", "beyond import")
    harness.publish([harness.Table(title, _COLUMNS, rows(best), plot)], report)


if __name__ == "__main__":
    main()
