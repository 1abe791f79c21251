"""``mergekit-ram inspect`` and ``compare`` run in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from click.testing import CliRunner, Result

from mergekit_ram import cli
from mergekit_ram.report.findings import Comparison, Inspection
from support import oracle
from support.checkpoints import Weights
from support.recipes import write_recipe
from support.tensors import array


def run(command: str, recipe: Mapping, directory, *options: str) -> Result:
    file = write_recipe(recipe, directory)
    return CliRunner().invoke(cli.main, [command, str(file), "--quiet", *options])


def inspect(recipe: Mapping, directory, *options: str) -> Inspection:
    """Run the command; what it wrote as JSON."""
    path = directory / "found.json"
    result = run("inspect", recipe, directory, "--json", str(path), *options)
    assert result.exit_code == 0, result.output
    return Inspection.model_validate_json(path.read_text())


def words(text: str) -> str:
    return " ".join(text.split())


def count_by_oracle(
    base: Weights, agents: Sequence[Weights], epsilon=lambda name: 1e-5
) -> oracle.Overlap:
    """Counts over all tensors. An agent without a tensor left it as it is."""
    counts = [
        oracle.overlap(
            array(tensor),
            [array(agent.get(name, tensor)) for agent in agents],
            epsilon=epsilon(name),
        )
        for name, tensor in base.items()
    ]
    total = counts[0]
    for other in counts[1:]:
        total = total + other
    return total


def compare(recipe: Mapping, directory, *options: str) -> Comparison:
    """Run the command; what it wrote as JSON."""
    path = directory / "found.json"
    result = run("compare", recipe, directory, "--json", str(path), *options)
    assert result.exit_code == 0, result.output
    return Comparison.model_validate_json(path.read_text())


MEASURES = ("unique_retention", "shared_retention", "cosine", "sign_agreement", "norm_ratio")
