"""Findings as rich tables, readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mergekit_ram.method.magnitude import SWEEP
from mergekit_ram.report.findings import (
    Comparison,
    Inspection,
    MethodComparison,
    number,
    percent,
    power,
)

# Layers and module types of one table; what is left out is in the JSON.
_MOST_PARTS = 12
_DECADES = SWEEP[::2]
_BAR = "▏▎▍▌▋▊▉█"
_BAR_CELLS = 12


def show_inspection(inspection: Inspection, console: Console) -> None:
    """Print what the agents of a recipe changed."""
    console.print(_heading(inspection))
    console.print(_agents_table(inspection))
    if len(inspection.agents) > 1:
        console.print(_histogram_table(inspection))
        console.print(_pairs_table(inspection))
    console.print(_magnitude_table(inspection))
    console.print(_sweep_table(inspection))
    for title, parts in (
        ("Layer", inspection.layers),
        ("Module type", inspection.module_types),
    ):
        console.print(_parts_table(title, parts, inspection.names()))
    console.print(_paragraphs("Verdict", inspection.verdict()))


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print what every method keeps of the agents."""
    console.print(_methods_table(comparison))
    if len(comparison.names()) > 1:
        console.print(_retention_table(comparison))
    console.print(_paragraphs("Reading", _reading(comparison)))


def _heading(inspection: Inspection) -> Text:
    low, high = inspection.epsilon
    epsilon = " to ".join(dict.fromkeys((power(low), power(high))))
    rescaling = ", ".join(f"{k} {_plain(v)}" for k, v in inspection.rescaling.items())
    return Text(
        f"{inspection.total:,} elements, base {inspection.base_model}\n"
        f"changed: |agent - base| > epsilon {epsilon}; ρ and λ as ramplus takes them: {rescaling}"
    )


def _agents_table(inspection: Inspection) -> Table:
    table = _table("Agents", "agent", "changed", "%", "unique", "shared", "ρ", "λ")
    for name, agent in zip(inspection.names(), inspection.agents):
        factors = dict.fromkeys(f"{factor:.4g}" for factor in agent.lambda_range)
        table.add_row(
            name,
            f"{agent.changed:,}",
            percent(agent.changed / agent.total) if agent.total else "–",
            f"{agent.unique:,}",
            f"{agent.shared:,}",
            f"{agent.rho:.3g}",
            "–".join(factors),
        )
    return table


def _histogram_table(inspection: Inspection) -> Table:
    others = range(len(inspection.agents))
    table = _table(
        "Changed elements shared with so many other agents",
        "agent",
        *("alone" if k == 0 else f"{k} other{'s' * (k > 1)}" for k in others),
    )
    for name, agent in zip(inspection.names(), inspection.agents):
        parts = (count / max(agent.changed, 1) for count in agent.overlap_histogram)
        table.add_row(name, *map(percent, parts))
    return table


def _pairs_table(inspection: Inspection) -> Table:
    table = _table(
        f"Pairs of agents; {inspection.sign_conflicts:,} elements with opposite signs in all",
        *("agents", "both changed", "Jaccard", "opposite signs"),
    )
    names = inspection.names()
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            table.add_row(
                f"{first} & {names[j]}",
                f"{inspection.pairwise_shared[i][j]:,}",
                percent(inspection.jaccard(i, j)),
                percent(inspection.conflict_rate(i, j)),
            )
    return table


def _magnitude_table(inspection: Inspection) -> Table:
    """Rows from the smallest bin that holds anything to the largest."""
    magnitudes = inspection.magnitudes
    changed = [max(sum(counts), 1) for counts in magnitudes.counts]
    edges = magnitudes.edges
    bins = [
        f"≤ {power(edges[0])}",
        *(f"{power(low)} – {power(high)}" for low, high in zip(edges, edges[1:])),
        f"> {power(edges[-1])}",
    ]
    held = [k for k in range(len(bins)) if any(row[k] for row in magnitudes.counts)]
    table = _table(
        "Magnitudes of the changes; epsilon at the gap" + _sampled(inspection),
        *("|agent - base|", *inspection.names()),
    )
    epsilon = inspection.epsilon[0]
    for k in range(held[0], held[-1] + 1) if held else ():
        low = 0.0 if k == 0 else edges[k - 1]
        parts = [row[k] / total for row, total in zip(magnitudes.counts, changed)]
        table.add_row(bins[k], *(f"{_bar(p)} {percent(p):>6}" for p in parts))
        if k + 1 < len(bins) and low < epsilon <= edges[k]:
            table.add_section()
    return table


def _sweep_table(inspection: Inspection) -> Table:
    points = [
        p
        for p in inspection.epsilon_sweep
        if p.epsilon in _DECADES or p.epsilon in inspection.epsilon
    ]
    table = _table(
        "Changed elements by epsilon, and the shared ones among them" + _sampled(inspection),
        *("agent", *(power(point.epsilon) for point in points)),
    )
    for i, (name, agent) in enumerate(zip(inspection.names(), inspection.agents)):
        cells = []
        for point in points:
            changed, shared = point.changed[i], point.shared[i]
            among = f" ({percent(shared / changed)})" if changed else ""
            cells.append(f"{percent(changed / max(agent.total, 1))}{among}")
        table.add_row(name, *cells)
    return table


def _parts_table(title: str, parts: Sequence, names: Sequence[str]) -> Table:
    shown = parts if len(parts) <= _MOST_PARTS else _ends(parts)
    left = len(parts) - len(shown)
    note = f"; {left} in between left out" if left else ""
    table = _table(
        f"Changed elements by {title.lower()}{note}",
        *(title.lower(), *names, "shared", "opposite"),
    )
    for part in shown:
        changed = sum(part.changed)
        table.add_row(
            part.name,
            *(percent(count / max(part.total, 1)) for count in part.changed),
            percent(sum(part.shared) / max(changed, 1)),
            percent(part.sign_conflicts / max(part.total, 1)),
        )
    return table


def _ends(parts: Sequence) -> list:
    half = _MOST_PARTS // 2
    return [*parts[:half], *parts[-half:]]


# Column, measure, what is best, how it is written.
_COLUMNS: tuple[tuple[str, str, Callable | None, Callable], ...] = (
    ("unique\nkept", "unique_retention", lambda v: -abs(v - 1), number),
    ("shared\nkept", "shared_retention", lambda v: -abs(v - 1), number),
    ("cosine", "cosine", lambda v: v, number),
    ("same\nsign", "sign_agreement", lambda v: v, percent),
    ("norm", "norm_ratio", None, number),
)


def _methods_table(comparison: Comparison) -> Table:
    columns = [
        _marked([method.mean(measure) for method in comparison.methods], best, written)
        for _, measure, best, written in _COLUMNS
    ]
    columns.append([percent(m.changed / max(comparison.total, 1)) for m in comparison.methods])
    seconds = [method.seconds for method in comparison.methods]
    columns.append(_marked(seconds, lambda v: -v, lambda v: f"{v:.3g}"))
    table = _table(
        "What is left of the agents, on average (* best)",
        *("method", *(name for name, *_ in _COLUMNS), "changed", "seconds"),
    )
    for row in zip((method.method for method in comparison.methods), *columns):
        table.add_row(*row)
    return table


def _retention_table(comparison: Comparison) -> Table:
    table = _table(
        "Unique / shared updates kept, by agent (* best)",
        *("method", *comparison.names()),
    )
    columns = []
    for i in range(len(comparison.names())):
        agents = [method.agents[i] for method in comparison.methods]
        sides = [
            _marked(
                [getattr(agent, measure) for agent in agents],
                lambda v: -abs(v - 1),
                number,
            )
            for measure in ("unique_retention", "shared_retention")
        ]
        columns.append([f"{unique} / {shared}" for unique, shared in zip(*sides)])
    for row in zip((method.method for method in comparison.methods), *columns):
        table.add_row(*row)
    return table


def _reading(comparison: Comparison) -> list[str]:
    sentences = [
        "kept: 1 is whole, 0 is lost; unique are updates of one agent "
        "alone, shared those of several. norm: of the merged change, "
        "over the agent's. changed: elements moved by more than epsilon"
    ]
    given = [
        f"{method.method} {settings}"
        for method in comparison.methods
        if (settings := _settings(method, comparison))
    ]
    if given:
        sentences.append("parameters (+ not in the recipe): " + "; ".join(given))
    sentences.append(f"random choices by seed {comparison.seed}")
    return sentences


def _settings(method: MethodComparison, comparison: Comparison) -> str:
    """The parameters that the recipe sets or lacks; the JSON has those at their defaults."""
    named = _parameters_of(comparison.recipe)
    shown = [
        f"{name} {_plain(value)}{'+' * (name in method.assumed)}"
        for name, value in method.parameters.items()
        if name in named or name in method.assumed
    ]
    return ", ".join(shown)


def _parameters_of(content: object) -> set[str]:
    if isinstance(content, list):
        return {name for inner in content for name in _parameters_of(inner)}
    if not isinstance(content, dict):
        return set()
    own = set(content.get("parameters") or ())
    return own.union(*(_parameters_of(inner) for inner in content.values()))


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "/".join(map(_plain, value.values()))
    if isinstance(value, list):
        return "–".join(map(_plain, value))
    return power(value) if isinstance(value, float) else str(value)


def _marked(values: Sequence[float | None], best: Callable | None, written: Callable) -> list[str]:
    """Values as text, a star at those that read like the best one; without a best, no star."""
    present = [value for value in values if value is not None]
    mark = written(max(present, key=best)) if best and present else None
    texts = ["–" if value is None else written(value) for value in values]
    return [f"*{text}" if text == mark else text for text in texts]


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold", vertical="bottom")
    return table


def _bar(part: float) -> str:
    """A bar of block characters, as long as the part of a whole."""
    eighths = round(part * _BAR_CELLS * len(_BAR))
    full, rest = divmod(eighths, len(_BAR))
    return "█" * full + (_BAR[rest - 1] if rest else "")


def _sampled(inspection: Inspection) -> str:
    fraction = inspection.magnitudes.sampled_fraction
    return "" if fraction == 1 else f" ({percent(fraction)} of them sampled)"


def _paragraphs(title: str, sentences: Sequence[str]) -> Group:
    return Group(
        Text(title, style="bold"),
        *(Padding(Text(f"- {sentence}"), (0, 0, 0, 1)) for sentence in sentences),
    )
