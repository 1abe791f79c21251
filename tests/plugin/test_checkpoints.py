"""Checkpoints of every kind and dtype are merged, whatever the options."""

from __future__ import annotations

import pytest
import torch
from mergekit.scripts import run_yaml

from support.commands import invoke, merge
from support.expected import METHODS, STRONG, check, expect, plan
from support.recipes import write_recipe
from support.tensors import BF16, F16, F32, F64, dtype_name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("architecture", "tied", "shards", "pickle"),
    [
        ("qwen2", True, 1, False),
        ("qwen2", False, 3, False),
        ("llama", False, 1, True),
        ("llama", True, 3, True),
        ("mistral", False, 3, False),
        ("gemma2", True, 1, True),
        ("t5", True, 2, False),
    ],
)
def test_checkpoint_merges_whatever_its_architecture_and_files(
    architecture, tied, shards, pickle, method, make_models, tmp_path
):
    models = make_models(architecture, tied=tied, shards=shards, pickle=pickle)
    parameters = STRONG if method != "ram" else {}
    output = merge(models.recipe(method, parameters=parameters), tmp_path)
    check(output, expect(method, plan(models.base, models.agents, parameters)))


@pytest.mark.parametrize(
    "options",
    [
        ["--lazy-unpickle"],
        ["--no-safe-serialization", "--out-shard-size", "3000"],
        ["--low-cpu-memory", "--read-to-gpu", "--async-write", "--clone-tensors"],
        ["--device", "cpu", "--quiet", "--num-threads", str(torch.get_num_threads())],
    ],
    ids=" ".join,
)
def test_merge_options_do_not_change_the_result(options, make_models, tmp_path, monkeypatch):
    # It can be set once in a process, and other tests may have done so.
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda threads: None)
    models = make_models("llama", tied=False, pickle=True)
    output = merge(models.recipe("ramplus", parameters=STRONG), tmp_path, *options)
    check(output, expect("ramplus", plan(models.base, models.agents, STRONG)))


def test_progress_of_the_counting_pass_is_shown_unless_quiet(make_models, tmp_path):
    models = make_models()
    file = write_recipe(models.recipe("ramplus"), tmp_path)
    shown = invoke(run_yaml.main, file, tmp_path / "shown")
    quiet = invoke(run_yaml.main, file, tmp_path / "quiet", "--quiet")
    assert "Measuring overlap" in shown and "Executing graph" in shown
    assert "Measuring overlap" not in quiet and "%|" not in quiet


DTYPES = {
    "float32 as bfloat16": ((F32, F32, F32), BF16, None),
    "float32 as float16": ((F32, F32, F32), F16, None),
    "float32, saved as bfloat16": ((F32, F32, F32), F32, BF16),
    "float32 without dtype, saved as bfloat16": ((F32, F32, F32), None, BF16),
    "bfloat16 as float32": ((BF16, BF16, BF16), F32, None),
    "bfloat16, saved as float32": ((BF16, BF16, BF16), BF16, F32),
    "bfloat16 without dtype, saved as float32": ((BF16, BF16, BF16), None, F32),
    "float32 as bfloat16, saved as float32": ((F32, F32, F32), BF16, F32),
    "bfloat16, saved as float16": ((BF16, BF16, BF16), BF16, F16),
    "float64": ((F64, F64, F64), None, None),
    "float64, saved as bfloat16": ((F64, F64, F64), F64, BF16),
    "mixed": ((BF16, F32, F16), None, None),
    "mixed 16-bit": ((F16, BF16, F16), None, None),
    "mixed, saved as bfloat16": ((BF16, F32, F16), None, BF16),
    "mixed with float64": ((F32, F64, BF16), None, None),
    "mixed as bfloat16": ((F32, BF16, F16), BF16, None),
}


@pytest.mark.parametrize("method", ["ram", "ramplus"])
@pytest.mark.parametrize("case", DTYPES)
def test_result_is_rounded_once_to_the_output_dtype(case, method, make_models, tmp_path):
    dtypes, dtype, out_dtype = DTYPES[case]
    models = make_models("qwen2", dtypes=dtypes)
    recipe = models.recipe(method)
    if dtype:
        recipe["dtype"] = dtype_name(dtype)
    if out_dtype:
        recipe["out_dtype"] = dtype_name(out_dtype)
    output = merge(recipe, tmp_path)
    planned = plan(models.base, models.agents)
    check(output, expect(method, planned, dtype=dtype, out_dtype=out_dtype))
