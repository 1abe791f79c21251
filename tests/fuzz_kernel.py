"""Many random cases of the kernel against the float64 oracle. Not part of the test run; by hand:

    python tests/fuzz_kernel.py --cases 10000 --seed 0

Every case is merged, counted and merged while counting, in blocks of a random size and to a random
dtype. A failing case is printed as hypothesis reports it, shrunk, with the seed to see it again.
"""

from __future__ import annotations

import time

import click
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mergekit_ram.method.stream import count, merge, merge_and_count
from support.kernel_cases import (
    BLOCKS,
    DTYPES,
    assert_counted,
    assert_merged,
    cases,
    same_bits,
)


@click.command()
@click.option("--cases", "number", default=10_000, show_default=True)
@click.option("--seed", "start", default=0, show_default=True)
def main(number: int, start: int) -> None:
    """Check a NUMBER of random merges against the float64 oracle."""
    torch.set_num_threads(1)
    checked = 0

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(), st.sampled_from(BLOCKS), st.sampled_from((None, *DTYPES)))
    def check(case, block, out):
        nonlocal checked
        inputs = case.base, case.agents, case.rule
        merged = merge(*inputs, out_dtype=out, block_elements=block)
        assert_merged(merged, case, out)
        counts = count(*inputs, block_elements=block)
        assert_counted(counts, case.expected_counts())
        again, same = merge_and_count(*inputs, out_dtype=out, block_elements=block)
        assert same_bits(merged, again)
        assert same == counts
        checked += 1

    begin = time.perf_counter()
    check()
    seconds = time.perf_counter() - begin
    click.echo(f"{checked} cases agree with the oracle, {seconds:.0f} s, seed {start}")


if __name__ == "__main__":
    main()
