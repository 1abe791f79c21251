"""What run.py measured over the seeds, as JSON, Markdown and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure

from mergekit_ram.tools.demo.families import FAMILIES

COLUMNS = (*FAMILIES, "mean")
KINDS = {"rl": "RL", "sft": "SFT", "sft_slow": "SFT at RL's learning rate"}
MODELS = {
    "base": "base",
    **{f"{kind}_{f}": f"{name}: {f}" for kind, name in KINDS.items() for f in FAMILIES},
    **{f"ram of {kind}": f"`ram` of the three {name} agents" for kind, name in KINDS.items()},
}
OVERLAP = {
    "changed": "weights changed",
    "unique": "of these unique",
    "jaccard": "Jaccard index of two agents' changes",
    "conflicts": "shared changes of opposite sign",
}
Spread = dict[str, float]
Groups = Mapping[str, Sequence[Spread]]


def spread(values: Iterable[float]) -> Spread:
    """Mean and sample standard deviation."""
    values = list(values)
    return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else 0.0}


def spread_scores(found: Iterable[dict]) -> dict[str, Spread]:
    """Over the seeds of one model's scores, for every family and their mean."""
    scored = [{**one["scores"], "mean": one["mean"]} for one in found]
    return {column: spread(one[column] for one in scored) for column in COLUMNS}


def spread_overlap(overlaps: Sequence[dict]) -> dict[str, Spread]:
    """How much agents of a kind changed and shared, as parts: over all seeds and agents."""
    agents = [(o["total"], a) for o in overlaps for a in o["agents"].values()]
    conflicts = [o["pairwise_conflicts"] / max(1, o["pairwise_shared"]) for o in overlaps]
    return {
        "changed": spread(agent["changed"] / total for total, agent in agents),
        "unique": spread(agent["unique"] / agent["changed"] for _, agent in agents),
        "rho": spread(agent["rho"] for _, agent in agents),
        "jaccard": spread(value for o in overlaps for value in o["jaccard"]),
        "conflicts": spread(conflicts),
    }


def summarise(results: Sequence[dict]) -> dict:
    methods = {m: [result["methods"][m] for result in results] for m in results[0]["methods"]}
    return {
        "seeds": [result["seed"] for result in results],
        "models": {name: spread_scores(r["models"][name] for r in results) for name in MODELS},
        "methods": {
            method: {
                **{run: spread_scores(r[run] for r in found) for run in ("default", "tuned")},
                "settings": [r["tuned"]["setting"] for r in found],
            }
            for method, found in methods.items()
        },
        "overlap": {kind: spread_overlap([r["overlap"][kind] for r in results]) for kind in KINDS},
    }


def section(title: str, head: Sequence[str], rows: Mapping[str, Iterable[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([n, *row] for n, row in rows.items())]
    return "\n".join([f"### {title}\n", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def percent(spreads: Iterable[Spread]) -> list[str]:
    return [f"{100 * value['mean']:.1f} ± {100 * value['std']:.1f}" for value in spreads]


def to_markdown(summary: dict) -> str:
    models, methods, overlap = summary["models"], summary["methods"], summary["overlap"]
    scores = {MODELS[name]: percent(row.values()) for name, row in models.items()}
    settings = {
        method: [", ".join(f"{n} {value}" for n, value in s.items()) for s in found["settings"]]
        for method, found in methods.items()
    }
    kinds = {KINDS[kind]: percent(o[name] for name in OVERLAP) for kind, o in overlap.items()}
    merges, head = "Merges of the three RL agents", ["method", *COLUMNS]
    default, tuned = (
        {m: percent(found[run].values()) for m, found in methods.items()}
        for run in ("default", "tuned")
    )
    seeds = [str(seed) for seed in summary["seeds"]]
    parts = [
        f"Tasks answered exactly, in %: mean ± standard deviation over {len(seeds)} seeds.\n",
        section("Base and agents", ["model", *COLUMNS], scores),
        section(f"{merges}, defaults", head, default),
        section(f"{merges}, tuned on the validation split", head, tuned),
        section("What was chosen in tuning, by seed", ["method", *seeds], settings),
        section("How agents differ from their base, in %", ["agents", *OVERLAP.values()], kinds),
    ]
    return "\n".join(parts)


def plot_bars(
    path: Path, label: str, names: Sequence[str], groups: Groups, lines: Mapping[str, float] = {}
) -> None:
    """A bar of every group beside every name, in %, and lines across."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(groups)
    for i, (group, spreads) in enumerate(groups.items()):
        means, deviations = ([100 * s[key] for s in spreads] for key in ("mean", "std"))
        places = [place + (i - (len(groups) - 1) / 2) * width for place in range(len(names))]
        axes.bar(places, means, width, yerr=deviations, capsize=2, label=group)
    for (name, value), style in zip(lines.items(), (":", "--")):
        axes.axhline(100 * value, color="black", linestyle=style, lw=1, label=name)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axes.set_ylabel(label)
    figure.legend(fontsize=8, ncols=4, loc="outside upper center")
    figure.savefig(path, dpi=150)


def write_results(results: Sequence[dict], directory: Path) -> None:
    summary = summarise(results)
    (directory / "agents.json").write_text(json.dumps(summary, indent=1) + "\n")
    (directory / "agents.md").write_text(to_markdown(summary))
    models, methods, overlap = summary["models"], summary["methods"], summary["overlap"]
    best, name = max((models[f"rl_{family}"]["mean"]["mean"], family) for family in FAMILIES)
    lines = {"base": models["base"]["mean"]["mean"], f"best single agent ({name})": best}
    runs = {run: [m[run]["mean"] for m in methods.values()] for run in ("default", "tuned")}
    plot_bars(directory / "scores.png", "mean over families (%)", list(methods), runs, lines)
    kinds = {KINDS[kind]: [found[name] for name in OVERLAP] for kind, found in overlap.items()}
    plot_bars(directory / "overlap.png", "%", list(OVERLAP.values()), kinds)
