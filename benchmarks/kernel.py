"""Times and weighs the merge of one tensor: ours, mergekit's built-in functions and plain copying, in one run.

    python benchmarks/kernel.py --json kernel.json

Everything runs as mergekit runs it, through ``merge_tensors``. Linux only: the peak of the memory used is read from
and reset in /proc.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from mergekit.merge_methods import merge_tensors
from mergekit.merge_methods.ram import ram_merge, ramplus_tl_merge
from rich.table import Table
from rounds import Run, console, in_new_process, interleave, write_report

import mergekit_ram

BUILT_IN = {"built-in ram": ram_merge, "built-in ramplus_tl": ramplus_tl_merge}
VARIANT_AGENTS = 3

# 20 % of the elements changed by each agent, at the scale of a language model's weights and updates.
_WEIGHT_SCALE, _UPDATE_SCALE, _DENSITY = 0.02, 1e-3, 0.2

_WARM_UP_ELEMENTS = 1 << 16
_COPY_BLOCK = 1 << 18
_SCRATCH_ELEMENTS = 1 << 26
_FEWER_SCRATCH_ELEMENTS = 1 << 23
_MB, _GB = 1e6, 1e9


@dataclass(frozen=True)
class Timing:
    """Best seconds of every contender on one tensor; ``skipped`` holds the bytes that the others would need."""

    dtype: str
    elements: int
    agents: int
    seconds: dict[str, float]
    skipped: dict[str, float]


@dataclass(frozen=True)
class Scratch:
    """Memory that a merge takes at its peak, beyond inputs and output. None where it would not fit."""

    contender: str
    dtype: str
    elements: int
    agents: int
    scratch_bytes: int | None


def make_tensors(elements: int, agents: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A base and its agents, ``[elements]`` each."""
    generator = torch.Generator().manual_seed(elements)
    base = torch.randn(elements, generator=generator).mul_(_WEIGHT_SCALE).to(dtype)
    return [base, *(_train(base, generator) for _ in range(agents))]


def _train(base: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    update = torch.randn(base.shape, generator=generator).mul_(_UPDATE_SCALE)
    update.mul_(torch.rand(base.shape, generator=generator) < _DENSITY)
    return update.add_(base).to(base.dtype)


def copy_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Read every input and write one output, nothing else: what no merge can beat."""
    out = torch.empty_like(tensors[0])
    row = out.new_empty(_COPY_BLOCK)
    for start in range(0, out.numel(), _COPY_BLOCK):
        target = out[start : start + _COPY_BLOCK]
        for tensor in tensors[1:]:
            row[: target.numel()].copy_(tensor[start : start + _COPY_BLOCK])
        target.copy_(tensors[0][start : start + _COPY_BLOCK])
    return out


def count(tensors: Sequence[torch.Tensor]) -> mergekit_ram.OverlapCounts:
    base, *agents = tensors
    return mergekit_ram.count(base, [mergekit_ram.Agent(agent) for agent in agents])


def _merge(method, tensors: Sequence[torch.Tensor], **parameters) -> torch.Tensor:
    return merge_tensors(tensors, method, base_index=0, parameters=parameters)


RAM = {
    "copy": copy_all,
    "ram": functools.partial(_merge, "ram"),
    "built-in ram": functools.partial(_merge, ram_merge),
}
VARIANTS = {
    "count": count,
    "ramplus_tl": functools.partial(_merge, "ramplus_tl"),
    "built-in ramplus_tl": functools.partial(_merge, ramplus_tl_merge),
    "ties": functools.partial(_merge, "ram", shared="ties"),
    "ties, density 0.1": functools.partial(_merge, "ram", shared="ties", density=0.1),
}
# What recipes select today.
OTHERS = {
    name: functools.partial(_merge, name, weight=1.0, **parameters)
    for name, parameters in {
        "ties": {"density": 0.5},
        "dare_ties": {"density": 0.5},
        "task_arithmetic": {},
    }.items()
}
CONTENDERS = {
    **VARIANTS,
    **{f"mergekit's {name}": other for name, other in OTHERS.items()},
}


def built_in_bytes(contender: str, tensors: Sequence[torch.Tensor]) -> int:
    """What a built-in function takes beyond inputs and output.

    It holds five stacks of task vectors, one of masks, and two rows of 64-bit counts and two of masks. Measured for
    1, 3 and 5 agents. The factors of ``ramplus_tl`` turn its stacks into float32.
    """
    width = 4 if contender == "built-in ramplus_tl" else tensors[0].itemsize
    agents = len(tensors) - 1
    return tensors[0].numel() * (agents * (5 * width + 1) + 18)


def too_big(contender: str, tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that the contender needs, where that is over half of the free memory; else 0."""
    needed = built_in_bytes(contender, tensors) if contender in BUILT_IN else 0
    return needed if needed > free_bytes() / 2 else 0


def free_bytes() -> int:
    return _kilobytes("/proc/meminfo", "MemAvailable") * 1024


def _kilobytes(path: str, field: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def time_tensor(
    tensors: Sequence[torch.Tensor], dtype: str, repeats: int, patience: float
) -> Timing:
    """Time every contender on the same tensors."""
    agents = len(tensors) - 1
    contenders = RAM | (CONTENDERS if agents == VARIANT_AGENTS else {})
    skipped = {name: too_big(name, tensors) for name in contenders}
    warm_up = [tensor[:_WARM_UP_ELEMENTS] for tensor in tensors]
    runs = {}
    for name, contender in contenders.items():
        if not skipped[name]:
            contender(warm_up)
            runs[name] = functools.partial(_clock, contender, tensors)
    best = interleave(runs, least=2, most=repeats, patience=patience)
    return Timing(
        dtype=dtype,
        elements=tensors[0].numel(),
        agents=agents,
        seconds={name: run.seconds for name, run in best.items()},
        skipped={name: needed for name, needed in skipped.items() if needed},
    )


def _clock(contender: Callable, tensors: Sequence[torch.Tensor]) -> Run:
    start = time.perf_counter()
    contender(tensors)
    return Run(time.perf_counter() - start)


def weigh(contender: str, dtype: str, elements: int) -> Scratch:
    """Measure the scratch memory of one merge. For a process of its own."""
    tensors = make_tensors(elements, VARIANT_AGENTS, getattr(torch, dtype))
    scratch = None
    if not too_big(contender, tensors):
        merge = RAM[contender]
        merge([tensor[:_WARM_UP_ELEMENTS] for tensor in tensors])
        scratch = peak_scratch(functools.partial(merge, tensors))
    return Scratch(contender, dtype, elements, VARIANT_AGENTS, scratch)


def peak_scratch(merge: Callable[[], torch.Tensor]) -> int:
    """Bytes that a merge takes at its peak beyond inputs and output. Resident inputs must stay so."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not serve as scratch
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _kilobytes("/proc/self/status", "VmRSS")
    merged = merge()
    peak = _kilobytes("/proc/self/status", "VmHWM")
    return (peak - before) * 1024 - merged.nbytes


def weigh_all(dtypes: Sequence[str]) -> list[Scratch]:
    sizes = [
        ("ram", _FEWER_SCRATCH_ELEMENTS),
        ("ram", _SCRATCH_ELEMENTS),
        ("built-in ram", _SCRATCH_ELEMENTS),
    ]
    return [
        in_new_process(weigh, contender, dtype, elements)
        for dtype in dtypes
        for contender, elements in sizes
    ]


def ram_table(timings: Sequence[Timing]) -> Table:
    table = _table(
        "ram, best seconds",
        *("dtype", "elements", "agents", "copy", "ours", "built-in"),
        *("built-in / ours", "ours / copy"),
    )
    for timing in timings:
        table.add_row(
            timing.dtype,
            f"{timing.elements:,}",
            str(timing.agents),
            *(_seconds(timing, name) for name in RAM),
            _ratio(timing, "built-in ram", "ram"),
            _ratio(timing, "ram", "copy"),
        )
    return table


def variants_table(timings: Sequence[Timing]) -> Table:
    table = _table(
        f"other passes over a tensor, {VARIANT_AGENTS} agents, best seconds",
        *("dtype", "elements", "pass", "ours", "ours / ram"),
        *("built-in", "built-in / ours"),
    )
    for timing in timings:
        for name in VARIANTS:
            built_in = f"built-in {name}"
            known = built_in in VARIANTS
            if name not in BUILT_IN:
                table.add_row(
                    timing.dtype,
                    f"{timing.elements:,}",
                    name,
                    _seconds(timing, name),
                    _ratio(timing, name, "ram"),
                    _seconds(timing, built_in) if known else "",
                    _ratio(timing, built_in, name) if known else "",
                )
    return table


def others_table(timings: Sequence[Timing]) -> Table:
    table = _table(
        f"mergekit's other methods, {VARIANT_AGENTS} agents, best seconds",
        *("dtype", "elements", "method", "seconds", "it / our ram"),
    )
    for timing in timings:
        for name in OTHERS:
            seconds = _seconds(timing, f"mergekit's {name}")
            ratio = _ratio(timing, f"mergekit's {name}", "ram")
            table.add_row(timing.dtype, f"{timing.elements:,}", name, seconds, ratio)
    return table


def scratch_table(scratches: Sequence[Scratch]) -> Table:
    table = _table(
        f"ram, peak memory beyond inputs and output, {VARIANT_AGENTS} agents",
        *("dtype", "elements", "", "MB", "bytes / element"),
    )
    for scratch in scratches:
        size, per_element = "over half of the free memory", ""
        if scratch.scratch_bytes is not None:
            size = f"{scratch.scratch_bytes / _MB:,.1f}"
            per_element = f"{scratch.scratch_bytes / scratch.elements:.2f}"
        table.add_row(
            scratch.dtype,
            f"{scratch.elements:,}",
            "ours" if scratch.contender == "ram" else "built-in",
            size,
            per_element,
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        text = column in ("dtype", "pass", "method", "")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    return table


def _seconds(timing: Timing, contender: str) -> str:
    if contender in timing.skipped:
        return f"needs {timing.skipped[contender] / _GB:.0f} GB"
    return f"{timing.seconds[contender]:.6f}"


def _ratio(timing: Timing, contender: str, other: str) -> str:
    if contender in timing.skipped:
        return ""
    return f"{timing.seconds[contender] / timing.seconds[other]:.2f}"


def _power(text: str) -> int:
    """``2**20`` or ``1048576``."""
    base, _, exponent = text.partition("**")
    return int(base) ** int(exponent or 1)


@click.command()
@click.option(
    "--elements",
    type=_power,
    multiple=True,
    default=("2**10", "2**15", "2**20", "2**25"),
    show_default=True,
    help="Elements of a tensor; repeat for several.",
)
@click.option(
    "--agents",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 2, 3, 5, 8),
    show_default=True,
    help=f"Agents; repeat for several. The other passes are timed for {VARIANT_AGENTS}.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    multiple=True,
    default=("bfloat16", "float32"),
    show_default=True,
    help="Of inputs and output; repeat for several.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=2),
    default=50,
    show_default=True,
    help="Most runs of a contender on a tensor; the best counts.",
)
@click.option(
    "--patience",
    default=0.7,
    show_default=True,
    help="Seconds of runs after which a contender on a tensor gets no more than two.",
)
@click.option(
    "--memory/--no-memory",
    default=True,
    show_default=True,
    help="Measure scratch memory, each merge in a process of its own.",
)
@click.option(
    "--json",
    "report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write everything measured here.",
)
def main(elements, agents, dtypes, repeats, patience, memory, report):
    """Time the merge of one tensor: ours, mergekit's built-in functions and plain copying, in one run."""
    out = console()
    scratches = weigh_all(dtypes) if memory else []
    timings = []
    for dtype in dtypes:
        for size in elements:
            tensors = make_tensors(size, max(agents), getattr(torch, dtype))
            for number in agents:
                click.echo(f"{dtype}, {size:,} elements, agents: {number}", err=True)
                inputs = tensors[: 1 + number]
                timings.append(time_tensor(inputs, dtype, repeats, patience))
    out.print(ram_table(timings))
    variants = [timing for timing in timings if timing.agents == VARIANT_AGENTS]
    if variants:
        out.print(variants_table(variants))
        out.print(others_table(variants))
    if scratches:
        out.print(scratch_table(scratches))
    if report:
        measured = {"timings": timings, "scratch": scratches}
        write_report(
            report, **{key: list(map(asdict, rows)) for key, rows in measured.items()}
        )


if __name__ == "__main__":
    main()
