"""The rule: what applies to each agent, and how task vectors become one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from mergekit_ram.method.arguments import require, require_bool, require_choice, require_number

SharedMode = Literal["mean", "ties", "drop"]


@dataclass(frozen=True, eq=False)
class Agent:
    """One agent's weights and what applies to them. Two agents are equal only if they are one
    object.

    Attributes:
        tensor: the agent's weights θᵢ, floating point, of the base's shape and device. Borrowed,
            never modified.
        weight: relative importance.
        density: fraction of the shared elements kept by ``shared="ties"``, in (0, 1].
        keep_unique: False drops the updates that only this agent made.
        rescaling: λᵢ, the factor on the updates that only this agent made; 1 is plain RAM.

    Raises:
        ValueError: names the argument that no merge can use, and its value.
    """

    tensor: torch.Tensor
    weight: float = 1.0
    density: float = 1.0
    keep_unique: bool = True
    rescaling: float = 1.0

    def __post_init__(self) -> None:
        require(isinstance(self.tensor, torch.Tensor), "tensor", self.tensor, "a tensor")
        require_number("weight", self.weight)
        require_number("rescaling", self.rescaling)
        require_number("density", self.density)
        require(0 < self.density <= 1, "density", self.density, "in (0, 1]")
        require_bool("keep_unique", self.keep_unique)


@dataclass(frozen=True)
class Rule:
    """How task vectors become one update.

    Attributes:
        epsilon: an element is changed where abs(τ) is strictly greater.
        normalize: True divides shared updates by the weights of the agents that made them and
            leaves unique ones whole; False multiplies every task vector by its weight first and
            takes plain means.
        scale: factor on the merged update, mergekit's ``lambda``.
        shared: what shared elements take: the ``mean``, the ``ties`` consensus, or nothing
            (``drop``).
        finite: True refuses NaN and infinity in any input, and an output that overflows; False lets
            them through to the result, where an element whose τ is NaN counts as changed, moved
            down.

    Raises:
        ValueError: names the argument that no merge can use, and its value.
    """

    epsilon: float = 1e-5
    normalize: bool = True
    scale: float = 1.0
    shared: SharedMode = "mean"
    finite: bool = True

    def __post_init__(self) -> None:
        require_number("epsilon", self.epsilon, least=0)
        require_number("scale", self.scale)
        require_choice("shared", self.shared, get_args(SharedMode))
        require_bool("normalize", self.normalize)
        require_bool("finite", self.finite)


# RAM as the paper has it.
PLAIN = Rule()
