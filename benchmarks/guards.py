"""What refusing NaN and infinity costs: the kernel against itself without the lines that watch.

    python benchmarks/guards.py --elements 32M --agents 3

Both kernels run in turns in one process on one thread. Printed is the least processor time of each,
which other work on the machine disturbs less than it does the clock.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import checkpoints
import click
import harness
import torch

import mergekit_ram

CALLS = {
    "merge": ("merge", {}),
    "merge, λ ≠ 1": ("merge", {"rescaling": 1.1}),
    "merge_and_count": ("merge_and_count", {}),
    "count": ("count", {}),
}
_COLUMNS = {"call": "", "dtype": "", "guarded s": ".4f", "unguarded s": ".4f", "cost": ".1%"}


def without_guards(kernel: ModuleType) -> ModuleType:
    """The kernel from its source without what only watches for NaN and infinity."""
    source = Path(kernel.__file__).read_text()
    bare, found = re.subn(r"self\.watched \+= .*", "pass", source)
    if not found:
        raise click.ClickException(f"{kernel.__file__} watches nothing by that name")
    module = ModuleType("unguarded_kernel")
    sys.modules[module.__name__] = module  # where its dataclasses look for it
    exec(compile(bare, kernel.__file__, "exec"), vars(module))
    return module


@click.command()
@harness.option("--elements", default="32M", help="As 500K or 32M.")
@harness.option("--agents", default=3)
@harness.option("--runs", default=15)
@harness.json_option
def main(elements, agents, runs, report):
    """Time the kernel with and without its guards."""
    number = int(elements[:-1]) * {"K": 10**3, "M": 10**6}[elements[-1]]
    guarded = sys.modules[mergekit_ram.merge.__module__]
    kernels = {"guarded": guarded, "unguarded": without_guards(guarded)}
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        base, *others = checkpoints.tensors(number, agents, dtype)
        for name, (function, settings) in CALLS.items():
            contenders = {}
            for kernel, module in kernels.items():
                inputs = [module.Agent(tensor, **settings) for tensor in others]
                call = functools.partial(getattr(module, function), base, inputs)
                call()  # warm
                contenders[kernel] = functools.partial(harness.clock, call, time.process_time)
            best = harness.interleave(contenders, least=runs, most=runs)
            seconds = [run.seconds for run in best.values()]
            rows.append((name, str(dtype)[6:], *seconds, seconds[0] / seconds[1] - 1))
    title = f"Guards, {number:,} elements, {agents} agents, one thread"
    harness.publish([harness.Table(title, _COLUMNS, rows)], report)


if __name__ == "__main__":
    main()
