"""Pictures of the table and of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

MISSING = {"rate": np.nan, "interval": [np.nan, np.nan]}


def plot_scores(groups: Sequence[Mapping[str, Any]], path: Path) -> None:
    """For every number of agents the methods' pass rates, at their defaults and tuned."""
    figure = Figure(figsize=(4.2 * len(groups), 4.5), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for panel, group in zip(panels, groups):
        entries = group["entries"]
        methods = list(group["settings"])
        for number, run in enumerate(("default", "tuned")):
            found = [entries.get(f"{method}, {run}", MISSING) for method in methods]
            rates = np.array([one["rate"] for one in found])
            low, high = np.array([one["interval"] for one in found]).T
            places = np.arange(len(methods)) + 0.4 * number - 0.2
            errors = 100 * np.array([rates - low, high - rates]).clip(min=0)
            panel.barh(places, 100 * rates, 0.38, xerr=errors, label=run, error_kw={"lw": 0.8})
        for name, style in (("base", ":"), ("each specialist on its own", "--")):
            rate = 100 * entries[name]["rate"]
            panel.axvline(rate, color="gray", linestyle=style, lw=1, label=name)
        panel.set_yticks(range(len(methods)), methods)
        panel.invert_yaxis()
        panel.set(title=f"{group['agents']} agents, seeds {group['seeds']}", xlabel="pass rate (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="outside upper center")
    figure.savefig(path, dpi=150)


def plot_counts(groups: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What of the specialists' gain over the base is kept, against the number of agents."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, run in zip(panels, ("default", "tuned")):
        for number, method in enumerate(groups[0]["settings"]):
            points = []
            for group in groups:
                entries = group["entries"]
                base, top = (entries[n]["rate"] for n in ("base", "each specialist on its own"))
                rate = entries.get(f"{method}, {run}", MISSING)["rate"]
                points.append((group["agents"], 100 * (rate - base) / (top - base)))
            style = "o-" if number < 10 else "s--"
            panel.plot(*zip(*points), style, label=method, markersize=4)
        panel.set(title=run, xlabel="agents")
    panels[0].set_ylabel("specialists' gain over the base that is kept (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=150)


def plot_curves(trainings: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rewards of training, a panel for every family, a curve for every seed."""
    families = list(dict.fromkeys(one["family"] for one in trainings))
    figure = Figure(figsize=(2.6 * len(families), 2.8), layout="constrained")
    panels = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
    for panel, family in zip(panels, families):
        for one in trainings:
            if one["family"] == family:
                rewards = np.array([step["reward"] for step in one["curve"]])
                smooth = np.convolve(rewards, np.ones(5) / 5, "valid")
                panel.plot(
                    np.arange(5, len(rewards) + 1), 100 * smooth, label=f"seed {one['seed']}"
                )
        panel.set(title=family, xlabel="step")
        panel.legend(fontsize=7)
    panels[0].set_ylabel("samples rewarded (%)")
    figure.savefig(path, dpi=150)
