"""Merges of one big tensor, an embedding of 152 064 × 8 192: what memory they take beyond it.

    python benchmarks/big_tensor.py --json big_tensor.json

Base and three agents in bfloat16 are made once, 10 GB of them. Twice each method is run on them: as
``mergekit-yaml``, whose anonymous memory (without the pages of the mapped inputs, which the system
takes back when it needs them) is watched, and on the mapped tensors alone, where the peak of the
memory is exact.
"""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoints
import click
import harness
from checkpoints import Sizes

SIZES = Sizes(layers=0, hidden=8192, intermediate=64, vocabulary=152_064, tied=True)
TINY = Sizes(layers=0, hidden=64, intermediate=64, vocabulary=256, tied=True)
# Of the built-in ``ram``, measured by benchmarks/kernel.py.
BUILT_IN_BYTES_PER_ELEMENT = 53
_ELEMENTS_OF_A_PAGE = 2048
_NAME = "model.embed_tokens.weight"
_COLUMNS = {
    "method": "",
    "output GB": ".2f",
    "merge of the tensor beyond it, MB": ".1f",
    "whole run, anonymous GB": ".2f",
    "seconds": ".0f",
    "built-in would take, GB": ".0f",
}


def weigh(method: str, models: Path) -> int:
    """Peak memory of merging the tensor, beyond its output. For a process of its own."""
    from mergekit.merge_methods import merge_tensors
    from safetensors import safe_open

    folders = [models / "base", *sorted(models.glob("agent-*"))]
    files = [min(folder.glob("*.safetensors")) for folder in folders]
    tensors = [safe_open(file, "pt").get_tensor(_NAME) for file in files]
    merge = functools.partial(merge_tensors, method=method, base_index=0)
    merge([tensor[:8] for tensor in tensors])
    for tensor in tensors:
        tensor.view(-1)[::_ELEMENTS_OF_A_PAGE].sum()  # into resident memory
    return harness.peak_scratch(functools.partial(merge, tensors))


@click.command()
@harness.directory_option
@harness.several("--method", "methods", default=("ram", "ramplus"), help="Merge method")
@harness.tiny_option
@harness.json_option
def main(directory, methods, tiny, report):
    """Measure the memory of merging one tensor of 1.25 G elements."""
    sizes = TINY if tiny else SIZES
    models = checkpoints.make_once(directory, sizes)
    imported = checkpoints.import_mergekit()
    output, built_in = 2 * sizes.parameters(), BUILT_IN_BYTES_PER_ELEMENT * sizes.parameters()
    rows = []
    for method in harness.track(methods, "merging"):
        scratch = harness.in_new_process(weigh, method, models) / harness.MB
        run = checkpoints.merge(method, models)
        anonymous = run.anonymous_bytes - imported.anonymous_bytes
        output_gb, run_gb, built_in_gb = (n / harness.GB for n in (output, anonymous, built_in))
        seconds = run.seconds - imported.seconds
        rows.append((method, output_gb, scratch, run_gb, seconds, built_in_gb))
    title = f"One tensor of {sizes.vocabulary:,} × {sizes.hidden:,}, 3 agents, bfloat16"
    harness.publish([harness.Table(title, _COLUMNS, rows)], report)


if __name__ == "__main__":
    main()
