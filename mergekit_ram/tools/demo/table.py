"""The demo's result for a person at a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mergekit_ram.report.merge_report import FILE_NAME
from mergekit_ram.tools.demo.families import FAMILIES
from mergekit_ram.tools.demo.run import DemoResult


def print_result(result: DemoResult, console: Console) -> None:
    """Print scores in percent, each column's best merge in bold, and where everything lies."""
    table = Table(title=f"Tasks answered exactly, in % of {result.tasks_per_family} each")
    table.add_column("model", no_wrap=True)
    for name in (*FAMILIES, "mean"):
        table.add_column(name, justify="right")
    rows = {m.method: [*(m.scores[f] for f in FAMILIES), m.mean] for m in result.methods}
    merges = {name: row for name, row in rows.items() if not name.startswith(("base", "agent"))}
    best = [max(column) for column in zip(*merges.values())]
    for name, row in rows.items():
        if name == next(iter(merges)):
            table.add_section()
        cells = [f"{100 * value:.1f}" for value in row]
        if name in merges:
            cells = [
                f"[bold]{cell}[/bold]" if value == top else cell
                for cell, value, top in zip(cells, row, best)
            ]
        table.add_row(name, *cells)
    console.print(table)
    where = result.directory
    for what, path in {
        "models": f"{where}/base, {where}/<family>, {where}/merged/<method>",
        "recipes": f"{where}/recipes/<method>.yml",
        "report": f"{where}/merged/ram/{FILE_NAME}",
        "plots": ", ".join(result.plots) or "none: matplotlib is not installed",
    }.items():
        console.print(f"{what + ':':9}{path}", soft_wrap=True, highlight=False)
