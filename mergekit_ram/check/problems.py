"""What can be wrong with a recipe, whatever reads it, and the one error that tells all of it."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from mergekit.common import dtype_from_name

from mergekit_ram.errors import Problem
from mergekit_ram.host import output
from mergekit_ram.host.checkpoint import Checkpoint, stored_bytes

RECIPE = "recipe"


NO_DTYPES = {"dtype": None, "out_dtype": None}


def parameter_problem(refusal: str) -> Problem:
    return Problem(RECIPE, refusal, "see the parameters table in mergekit-ram's README")


def unplannable(error: Exception) -> Problem:
    """The problem of a recipe that mergekit's planner fails on, by its or mergekit's fault."""
    if isinstance(error, (RuntimeError, ValueError, OSError)):
        return Problem(
            RECIPE,
            f"it cannot be planned: {reason(error)}",
            "see mergekit's documentation of recipes",
        )
    return Problem(
        RECIPE,
        f"mergekit cannot plan a merge of this architecture: {reason(error)}",
        f"this is a limit of mergekit, whatever the merge method; {RAW_MERGE}",
    )


# What is left where mergekit does not know which tensors a model has.
RAW_MERGE = "to merge the files of weights name by name, name them in a recipe of mergekit-pytorch"


def reason(error: Exception, width: int = 300) -> str:
    """What an error says, in whole sentences on one line.

    Configs, which mergekit prints whole, are left out.
    """
    text = " ".join(re.sub(r"\{.*\}", "{…}", str(error), flags=re.DOTALL).split())
    if not isinstance(error, (RuntimeError, ValueError, OSError)) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    if len(text) <= width:
        return text
    end = text.rfind(". ", 0, width)
    return text[: end + 1] if end > 0 else textwrap.shorten(text, width, placeholder=" …")


def number(tensors: Sequence[str]) -> str:
    return f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"


def checkpoint_problems(where: str, checkpoint: Checkpoint) -> Iterator[Problem]:
    for fault in checkpoint.faults:
        yield Problem(where, fault.what, fault.remedy)
    if checkpoint.quantization:
        yield Problem(
            where,
            f"it is quantized: {checkpoint.quantization}",
            "dequantize it first and save float weights; "
            "differences of quantized weights mean nothing",
        )


def dtype_problems(dtype: str | None, out_dtype: str | None) -> Iterator[Problem]:
    for name, value in (("dtype", dtype), ("out_dtype", out_dtype)):
        try:
            parsed = dtype_from_name(value)
            usable = parsed is None or parsed.is_floating_point
        except RuntimeError:
            usable = False
        if not usable:
            yield Problem(
                RECIPE,
                f"{name}: {value}",
                "use bfloat16, float16, float32 or float64",
            )


def overwriting(out_path: str, model: str) -> Problem:
    return Problem(
        RECIPE,
        f"the output {out_path} is the input {model}",
        "write the merged model to another directory",
    )


def place_problems(out_path: str) -> Iterator[Problem]:
    fault = output.unusable(out_path)
    if fault:
        yield Problem(RECIPE, fault, "write the merged model to another directory")


def space_problems(base: Checkpoint, dtype: str | None, out_path: str) -> Iterator[Problem]:
    needed = stored_bytes(base.tensors, dtype)
    existing = os.path.abspath(out_path)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    free = shutil.disk_usage(existing).free
    if needed > free:
        yield Problem(
            RECIPE,
            f"the merged model takes {_size(needed)}, {_size(free)} are free at {out_path}",
            "free some space or write it elsewhere",
        )


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
