"""Runs all benchmarks and writes what docs/performance.md says: JSON, Markdown and plots.

    python benchmarks/suite.py --out results

Takes about an hour, 10 GB of memory and 12 GB of disk on two cores; ``--big-tensor`` adds 20 GB of
each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import harness

# Options of every benchmark, and those with which it soon ends and tells nothing but that it runs.
BENCHMARKS = {
    "kernel": ("", "--elements 2**10 --repeats 2 --no-memory"),
    "whole_merge": ("--all", "--tiny --repeats 1"),
    "growth": ("--all --patience 5", "--axis tensors --most 1100"),
    "big_tensor": ("", "--tiny"),
}
NAMES = click.Choice(list(BENCHMARKS))


@click.command()
@harness.option(
    "--out", type=click.Path(path_type=Path), default="results", help="Results go here."
)
@harness.several("--only", "only", type=NAMES, help="Run only this, keep the others' results")
@harness.option("--big-tensor", is_flag=True, help="Also a tensor of 1.25 G elements.")
@harness.option("--tiny", is_flag=True, help="Only to see that everything runs.")
def main(out, only, big_tensor, tiny):
    """Run all benchmarks, ours and mergekit's methods in one run."""
    for name in only or BENCHMARKS:
        if only or big_tensor or name != "big_tensor":
            click.echo(f"=== {name}", err=True)
            script = Path(__file__).with_name(f"{name}.py")
            arguments = *BENCHMARKS[name][tiny].split(), "--json", out / f"{name}.json"
            subprocess.run([sys.executable, script, *arguments], check=True)
    files = [out / f"{name}.md" for name in BENCHMARKS]
    sections = [file.read_text() for file in files if file.exists()]
    (out / "results.md").write_text("# Measured\n\n" + "\n".join(sections))


if __name__ == "__main__":
    main()
