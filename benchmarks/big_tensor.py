"""Merges of one big tensor, the embedding of 152 064 tokens × 8 192: what memory they take beyond the output.

    python benchmarks/big_tensor.py --out big_tensor

Base and three agents in bfloat16 are made once, 10 GB of them. Twice each method is run on them: as ``mergekit-yaml``,
whose anonymous memory (without the pages of the mapped inputs, which the system takes back when it needs them) is
watched, and on the mapped tensors alone, where the peak of the memory is exact. Linux only.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import checkpoints
import click
import yaml
from checkpoints import Sizes
from growth import import_mergekit, recipe
from kernel import peak_scratch
from rounds import (
    Run,
    console,
    in_new_process,
    markdown,
    run_process,
    table,
    write_report,
)

AGENTS = 3
SIZES = Sizes(layers=0, hidden=8192, intermediate=64, vocabulary=152_064, tied=True)
# Of the built-in ``ram``, measured by benchmarks/kernel.py.
BUILT_IN_BYTES_PER_ELEMENT = 53
_ELEMENTS_OF_A_PAGE = 2048
_NAME = "model.embed_tokens.weight"
_MB, _GB = 1e6, 1e9


@dataclass(frozen=True)
class Merge:
    """Memory of one merge.

    Attributes:
        scratch_bytes: of the merge of the tensor alone, beyond its output.
        run_bytes: anonymous memory of the whole run, beyond that of importing mergekit.
    """

    method: str
    elements: int
    output_bytes: int
    scratch_bytes: int
    run_bytes: int
    run_seconds: float


def weigh(method: str, models: Path) -> int:
    """Peak memory of merging the tensor, beyond its output. For a process of its own."""
    from mergekit.merge_methods import merge_tensors
    from safetensors import safe_open

    names = ["base", *(f"agent-{i}" for i in range(AGENTS))]
    files = [checkpoints.files_by_tensor(models / name)[_NAME] for name in names]
    tensors = [safe_open(file, "pt").get_tensor(_NAME) for file in files]
    merge = functools.partial(merge_tensors, method=method, base_index=0)
    merge([tensor[:8] for tensor in tensors])
    for tensor in tensors:
        tensor.view(-1)[::_ELEMENTS_OF_A_PAGE].sum()  # into resident memory
    return peak_scratch(functools.partial(merge, tensors))


def run(method: str, models: Path, directory: Path) -> Run:
    config = directory / "recipe.yml"
    config.write_text(yaml.safe_dump(recipe(method, models, AGENTS)))
    program = Path(sys.executable).with_name("mergekit-yaml")
    options = ("--no-copy-tokenizer", "--quiet")
    return run_process([program, config, directory / "merged", *options])


def measure(method: str, models: Path, imported: Run) -> Merge:
    click.echo(f"{method} …", err=True)
    scratch = in_new_process(weigh, method, models)
    click.echo(f"  {scratch / _MB:.0f} MB beyond the output", err=True)
    with tempfile.TemporaryDirectory(dir=models) as directory:
        whole = run(method, models, Path(directory))
    elements = SIZES.parameters()
    return Merge(
        method=method,
        elements=elements,
        output_bytes=2 * elements,
        scratch_bytes=scratch,
        run_bytes=whole.peak_anonymous_bytes - imported.peak_anonymous_bytes,
        run_seconds=whole.seconds - imported.seconds,
    )


COLUMNS = (
    "method",
    "elements",
    "output GB",
    "merge of the tensor beyond it, MB",
    "whole run, anonymous GB",
    "seconds",
    "built-in would take, GB",
)


def rows(merges: Sequence[Merge]) -> list[tuple[str, ...]]:
    return [
        (
            m.method,
            f"{m.elements:,}",
            f"{m.output_bytes / _GB:.2f}",
            f"{m.scratch_bytes / _MB:.1f}",
            f"{m.run_bytes / _GB:.2f}",
            f"{m.run_seconds:.0f}",
            f"{m.elements * BUILT_IN_BYTES_PER_ELEMENT / _GB:.0f}",
        )
        for m in merges
    ]


@click.command()
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(tempfile.gettempdir()) / "mergekit-ram-big-tensor",
    show_default=True,
    help="Where the checkpoints are made once and kept.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("ram", "ramplus"),
    show_default=True,
    help="Merge method; repeat for several.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write big_tensor.json and big_tensor.md here.",
)
def main(directory, methods, out):
    """Measure the memory of merging one tensor of 1.25 G elements."""
    directory = directory.resolve()
    if not checkpoints.made(directory, AGENTS):
        click.echo(f"making checkpoints in {directory} …", err=True)
        in_new_process(checkpoints.make, directory, AGENTS, SIZES)
    imported = import_mergekit()
    merges = [measure(method, directory, imported) for method in methods]
    parts = ("one tensor of 1.25 G elements, 3 agents, bfloat16", COLUMNS, rows(merges))
    console().print(table(*parts))
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_report(out / "big_tensor.json", merges=list(map(asdict, merges)))
        (out / "big_tensor.md").write_text(markdown(*parts))


if __name__ == "__main__":
    main()
