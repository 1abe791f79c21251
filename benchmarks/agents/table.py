"""What run.py measured over the seeds, as JSON, Markdown and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure

from mergekit_ram.demo.families import FAMILIES

COLUMNS = (*FAMILIES, "mean")
KINDS = {
    "rl": "RL",
    "sft": "SFT",
    "sft_slow": "SFT at RL's learning rate",
}
MODELS = {
    "base": "base",
    **{
        f"{kind}_{family}": f"{KINDS[kind]}: {family}"
        for kind in KINDS
        for family in FAMILIES
    },
    **{f"ram of {kind}": f"`ram` of the three {KINDS[kind]} agents" for kind in KINDS},
}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and sample standard deviation."""
    values = list(values)
    return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else 0.0}


def spread_scores(results: Sequence[dict], of: Callable[[dict], dict]) -> dict:
    """Mean and deviation over the seeds of one model's score, for every family and their mean."""
    scored = [{**of(result)["scores"], "mean": of(result)["mean"]} for result in results]  # fmt: skip
    return {column: spread(one[column] for one in scored) for column in COLUMNS}


def spread_overlap(results: Sequence[dict], kind: str) -> dict:
    """How much agents of a kind changed and shared, as parts: over all seeds and agents."""
    overlaps = [result["overlap"][kind] for result in results]
    agents = [(o["total"], a) for o in overlaps for a in o["agents"].values()]
    return {
        "changed": spread(agent["changed"] / total for total, agent in agents),
        "unique": spread(agent["unique"] / agent["changed"] for _, agent in agents),
        "rho": spread(agent["rho"] for _, agent in agents),
        "jaccard": spread(value for o in overlaps for value in o["jaccard"]),
        "conflicts": spread(
            o["pairwise_conflicts"] / max(1, o["pairwise_shared"]) for o in overlaps
        ),
    }


def summarise(results: Sequence[dict]) -> dict:
    methods = results[0]["methods"]
    return {
        "seeds": [result["seed"] for result in results],
        "models": {
            name: spread_scores(
                results, lambda result, name=name: result["models"][name]
            )  # fmt: skip
            for name in MODELS
        },
        "methods": {
            method: {
                run: spread_scores(
                    results, lambda r, m=method, run=run: r["methods"][m][run]
                )  # fmt: skip
                for run in ("default", "tuned")
            }
            | {"settings": [r["methods"][method]["tuned"]["setting"] for r in results]}
            for method in methods
        },
        "overlap": {kind: spread_overlap(results, kind) for kind in KINDS},
    }


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def percent(value: dict[str, float]) -> str:
    return f"{100 * value['mean']:.1f} ± {100 * value['std']:.1f}"


def score_table(scores: dict[str, dict], head: str) -> str:
    rows = [[name, *map(percent, row.values())] for name, row in scores.items()]
    return markdown_table([head, *COLUMNS], rows)


def to_markdown(summary: dict) -> str:
    models, methods = summary["models"], summary["methods"]
    overlap = summary["overlap"]
    settings = [
        [method, *(setting_text(setting) for setting in found["settings"])]
        for method, found in methods.items()
    ]
    return "\n".join(
        [
            f"Tasks answered exactly, in %: mean ± standard deviation over {len(summary['seeds'])} seeds.",
            "\n### Base and agents\n",
            score_table({MODELS[name]: row for name, row in models.items()}, "model"),
            "### Merges of the three RL agents, defaults\n",
            score_table(
                {m: found["default"] for m, found in methods.items()}, "method"
            ),  # fmt: skip
            "### Merges of the three RL agents, tuned on the validation split\n",
            score_table({m: found["tuned"] for m, found in methods.items()}, "method"),
            "### What was chosen in tuning, by seed\n",
            markdown_table(["method", *map(str, summary["seeds"])], settings),
            "### How agents differ from their base, in %\n",
            markdown_table(
                [
                    "agents",
                    "weights changed",
                    "of these unique",
                    "Jaccard index of two agents' changes",
                    "shared changes of opposite sign",
                ],  # fmt: skip
                [
                    [
                        KINDS[kind],
                        *(
                            percent(found[name])
                            for name in ("changed", "unique", "jaccard", "conflicts")
                        ),
                    ]  # fmt: skip
                    for kind, found in overlap.items()
                ],
            ),
        ]
    )


def setting_text(setting: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def plot_scores(summary: dict, path: Path) -> None:
    """Mean score of each method at defaults and tuned, against the base and the best specialist."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    methods = summary["methods"]
    for offset, run, color in ((-0.2, "default", "#9ecae1"), (0.2, "tuned", "#3182bd")):
        found = [methods[method][run]["mean"] for method in methods]
        axes.bar(
            [place + offset for place in range(len(methods))],
            [100 * value["mean"] for value in found],
            0.4,
            yerr=[100 * value["std"] for value in found],
            color=color,
            capsize=2,
            label=run,
        )
    models = summary["models"]
    specialist = max(
        (models[f"rl_{family}"]["mean"]["mean"], family) for family in FAMILIES
    )
    lines = {
        "base": (models["base"]["mean"]["mean"], ":"),
        f"best single agent ({specialist[1]})": (specialist[0], "--"),
    }
    for name, (value, style) in lines.items():
        axes.axhline(100 * value, color="black", linestyle=style, lw=1, label=name)
    axes.set_xticks(range(len(methods)), methods, rotation=25, ha="right")
    axes.set_ylabel("mean over families (%)")
    figure.legend(fontsize=8, ncols=4, loc="outside upper center")
    figure.savefig(path, dpi=150)


def plot_overlap(summary: dict, path: Path) -> None:
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    names = {
        "changed": "weights\nchanged",
        "unique": "of these\nunique",
        "jaccard": "Jaccard index\nof two agents",
        "conflicts": "shared, of\nopposite sign",
    }
    colors = ("#3182bd", "#e6550d", "#fdae6b")
    for offset, kind, color in zip((-0.25, 0, 0.25), KINDS, colors):
        found = [summary["overlap"][kind][name] for name in names]
        axes.bar(
            [place + offset for place in range(len(names))],
            [100 * value["mean"] for value in found],
            0.25,
            yerr=[100 * value["std"] for value in found],
            color=color,
            capsize=2,
            label=KINDS[kind],
        )
    axes.set_xticks(range(len(names)), names.values())
    axes.set_ylabel("%")
    figure.legend(fontsize=8, ncols=3, loc="outside upper center")
    figure.savefig(path, dpi=150)


def write_results(results: Sequence[dict], directory: Path) -> None:
    summary = summarise(results)
    (directory / "agents.json").write_text(json.dumps(summary, indent=1) + "\n")
    (directory / "agents.md").write_text(to_markdown(summary))
    plot_scores(summary, directory / "scores.png")
    plot_overlap(summary, directory / "overlap.png")
