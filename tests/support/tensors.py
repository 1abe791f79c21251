"""Tensors as tests compare them."""

from __future__ import annotations

import math

import numpy as np
import torch

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN, INFINITY = math.nan, math.inf


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(F64).numpy()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(integers[tensor.element_size()])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
