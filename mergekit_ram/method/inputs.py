"""The tensors of one merge, checked, and the dtypes it computes in."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from mergekit_ram.method.arguments import require, require_count
from mergekit_ram.method.blocks import Index
from mergekit_ram.method.rule import Agent, Rule

_WIDE = "a floating dtype of 16 bits or more"


class Inputs:
    """Base and agents of one tensor.

    Attributes:
        shape: of the tensors.
        base, agents: without their autograd graph; flat where all are contiguous.
        input_dtype: what inputs are rounded to first, or None.
        out_dtype: of the result.
        dtype: of the arithmetic: float32, float64 where an input or the result is.
        exact_products: whether a weight times a small integer is exact in it.

    Raises:
        ValueError: names the argument that cannot be merged.
    """

    def __init__(
        self,
        base: torch.Tensor,
        agents: Sequence[Agent],
        input_dtype: torch.dtype | None,
        out_dtype: torch.dtype | None,
    ):
        _check(base, agents, input_dtype, out_dtype)
        tensors = [base.detach(), *(agent.tensor.detach() for agent in agents)]
        dtypes = [input_dtype or tensor.dtype for tensor in tensors]
        self.shape = base.shape
        self.input_dtype = input_dtype
        self.out_dtype = out_dtype or functools.reduce(torch.promote_types, dtypes)
        wide = torch.float64 in (*dtypes, self.out_dtype)
        self.dtype = torch.float64 if wide else torch.float32
        self.exact_products = all(dtype.itemsize <= 2 for dtype in dtypes)
        self.flat = all(tensor.is_contiguous() for tensor in tensors)
        if self.flat:
            tensors = [tensor.view(-1) for tensor in tensors]
        self.base, *self.agents = tensors

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The base, then the agents."""
        return [self.base, *self.agents]

    @property
    def on_cpu(self) -> bool:
        return self.base.device.type == "cpu"

    @property
    def alike(self) -> bool:
        """Whether all have one dtype."""
        return all(tensor.dtype == self.base.dtype for tensor in self.agents)

    def block(self, tensor: torch.Tensor, index: Index) -> torch.Tensor:
        """A block of one of the tensors, rounded to the input dtype."""
        block = tensor[index]
        return block if self.input_dtype is None else block.to(self.input_dtype)

    def load(self, tensor: torch.Tensor, index: Index, row: torch.Tensor) -> torch.Tensor:
        """Fill a row, ``[elements]`` of any dtype, with a block; returns the row."""
        block = self.block(tensor, index)
        row.view(block.shape).copy_(block)
        return row


def check_rule(rule: Rule, block_elements: int | None) -> None:
    """Refuse what else a merge is called with. Raises ``ValueError`` too."""
    require(isinstance(rule, Rule), "rule", rule, "a Rule")
    if block_elements is not None:
        require_count("block_elements", block_elements, least=1)


def _check(
    base: torch.Tensor,
    agents: Sequence[Agent],
    input_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> None:
    require(isinstance(base, torch.Tensor), "base", base, "a tensor")
    tensors = {"base": base}
    for i, agent in enumerate(agents):
        require(isinstance(agent, Agent), f"agents[{i}]", agent, "an Agent")
        tensors[f"agents[{i}]"] = agent.tensor
    for name, tensor in tensors.items():
        require(_is_wide(tensor.dtype), f"dtype of {name}", tensor.dtype, _WIDE)
        if tensor.shape != base.shape:
            raise ValueError(
                f"shapes differ: base {tuple(base.shape)}, {name} {tuple(tensor.shape)}"
            )
        if tensor.device != base.device:
            raise ValueError(f"devices differ: base on {base.device}, {name} on {tensor.device}")
    for name, dtype in {"input_dtype": input_dtype, "out_dtype": out_dtype}.items():
        require(dtype is None or _is_wide(dtype), name, dtype, _WIDE)


def _is_wide(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
