"""Times ``inspect`` against the counting pass of ``ramplus``, ``compare`` against its methods.

    python benchmarks/inspection.py --json inspection.json

All passes run in one process, in turn, over checkpoints that are in the page cache.
"""

from __future__ import annotations

import functools

import checkpoints
import click
import harness
from mergekit.options import MergeOptions

from mergekit_ram.host.recipe import Recipe
from mergekit_ram.tools import inspection
from mergekit_ram.tools.comparison import DEFAULT_METHODS, compare

_COUNTING = "counting pass"


def passes_table(recipe: Recipe, options: MergeOptions, repeats: int) -> harness.Table:
    """The counting pass as a merge runs it, and those of ``inspect``. All are planned already."""
    planned = inspection.plan_inspection(recipe, options, {})

    def inspect(every: int) -> None:
        list(inspection.count(planned, sample_every=every, description=""))

    planned.execute()  # into the page cache
    passes = {
        _COUNTING: planned.execute,
        "inspect": functools.partial(inspect, inspection.SAMPLE_EVERY),
        "inspect --exact": functools.partial(inspect, 1),
    }
    contenders = {name: functools.partial(harness.clock, run) for name, run in passes.items()}
    best = harness.interleave(contenders, least=repeats, most=repeats, description="inspecting")
    counting = best[_COUNTING].seconds
    rows = [(name, run.seconds, run.seconds / counting) for name, run in best.items()]
    columns = {"pass": "", "seconds": ".2f", "/ counting pass": ".2f"}
    return harness.Table("Passes over all agents, best seconds", columns, rows)


def comparison_table(recipe: Recipe, options: MergeOptions, methods: str) -> harness.Table:
    """Seconds of every method's own arithmetic, and of all with loading and measuring."""
    found = []
    whole = harness.clock(lambda: found.append(compare(recipe, options, methods.split(","))))
    seconds = {method.method: method.seconds for method in found[0].methods}
    own = sum(seconds.values())
    seconds |= {"all of them": own, "compare": whole.seconds}
    rows = [(name, value, value / own) for name, value in seconds.items()]
    columns = {"method": "", "seconds": ".2f", "/ all of them": ".2f"}
    return harness.Table("Compare, once", columns, rows)


@click.command()
@harness.directory_option
@harness.option(
    "--methods", default=",".join(DEFAULT_METHODS), help="What to compare, comma-separated."
)
@harness.repeats_option(4)
@harness.tiny_option
@harness.json_option
def main(directory, methods, repeats, tiny, report):
    """Time inspect and compare on three agents in bfloat16."""
    sizes = checkpoints.TINY if tiny else checkpoints.Sizes()
    models = checkpoints.make_once(directory, sizes)
    file = checkpoints.write_recipe(models / "inspected.yml", "ramplus", models)
    recipe, options = Recipe.read(str(file)), MergeOptions(quiet=True)
    passes = passes_table(recipe, options, repeats)
    harness.publish([passes, comparison_table(recipe, options, methods)], report)


if __name__ == "__main__":
    main()
