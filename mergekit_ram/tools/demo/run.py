"""The demo from checkpoints to scores: what it writes, merges, measures and draws."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel

from mergekit_ram.tools.demo.evaluate import score
from mergekit_ram.tools.demo.families import FAMILIES
from mergekit_ram.tools.demo.merging import merge, recipe, write_recipe

CHECKPOINTS = Path(__file__).parent / "checkpoints"
COMPARED = (
    "ram",
    "ramplus",
    "ramplus_tl",
    "ties",
    "dare_ties",
    "task_arithmetic",
    "linear",
)
TASKS_PER_FAMILY = 200


class MethodScore(BaseModel):
    """A model's scores: the part of a family's unseen tasks that it answers exactly.

    ``method`` is a merge method, ``base``, or ``agent: `` and the family that the agent was trained
    on.
    """

    method: str
    scores: dict[str, float]
    mean: float
    model: str


class DemoResult(BaseModel):
    """What the demo measured and wrote. Paths are absolute or relative as its directory was."""

    tasks_per_family: int
    directory: str
    methods: list[MethodScore]
    plots: list[str] = []

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)


def agent_name(family: str) -> str:
    return f"agent: {family}"


def run_demo(
    directory: Path,
    *,
    tasks: int = TASKS_PER_FAMILY,
    progress: Callable[[str], None] = lambda _: None,
) -> DemoResult:
    """Write checkpoints and recipes, merge by every method, score base, agents and merges.

    Args:
        tasks: how many of each family, the same ones for all models.
        progress: called with what is being done next.
    """
    models = dict(write_checkpoints(directory))
    recipes = write_recipes(directory)
    for method, recipe_file in recipes.items():
        progress(f"merging: {method}")
        models[method] = directory / "merged" / method
        merge(recipe_file, models[method])
    result = DemoResult(tasks_per_family=tasks, directory=str(directory), methods=[])
    for name, model in models.items():
        progress(f"evaluating: {name}")
        scores = score(model, count=tasks)
        mean = sum(scores.values()) / len(scores)
        result.methods.append(MethodScore(method=name, scores=scores, mean=mean, model=str(model)))
    result.plots = [str(path) for path in write_plots(result, directory / "plots")]
    return result


def write_checkpoints(directory: Path) -> Iterator[tuple[str, Path]]:
    """Copy the bundled models; yields their names and where they lie."""
    for name in ("base", *FAMILIES):
        target = directory / name
        shutil.copytree(CHECKPOINTS / name, target, dirs_exist_ok=True)
        yield "base" if name == "base" else agent_name(name), target


def write_recipes(directory: Path) -> dict[str, Path]:
    """A recipe for each method, in ``recipes``; returns them by method."""
    base, *agents = (directory.resolve() / name for name in ("base", *FAMILIES))
    return {
        method: write_recipe(directory / "recipes" / f"{method}.yml", recipe(method, base, agents))
        for method in COMPARED
    }


def write_plots(result: DemoResult, directory: Path) -> list[Path]:
    """Bars of every model's scores, if matplotlib is there; returns what was written."""
    try:
        from matplotlib.figure import Figure  # late: an optional extra
    except ImportError:
        return []
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(FAMILIES)
    for i, family in enumerate(FAMILIES):
        places = [place + (i - 1) * width for place in range(len(result.methods))]
        heights = [100 * method.scores[family] for method in result.methods]
        axes.bar(places, heights, width, label=family)
    means = [100 * method.mean for method in result.methods]
    axes.scatter(range(len(means)), means, color="black", marker="_", s=300, label="mean")
    names = [method.method.replace(": ", ":\n") for method in result.methods]
    axes.set_xticks(range(len(names)), names, rotation=35, fontsize=8)
    axes.set_ylabel("tasks answered exactly (%)")
    axes.set_ylim(0, 100)
    figure.legend(ncols=4, fontsize=8, loc="outside upper center")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "scores.png"
    figure.savefig(path, dpi=150)
    return [path]
