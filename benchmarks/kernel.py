"""Times and weighs the merge of one tensor: ours, mergekit's functions and methods, and copying.

    python benchmarks/kernel.py --json kernel.json

Everything runs as mergekit runs it, through ``merge_tensors``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import checkpoints
import click
import harness
import torch
from mergekit.merge_methods import merge_tensors
from mergekit.merge_methods.ram import ram_merge, ramplus_tl_merge

from mergekit_ram import method

VARIANT_AGENTS = 3

_WARM_UP_ELEMENTS = 1 << 16
_COPY_BLOCK = 1 << 18
_SCRATCH = (("ram", 1 << 23), ("ram", 1 << 26), ("built-in ram", 1 << 26))

Inputs = Sequence[torch.Tensor]


def copy_all(tensors: Inputs) -> torch.Tensor:
    """Read every input and write one output, nothing else: what no merge can beat."""
    out = torch.empty_like(tensors[0])
    row = out.new_empty(_COPY_BLOCK)
    for start in range(0, out.numel(), _COPY_BLOCK):
        target = out[start : start + _COPY_BLOCK]
        for tensor in tensors[1:]:
            row[: target.numel()].copy_(tensor[start : start + _COPY_BLOCK])
        target.copy_(tensors[0][start : start + _COPY_BLOCK])
    return out


def count(tensors: Inputs) -> method.OverlapCounts:
    base, *agents = tensors
    return method.count(base, [method.Agent(agent) for agent in agents])


def merge_by(name, **parameters) -> Callable[[Inputs], torch.Tensor]:
    return functools.partial(merge_tensors, method=name, base_index=0, parameters=parameters)


ALWAYS = {"copy": copy_all, "ram": merge_by("ram"), "built-in ram": merge_by(ram_merge)}
# Other passes over a tensor, for VARIANT_AGENTS agents; mergekit's are what recipes select today.
VARIANTS = {
    "count": count,
    "ramplus_tl": merge_by("ramplus_tl"),
    "built-in ramplus_tl": merge_by(ramplus_tl_merge),
    "shared: ties": merge_by("ram", shared="ties"),
    "shared: ties, density: 0.1": merge_by("ram", shared="ties", density=0.1),
    "mergekit's ties": merge_by("ties", weight=1.0, density=0.5),
    "mergekit's dare_ties": merge_by("dare_ties", weight=1.0, density=0.5),
    "mergekit's task_arithmetic": merge_by("task_arithmetic", weight=1.0),
}


def fits(contender: str, tensors: Inputs) -> bool:
    """Whether a contender takes less than half of the free memory.

    A built-in function holds five stacks of task vectors, one of masks, and two rows of 64-bit
    counts and two of masks (measured for 1, 3 and 5 agents). The factors of ``ramplus_tl`` turn its
    stacks into float32.
    """
    if not contender.startswith("built-in"):
        return True
    width = 4 if contender == "built-in ramplus_tl" else tensors[0].itemsize
    per_element = (len(tensors) - 1) * (5 * width + 1) + 18
    return tensors[0].numel() * per_element <= harness.free_bytes() / 2


def time_tensor(tensors: Inputs, repeats: int, patience: float) -> Iterator[tuple]:
    """A row for every contender that fits into memory, all on the same tensors."""
    runs = {}
    for name, merge in (ALWAYS | (VARIANTS if len(tensors) == 1 + VARIANT_AGENTS else {})).items():
        if fits(name, tensors):
            merge([tensor[:_WARM_UP_ELEMENTS] for tensor in tensors])
            runs[name] = functools.partial(harness.clock, functools.partial(merge, tensors))
    best = harness.interleave(runs, least=2, most=repeats, patience=patience)
    copy, ram = best["copy"].seconds, best["ram"].seconds
    for name, (seconds, *_) in best.items():
        built_in = best.get(f"built-in {name}")
        faster = built_in and built_in.seconds / seconds
        yield tensors[0].numel(), name, seconds, seconds / copy, seconds / ram, faster


def weigh(contender: str, dtype: str, elements: int) -> int | None:
    """Scratch memory of one merge, if it fits. For a process of its own."""
    tensors = checkpoints.tensors(elements, VARIANT_AGENTS, getattr(torch, dtype))
    if not fits(contender, tensors):
        return None
    ALWAYS[contender]([tensor[:_WARM_UP_ELEMENTS] for tensor in tensors])
    return harness.peak_scratch(functools.partial(ALWAYS[contender], tensors))


def scratch_table(dtypes: Sequence[str]) -> harness.Table:
    rows = []
    for dtype in dtypes:
        for name, elements in _SCRATCH:
            scratch = harness.in_new_process(weigh, name, dtype, elements)
            found = (None, None) if scratch is None else (scratch / harness.MB, scratch / elements)
            rows.append((dtype, elements, name, *found))
    columns = {"dtype": "", "elements": ",", "": "", "MB": ",.1f", "bytes / element": ".2f"}
    title = f"Peak memory beyond inputs and output, {VARIANT_AGENTS} agents"
    return harness.Table(title, columns, rows)


def _power(text: str) -> int:
    """``2**20`` or ``1048576``."""
    base, _, exponent = text.partition("**")
    return int(base) ** int(exponent or 1)


SIZES, AGENTS, DTYPES = (
    ("2**10", "2**15", "2**20", "2**25"),
    (1, 2, 3, 5, 8),
    ("bfloat16", "float32"),
)
TYPE = click.Choice(["bfloat16", "float16", "float32", "float64"])


@click.command()
@harness.several("--elements", "sizes", type=_power, default=SIZES, help="Elements of a tensor")
@harness.several("--agents", "agents", type=click.IntRange(1), default=AGENTS, help="Agents")
@harness.several("--dtype", "dtypes", type=TYPE, default=DTYPES, help="Of inputs and output")
@harness.repeats_option(50, least=2)
@harness.patience_option(0.7)
@harness.option("--memory/--no-memory", default=True, help="Measure scratch memory.")
@harness.json_option
def main(sizes, agents, dtypes, repeats, patience, memory, report):
    """Time and weigh the merge of one tensor: ours, mergekit's and plain copying."""
    tables = [scratch_table(dtypes)] if memory else []
    rows = {(dtype, number): [] for dtype in dtypes for number in agents}
    cases = [(dtype, size) for dtype in dtypes for size in sizes]
    for dtype, size in harness.track(cases, "timing"):
        tensors = checkpoints.tensors(size, max(agents), getattr(torch, dtype))
        for number in agents:
            rows[dtype, number] += time_tensor(tensors[: 1 + number], repeats, patience)
    columns = {"elements": ",", "pass": "", "seconds": ".6f", "/ copy": ".2f", "/ ram": ".2f"}
    columns["built-in / it"] = ".2f"
    for (dtype, number), found in rows.items():
        plot = ("elements", "seconds", "pass") if number == VARIANT_AGENTS else ()
        title = f"One tensor, {dtype}, agents: {number}"
        tables.append(harness.Table(title, columns, found, plot))
    harness.publish(tables, report)


if __name__ == "__main__":
    main()
