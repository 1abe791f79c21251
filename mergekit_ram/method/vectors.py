"""Task vectors, block by block, for whoever measures them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mergekit_ram.method.blocks import block_indices
from mergekit_ram.method.inputs import Inputs, check_rule
from mergekit_ram.method.rule import PLAIN, Agent, Rule


def task_vectors(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule = PLAIN,
    *,
    block_elements: int,
    input_dtype: torch.dtype | None = None,
    every: int = 1,
) -> Iterator[torch.Tensor]:
    """The agents' task vectors τ. Arguments as for ``stream.merge``.

    Args:
        block_elements: most elements a block.
        every: of every so many blocks only the middle one, so that a sample is spread evenly over
            the tensor.

    Yields:
        ``[agents, elements]`` in the compute dtype: the numbers that are compared with epsilon,
        weighted where ``rule.normalize`` is False. Valid until the next block, which takes the same
        memory; free to be overwritten.
    """
    check_rule(rule, block_elements)
    inputs = Inputs(base, agents, input_dtype, None)
    longest = min(block_elements, base.numel())
    scratch = torch.empty(1 + len(agents), longest, dtype=inputs.dtype, device=base.device)
    for index in block_indices(inputs.base.shape, block_elements, every):
        rows = scratch[:, : inputs.base[index].numel()]
        start = inputs.load(inputs.base, index, rows[0])
        for agent, tensor, vector in zip(agents, inputs.agents, rows[1:]):
            inputs.load(tensor, index, vector).sub_(start)
            if not rule.normalize and agent.weight != 1:
                vector.mul_(agent.weight)
        yield rows[1:]
