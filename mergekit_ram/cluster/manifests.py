"""What each finished step of a merge on a cluster leaves to be found, in JSON.

A manifest says what its step was made from, so that whoever does the step again, after a worker or
the whole merge was killed, finds it done. Shards are checked by their SHA-256 before they are taken
over.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from mergekit.common import ModelReference
from pydantic import BaseModel

from mergekit_ram.method.overlap import GroupOverlap, OverlapCounts, Rescaling

_HASHED_AT_ONCE = 1 << 24


class TensorOverlap(BaseModel):
    """What one tensor turned out to be. Agents are their places among the recipe's."""

    tensor: str
    agents: list[int]
    counts: OverlapCounts
    rescaling: dict[int, float] = {}

    @classmethod
    def of(
        cls,
        tensor: str,
        overlap: GroupOverlap,
        rescaling: Rescaling,
        agents: Sequence[ModelReference],
    ) -> TensorOverlap:
        place = {agent: i for i, agent in enumerate(agents)}
        return cls(
            tensor=tensor,
            agents=[place[agent] for agent in overlap.agents],
            counts=overlap.counts,
            rescaling={place[agent]: factor for agent, factor in rescaling.items()},
        )

    def named(
        self, agents: Sequence[ModelReference]
    ) -> tuple[GroupOverlap, dict[ModelReference, float]]:
        """The overlap and λ by the agents themselves."""
        overlap = GroupOverlap(tuple(agents[i] for i in self.agents), self.counts)
        return overlap, {agents[i]: factor for i, factor in self.rescaling.items()}


class Manifest(BaseModel):
    """What was finished.

    Attributes:
        fingerprint: of everything it depends on.
    """

    fingerprint: str

    def sound(self, directory: str) -> bool:
        """Whether what it describes is still as it was finished."""
        return True


class Partition(Manifest):
    """The tensors of every part. Kept, since a rerun may meet another number of workers."""

    parts: list[list[str]]


class Counted(Manifest):
    """The overlap in a part's tensors."""

    overlaps: list[TensorOverlap]


class Shard(Manifest):
    """A part that was merged and written.

    Attributes:
        file: where, in the job's directory; None if the model has none of the part's tensors, all
            optional.
        tensor_bytes: of the tensors alone.
        overlaps: where merging found them out.
        overflows: by tensor, elements that are not finite though all inputs are.
    """

    file: str | None
    sha256: str
    tensors: list[str]
    tensor_bytes: int
    overlaps: list[TensorOverlap]
    overflows: dict[str, int] = {}

    def sound(self, directory: str) -> bool:
        if self.file is None:
            return True
        path = os.path.join(directory, self.file)
        return os.path.exists(path) and sha256_of(path) == self.sha256


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_HASHED_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()
