"""Findings as PNG files, of the width of a paper's column. Needs matplotlib (extra ``plots``)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from mergekit_ram.errors import MissingExtraError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter
except ImportError:
    raise MissingExtraError("write_plots", "matplotlib", "plots") from None

from mergekit_ram.report.findings import Comparison, Inspection, percent
from mergekit_ram.report.merge_report import PartReport

_WIDTH, _HEIGHT = 4.2, 2.9
_STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "savefig.dpi": 200,
}
# Points that a legend takes for each entry and for each letter of it.
_LEGEND_HANDLE, _LEGEND_LETTER = 36, 4.4
_PERCENT = FuncFormatter(lambda part, _: f"{100 * part:.3g}%")
# Okabe and Ito's colours, told apart by people of any colour vision; with the hatches also in grey.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_MARKERS = "osD^vP*X"
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo", "----")


def write_plots(found: Inspection | Comparison, directory: str) -> list[str]:
    """Draw everything that was found; returns the files' paths."""
    drawings = {
        "overlap": overlap_heatmap,
        "overlap_histogram": overlap_histogram,
        "layers": layer_sparsity,
        "magnitudes": magnitude_histogram,
        "epsilon": epsilon_sweep,
    }
    if isinstance(found, Comparison):
        drawings = {"retention": retention_bars}
    os.makedirs(directory, exist_ok=True)
    paths = []
    with matplotlib.rc_context(_STYLE):
        for name, draw in drawings.items():
            paths.append(os.path.join(directory, f"{name}.png"))
            draw(found).savefig(paths[-1])
    return paths


def overlap_heatmap(inspection: Inspection) -> Figure:
    """Jaccard index of every two agents' changes, and how often they disagree in sign."""
    names, n = inspection.names(), len(inspection.agents)
    size = max(_HEIGHT, 0.75 * n + 1.2)
    figure, axes = _figure(size + 0.8, size)
    values = [
        [inspection.jaccard(i, j) if i != j else math.nan for j in range(n)] for i in range(n)
    ]
    greatest = max((v for row in values for v in row if v == v), default=0.0)
    top = 0.5 if greatest <= 0.5 else 1.0
    axes.set_facecolor("0.93")
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=top)
    for i, agent in enumerate(inspection.agents):
        for j in range(n):
            text = f"changed\n{percent(agent.changed / max(agent.total, 1))}"
            if i != j:
                text = f"{percent(values[i][j])}\n± {percent(inspection.conflict_rate(i, j))}"
            colour = "white" if values[i][j] > 0.6 * top else "black"
            axes.text(j, i, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(n), names, rotation=30, ha="right")
    axes.set_yticks(range(n), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("Changed by both, of changed by either\n(±: in opposite directions)")
    bar = figure.colorbar(image, ax=axes, format=_PERCENT, shrink=0.8)
    bar.outline.set_visible(False)
    return figure


def overlap_histogram(inspection: Inspection) -> Figure:
    """Each agent's changes by how many others changed the same element."""
    figure, axes = _figure()
    others = range(len(inspection.agents))
    rows = [
        [count / max(agent.changed, 1) for count in agent.overlap_histogram]
        for agent in inspection.agents
    ]
    _bars(axes, rows, inspection.names())
    axes.set_xticks(others, ["alone", *map(str, others[1:])])
    axes.set_title("Elements an agent changed alone and with others")
    return _labelled(
        figure, axes, "other agents that changed the same element", "of the agent's changes"
    )


def layer_sparsity(inspection: Inspection) -> Figure:
    """What part of each layer every agent changed."""
    figure, axes = _figure()
    parts = inspection.layers
    for i, name in enumerate(inspection.names()):
        rates = [part.changed[i] / max(part.total, 1) for part in parts]
        axes.plot(rates, label=name, color=_colour(i), marker=_marker(i))
    labels = _layer_labels(parts)
    step = max(1, -(-len(labels) // 14))
    axes.set_xticks(range(0, len(labels), step), labels[::step], rotation=45, ha="right")
    axes.set_ylim(bottom=0)
    axes.set_title("Changed elements by layer")
    return _labelled(figure, axes, "", "elements changed")


def magnitude_histogram(inspection: Inspection) -> Figure:
    """How large the differences from the base are, with epsilon."""
    figure, axes = _figure()
    magnitudes = inspection.magnitudes
    # The open bins at both ends are drawn a half-decade wide.
    edges = [magnitudes.edges[0] / 3, *magnitudes.edges, magnitudes.edges[-1] * 3]
    held = [k for k in range(len(edges) - 1) if any(row[k] for row in magnitudes.counts)]
    for i, (name, counts) in enumerate(zip(inspection.names(), magnitudes.counts)):
        parts = [count / max(sum(counts), 1) for count in counts]
        axes.stairs(
            parts, edges, label=name, color=_colour(i), linestyle=("-", "--", ":", "-.")[i % 4]
        )
    axes.set_xscale("log")
    low, high = inspection.epsilon
    if held:
        axes.set_xlim(min(edges[held[0]], low / 2), max(edges[held[-1] + 1], high * 2))
    _mark_epsilon(axes, inspection)
    axes.set_title("Magnitudes of the differences from the base")
    return _labelled(figure, axes, "|agent − base|", "of the changes")


def epsilon_sweep(inspection: Inspection) -> Figure:
    """What would count as changed, and as shared, at other values of epsilon."""
    figure, axes = _figure()
    points = inspection.epsilon_sweep
    epsilons = [point.epsilon for point in points]
    for i, name in enumerate(inspection.names()):
        total = max(inspection.agents[i].total, 1)
        changed = [point.changed[i] / total for point in points]
        shared = [point.shared[i] / total for point in points]
        style = {"color": _colour(i), "marker": _marker(i)}
        axes.plot(epsilons, changed, label=name, **style)
        axes.plot(epsilons, shared, linestyle="--", markerfacecolor="white", **style)
    axes.plot([], [], color="0.4", label="changed")
    axes.plot([], [], color="0.4", linestyle="--", label="shared among them")
    axes.set_xscale("log")
    _mark_epsilon(axes, inspection)
    axes.set_title("Changed elements by epsilon")
    return _labelled(figure, axes, "epsilon", "of all elements")


def retention_bars(comparison: Comparison) -> Figure:
    """What every method keeps of each agent's unique updates, and of its shared ones."""
    width = max(_WIDTH, 0.75 * len(comparison.methods) + 1)
    figure = Figure(figsize=(width, 1.6 * _HEIGHT), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    for axes, measure, title in (
        (upper, "unique_retention", "Kept of updates that one agent made alone"),
        (lower, "shared_retention", "Kept of updates that several agents made"),
    ):
        rows = [
            [getattr(method.agents[i], measure) for method in comparison.methods]
            for i in range(len(comparison.names()))
        ]
        _bars(axes, rows, comparison.names())
        axes.axhline(1, color="0.3", linewidth=0.8, linestyle="--", zorder=3)
        axes.axhline(0, color="0.3", linewidth=0.8)
        axes.set_title(title)
        axes.set_ylabel("1 = kept whole")
    lower.set_xticks(
        range(len(comparison.methods)),
        [method.method.replace("_", "\n") for method in comparison.methods],
    )
    _legend(figure, upper)
    return figure


def _figure(width: float = _WIDTH, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    return figure, axes


def _labelled(figure: Figure, axes: Axes, across: str, up: str) -> Figure:
    """The figure with its axes named, the upright one in percent, and a legend."""
    axes.yaxis.set_major_formatter(_PERCENT)
    axes.set(xlabel=across, ylabel=up)
    _legend(figure, axes)
    return figure


def _bars(axes: Axes, rows: Sequence[Sequence[float | None]], names: Sequence[str]) -> None:
    """Groups of bars, one group a column of the rows, one bar a name; None draws none."""
    width = 0.8 / len(rows)
    for i, (name, row) in enumerate(zip(names, rows)):
        places = [k + (i - (len(rows) - 1) / 2) * width for k in range(len(row))]
        heights = [math.nan if value is None else value for value in row]
        axes.bar(
            places,
            heights,
            width,
            label=name,
            color=_colour(i),
            hatch=_HATCHES[i % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.5,
        )


def _mark_epsilon(axes: Axes, inspection: Inspection) -> None:
    """A line, and room for its name above what is drawn already."""
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    for epsilon in dict.fromkeys(inspection.epsilon):
        axes.axvline(epsilon, color="0.3", linewidth=0.9, linestyle=":")
    axes.annotate(
        "epsilon",
        (inspection.epsilon[0], 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -2),
        textcoords="offset points",
        color="0.3",
        va="top",
    )


def _layer_labels(parts: Sequence[PartReport]) -> list[str]:
    """The numbers of layers, and the last name of what stands outside them."""
    return [part.name.rpartition(".")[2] for part in parts]


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the plot, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    available = 72 * figure.get_figwidth()
    needed = _LEGEND_HANDLE + _LEGEND_LETTER * max(map(len, labels))
    columns = max(1, min(3, int(available / needed)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


def _marker(i: int) -> str:
    return _MARKERS[i % len(_MARKERS)]
