"""The report of one merge, ``ram_report.json``: one schema for terminal, JSON and model card."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mergekit_ram.report.frames import frame

if TYPE_CHECKING:
    import pandas

FILE_NAME = "ram_report.json"
SCHEMA_VERSION = 1
# An agent that changed a greater part of the elements has a dense task vector.
DENSE = 0.9


class AgentReport(BaseModel):
    """One agent over the whole merge.

    ``overlap_histogram[k]`` is how many elements the agent and exactly k others changed; it sums to
    ``changed``. ``lambda`` is the factor on the agent's unique updates, None where it differs
    between tensors and only ``lambda_range`` holds.
    """

    model_config = ConfigDict(populate_by_name=True)

    model: str
    total: int
    changed: int
    unique: int
    shared: int
    overlap_histogram: list[int]
    rho: float
    lambda_: float | None = Field(alias="lambda")
    lambda_range: tuple[float, float]


class PartReport(BaseModel):
    """Some of the tensors: a layer, or a module type. Lists are in the agents' order."""

    name: str
    total: int
    changed: list[int]
    unique: list[int]
    shared: list[int]
    sign_conflicts: int


class Report(BaseModel):
    """A merge's agents and their overlap, in elements; ``pairwise_*[i][j]`` of agents i and j."""

    schema_version: int = SCHEMA_VERSION
    versions: dict[str, str]
    method: str
    base_model: str | None
    recipe: dict[str, Any]
    total: int
    agents: list[AgentReport]
    pairwise_shared: list[list[int]]
    pairwise_conflicts: list[list[int]]
    sign_conflicts: int
    layers: list[PartReport]
    module_types: list[PartReport]
    warnings: list[str] = []

    def advice(self) -> list[str]:
        """What a person who merges these agents should know, a sentence or two each."""
        if not any(agent.changed for agent in self.agents):
            return [
                "no agent changed any element by more than epsilon, so the merged model is the "
                "base. Lower epsilon, and look whether a 16-bit dtype rounds the updates away"
            ]
        advice = []
        for agent in self.agents:
            if agent.total and not agent.changed:
                advice.append(
                    f"{agent.model} does not differ from the base by more than "
                    "epsilon, so it adds nothing. Is it the right checkpoint?"
                )
            if agent.changed > DENSE * agent.total:
                advice.append(
                    f"{agent.model} changed {agent.changed / agent.total:.0%} of the elements: "
                    "a dense task vector, as of a merged LoRA or supervised fine-tuning, which "
                    "RAM little more than averages. Try a larger epsilon, or ties or dare_ties"
                )
        return advice

    def to_markdown(self) -> str:
        """A section for a model card."""
        lines = [
            "### Reinforced Agent Merging",
            "",
            f"Of {self.total:,} elements each agent changed some; updates that only one "
            "agent made are kept and rescaled by λ, updates of several agents are combined.",
            "",
            "| agent | changed | unique | shared | overlap-unique ratio ρ | λ |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for agent in self.agents:
            share = agent.changed / agent.total if agent.total else 0
            factors = " – ".join(f"{f:.4g}" for f in dict.fromkeys(agent.lambda_range))
            lines.append(
                f"| {agent.model} | {agent.changed:,} ({share:.1%}) | "
                f"{agent.unique:,} | {agent.shared:,} | {agent.rho:.4g} | {factors} |"
            )
        return "\n".join(lines) + "\n"

    def to_frame(self) -> pandas.DataFrame:
        """A row for each agent, with the fields of ``AgentReport``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return frame(agent.model_dump(by_alias=True) for agent in self.agents)

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2)

    def write(self, directory: str) -> str:
        """Write ``ram_report.json`` into the directory, whole or not at all; returns its path."""
        path = os.path.join(directory, FILE_NAME)
        partial = f"{path}.{os.getpid()}.partial"
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.write(self.to_json() + "\n")
            os.replace(partial, path)
        finally:
            if os.path.exists(partial):
                os.unlink(partial)
        return path
