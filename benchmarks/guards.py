"""What refusing NaN and infinity costs: the kernel as it is against the same source without the lines that watch.

    python benchmarks/guards.py --elements 32M --agents 3

Both kernels run in turns in one process on one thread. Printed is the least processor time of each, which other work on
the machine disturbs less than it does the clock.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import time
from pathlib import Path

import click
import torch

from mergekit_ram import kernel


class _Unwatched(ast.NodeTransformer):
    """Takes out what is added to ``self.watched``, but keeps a block's whole computation if that returns it."""

    found = 0

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if ast.unparse(node.target) != "self.watched":
            return node
        self.found += 1
        sums = (
            isinstance(node.value.func, ast.Attribute) and node.value.func.attr == "sum"
        )
        kept = ast.Pass() if sums else ast.Expr(node.value)
        return ast.copy_location(kept, node)


def without_guards():
    """The kernel's module from its source without what only watches for NaN and infinity."""
    path = Path(kernel.__file__)
    unwatched = _Unwatched()
    tree = ast.fix_missing_locations(unwatched.visit(ast.parse(path.read_text())))
    assert unwatched.found
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("unguarded_kernel", loader=None)
    )
    sys.modules[module.__name__] = module
    exec(compile(tree, str(path), "exec"), vars(module))
    return module


@click.command()
@click.option("--elements", default="32M", show_default=True, help="As 500K or 32M.")
@click.option("--agents", default=3, show_default=True)
@click.option("--runs", default=15, show_default=True)
def main(elements: str, agents: int, runs: int) -> None:
    """Time the kernel with and without its guards."""
    number = int(elements[:-1]) * {"K": 10**3, "M": 10**6}[elements[-1]]
    bare = without_guards()
    torch.set_num_threads(1)
    click.echo("call             dtype      guarded  unguarded   cost")
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(number, generator=generator).mul_(0.02).to(dtype)
        tensors = []
        for _ in range(agents):
            changed = torch.rand(number, generator=generator) < 0.2
            tensors.append(torch.where(changed, base * 1.1, base))
        calls = {
            "merge": ("merge", {}),
            "merge, λ ≠ 1": ("merge", {"rescaling": 1.1}),
            "merge_and_count": ("merge_and_count", {}),
            "count": ("count", {}),
        }
        for name, (function, settings) in calls.items():
            seconds = {kernel: [], bare: []}
            for run in range(runs + 1):
                for module, times in seconds.items():
                    inputs = [module.Agent(tensor, **settings) for tensor in tensors]
                    begin = time.process_time()
                    getattr(module, function)(base, inputs)
                    if run:
                        times.append(time.process_time() - begin)
            guarded, unguarded = map(min, seconds.values())
            click.echo(
                f"{name:16} {str(dtype)[6:]:9} {guarded:7.3f} s  {unguarded:7.3f} s "
                f"{guarded / unguarded - 1:6.1%}"
            )


if __name__ == "__main__":
    main()
