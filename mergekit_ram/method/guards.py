"""What is not finite: watched for at little cost, counted when it was seen."""

from __future__ import annotations

import math

import torch

from mergekit_ram.method.blocks import block_indices
from mergekit_ram.method.inputs import Inputs


class Watch:
    """A sum of what must be finite: NaN and infinity survive every later addition. Finite numbers
    may overflow it too, so what it suspects has to be looked at again.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._sum = torch.zeros((), dtype=dtype, device=device)

    def see(self, row: torch.Tensor) -> None:
        self._sum += row.sum()

    def suspects(self) -> bool:
        return not math.isfinite(self._sum.item())


def non_finite(inputs: Inputs, limit: int) -> list[int]:
    """Elements of each input that are not finite, looked at in blocks of ``limit``."""
    return [
        sum(
            tensor[index].numel() - int(tensor[index].isfinite().sum())
            for index in block_indices(tensor.shape, limit)
        )
        for tensor in inputs.tensors
    ]


def overflowed(inputs: Inputs, merged: torch.Tensor, limit: int) -> int:
    """Elements that are not finite where every input is."""
    found = 0
    for index in block_indices(merged.shape, limit):
        lost = ~merged[index].isfinite()
        if lost.any():
            for tensor in inputs.tensors:
                lost &= inputs.block(tensor, index).isfinite()
            found += int(lost.sum())
    return found
