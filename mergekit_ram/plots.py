"""Findings as PNG files, of the width of a paper's column. Needs matplotlib (extra ``plots``)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from mergekit_ram.findings import Comparison, Inspection, percent
from mergekit_ram.report import PartReport

_WIDTH, _HEIGHT, _DPI = 4.2, 2.9, 200
# Okabe and Ito's colours, told apart by people of any colour vision; with the hatches also in grey.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_MARKERS = "osD^vP*X"
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo", "----")


def write_plots(found: Inspection | Comparison, directory: str) -> list[str]:
    """Draw everything that was found; returns the files' paths."""
    if isinstance(found, Comparison):
        figures = {"retention": retention_bars(found)}
    else:
        figures = {
            "overlap": overlap_heatmap(found),
            "overlap_histogram": overlap_histogram(found),
            "layers": layer_sparsity(found),
            "magnitudes": magnitude_histogram(found),
            "epsilon": epsilon_sweep(found),
        }
    os.makedirs(directory, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(os.path.join(directory, f"{name}.png"))
        figure.savefig(paths[-1], dpi=_DPI)
    return paths


def overlap_heatmap(inspection: Inspection) -> Figure:
    """Jaccard index of every two agents' changes, and how often they disagree in sign."""
    names, n = inspection.names(), len(inspection.agents)
    size = max(_HEIGHT, 0.75 * n + 1.2)
    figure, axes = _figure(size + 0.6, size)
    values = [[inspection.jaccard(i, j) for j in range(n)] for i in range(n)]
    off_diagonal = [values[i][j] for i in range(n) for j in range(n) if i != j]
    top = max([*off_diagonal, 0.01])
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=top)
    for i in range(n):
        for j in range(n):
            agent = inspection.agents[i]
            text = f"changed\n{percent(agent.changed / max(agent.total, 1))}"
            if i != j:
                text = f"{percent(values[i][j])}\n±{percent(inspection.conflict_rate(i, j))}"
            dark = values[i][j] > 0.6 * top
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")  # fmt: skip
    axes.set_xticks(range(n), names, rotation=30, ha="right")
    axes.set_yticks(range(n), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("Changed by both, of changed by either\n(±: in opposite directions)")
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1, 0), shrink=0.8)
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
    axes.set_xticks(list(others), ["alone", *(f"{k} other{'s' * (k > 1)}" for k in others[1:])])  # fmt: skip
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_ylabel("of the agent's changes")
    axes.set_title("Elements an agent changed alone and with others")
    _legend(axes)
    return figure


def layer_sparsity(inspection: Inspection) -> Figure:
    """What part of each layer every agent changed."""
    figure, axes = _figure()
    parts = inspection.layers
    for i, name in enumerate(inspection.names()):
        rates = [part.changed[i] / max(part.total, 1) for part in parts]
        axes.plot(rates, label=name, color=_colour(i), marker=_marker(i), markersize=4, linewidth=1.2)  # fmt: skip
    labels = _layer_labels(parts)
    step = max(1, -(-len(labels) // 14))
    axes.set_xticks(range(0, len(labels), step), labels[::step], rotation=45, ha="right")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylabel("elements changed")
    axes.set_title("Changed elements by layer")
    _legend(axes)
    return figure


def magnitude_histogram(inspection: Inspection) -> Figure:
    """How large the differences from the base are, with epsilon."""
    figure, axes = _figure()
    magnitudes = inspection.magnitudes
    # The open bins at both ends are drawn a half-decade wide.
    edges = [magnitudes.edges[0] / 3, *magnitudes.edges, magnitudes.edges[-1] * 3]
    held = [k for k in range(len(edges) - 1) if any(row[k] for row in magnitudes.counts)]  # fmt: skip
    for i, (name, counts) in enumerate(zip(inspection.names(), magnitudes.counts)):
        parts = [count / max(sum(counts), 1) for count in counts]
        axes.stairs(parts, edges, label=name, color=_colour(i), linewidth=1.4, linestyle=("-", "--", ":", "-.")[i % 4])  # fmt: skip
    axes.set_xscale("log")
    low, high = inspection.epsilon
    if held:
        axes.set_xlim(min(edges[held[0]], low / 2), max(edges[held[-1] + 1], high * 2))
    _mark_epsilon(axes, inspection)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_xlabel("|agent − base|")
    axes.set_ylabel("of the changes")
    axes.set_title("Magnitudes of the differences from the base")
    _legend(axes)
    return figure


def epsilon_sweep(inspection: Inspection) -> Figure:
    """What would count as changed, and as shared, at other values of epsilon."""
    figure, axes = _figure()
    points = inspection.epsilon_sweep
    epsilons = [point.epsilon for point in points]
    for i, name in enumerate(inspection.names()):
        total = max(inspection.agents[i].total, 1)
        changed = [point.changed[i] / total for point in points]
        shared = [point.shared[i] / total for point in points]
        style = {"color": _colour(i), "marker": _marker(i), "markersize": 4, "linewidth": 1.2}  # fmt: skip
        axes.plot(epsilons, changed, label=name, **style)
        axes.plot(epsilons, shared, linestyle="--", markerfacecolor="white", **style)
    axes.plot([], [], color="0.4", label="changed")
    axes.plot([], [], color="0.4", linestyle="--", label="shared among them")
    axes.set_xscale("log")
    _mark_epsilon(axes, inspection)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("epsilon")
    axes.set_ylabel("of all elements")
    axes.set_title("Changed elements by epsilon")
    _legend(axes)
    return figure


def retention_bars(comparison: Comparison) -> Figure:
    """What every method keeps of each agent's unique updates, and of its shared ones."""
    width = max(_WIDTH, 0.75 * len(comparison.methods) + 1)
    figure = Figure(figsize=(width, 1.6 * _HEIGHT), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    for axes, measure, title in (
        (upper, "unique_retention", "Kept of updates that one agent made alone"),
        (lower, "shared_retention", "Kept of updates that several agents made"),
    ):
        _dress(axes)
        rows = [
            [getattr(method.agents[i], measure) or 0.0 for method in comparison.methods]
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
    _legend(upper)
    return figure


def _figure(width: float = _WIDTH, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    _dress(axes)
    return figure, axes


def _dress(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7.5)
    axes.title.set_size(9)
    axes.xaxis.label.set_size(8.5)
    axes.yaxis.label.set_size(8.5)


def _bars(axes: Axes, rows: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Groups of bars, one group a column of the rows, one bar a name."""
    width = 0.8 / len(rows)
    for i, (name, row) in enumerate(zip(names, rows)):
        places = [k + (i - (len(rows) - 1) / 2) * width for k in range(len(row))]
        axes.bar(places, row, width, label=name, color=_colour(i), hatch=_HATCHES[i % len(_HATCHES)], edgecolor="white", linewidth=0.5)  # fmt: skip


def _mark_epsilon(axes: Axes, inspection: Inspection) -> None:
    for epsilon in dict.fromkeys(inspection.epsilon):
        axes.axvline(epsilon, color="0.3", linewidth=0.9, linestyle=":")
    axes.annotate(
        "epsilon",
        (inspection.epsilon[0], 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -2),
        textcoords="offset points",
        fontsize=7,
        color="0.3",
        va="top",
    )


def _layer_labels(parts: Sequence[PartReport]) -> list[str]:
    """The numbers of layers, and the last name of what stands outside them."""
    return [part.name.rpartition(".")[2] for part in parts]


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=7, frameon=False)


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


def _marker(i: int) -> str:
    return _MARKERS[i % len(_MARKERS)]
