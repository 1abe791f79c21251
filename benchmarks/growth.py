"""How whole merges grow with elements, agents and tensors: time, memory, and the check alone.

    python benchmarks/growth.py --json growth.json

Every merge is a ``mergekit-yaml`` of its own. Checkpoints are made as they are needed, 7 GB of
them at a time, or 10 GB with ``--axis embedding``, and removed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import checkpoints
import click
import harness
from checkpoints import EMBEDDING, METHODS, Sizes
from click.testing import CliRunner

from mergekit_ram import cli

AXES, OURS = ("elements", "agents", "tensors", "embedding"), ("ram", "ramplus")
# Axis → where on it, sizes of the models, agents.
CASES = {
    "elements": [
        (sizes.parameters(), sizes, 3)
        for sizes in (Sizes(12, hidden, 7 * hidden // 2) for hidden in (256, 512, 1024, 2048))
    ],
    "agents": [(agents, Sizes(12, 512, 1792), agents) for agents in (1, 2, 3, 5, 8)],
    "tensors": [
        (len(sizes.shapes()), sizes, 3)
        for sizes in (Sizes(layers, 16, 32, 64) for layers in (27, 111, 555, 2222))
    ],
    # Not by default: one tensor of 1.25 G elements, 10 GB of checkpoints.
    "embedding": [(EMBEDDING.parameters(), EMBEDDING, 3)],
}
# Seconds are beyond mergekit's import; growth is the power of x by which they grew: 1 is linear.
_MEASURED = ("seconds", "growth", "check s", "peak GB", "anonymous GB")
_COLUMNS = {"method": "", **dict.fromkeys(_MEASURED, ".2f")}


def measure(
    sizes: Sizes, agents: int, methods: Sequence[str], directory: Path, import_seconds: float
) -> Iterator[tuple]:
    """Merge by every method."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        models = Path(place)
        harness.in_new_process(checkpoints.make, models, sizes, agents)
        for method in methods:
            checked = harness.in_new_process(check, method, models) if method in OURS else None
            run = checkpoints.merge(method, models, "--out-shard-size", "500M")
            memory = run.peak_bytes / harness.GB, run.anonymous_bytes / harness.GB
            yield method, run.seconds - import_seconds, checked, *memory


def check(method: str, models: Path) -> float:
    """Seconds of ``mergekit-ram check`` once all is imported. For a process of its own."""
    recipe = checkpoints.write_recipe(models / "recipe.yml", method, models)

    def run() -> None:
        result = CliRunner().invoke(cli.main, ["check", str(recipe)])
        if result.exit_code:
            raise RuntimeError(result.output)

    return min(harness.clock(run), harness.clock(run)).seconds


def power(x: float, seconds: float, before: tuple[float, float] | None) -> float | None:
    if before is None or min(seconds, before[1]) <= 0:
        return None
    return math.log(seconds / before[1]) / math.log(x / before[0])


@click.command()
@harness.several("--axis", "axes", type=click.Choice(AXES), default=AXES[:3], help="What to vary")
@harness.several("--method", "methods", type=click.Choice(list(METHODS)), default=OURS, help="How")
@harness.option("--all", "everything", is_flag=True, help="Merge by every method.")
@harness.patience_option(math.inf)
@harness.option("--most", default=math.inf, help="Leave out what is larger on its axis.")
@harness.directory_option
@harness.json_option
def main(axes, methods, everything, patience, most, directory, report):
    """Measure how whole merges grow.

    One of mergekit's methods that took longer than the patience gets nothing larger on the axis.
    """
    directory.mkdir(parents=True, exist_ok=True)
    checkpoints.import_mergekit()  # into the page cache
    import_seconds = min(checkpoints.import_mergekit() for _ in range(2)).seconds
    tables = []
    for axis in axes:
        rows, last = [], {}
        left = list(METHODS if everything else methods)
        cases = [case for case in CASES[axis] if case[0] <= most]
        for x, sizes, agents in harness.track(cases, axis):
            for method, seconds, *rest in measure(sizes, agents, left, directory, import_seconds):
                rows.append((x, method, seconds, power(x, seconds, last.get(method)), *rest))
                last[method] = x, seconds
            left = [method for method in left if method in OURS or last[method][1] <= patience]
        title, plot = f"Growth with {axis}, beyond import", (axis, "seconds", "method")
        tables.append(harness.Table(title, {axis: ",", **_COLUMNS}, rows, plot))
    harness.publish(tables, report)


if __name__ == "__main__":
    main()
