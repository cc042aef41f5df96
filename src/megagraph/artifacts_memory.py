"""The file that `megagraph memory` writes: predicted peak bytes of every rank of some plans."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from megagraph.artifacts import Artifact, Provenance, Record
from megagraph.config import ParallelPlan


class RankMemory(Record):
    """Predicted peak of one rank and what it consists of at that moment."""

    peak_bytes: int
    parts: dict[str, int] = Field(description="bytes of weights, gradients, optimiser, features, inputs, activations")


class PlanMemory(Record):
    """One plan, its ranks in order."""

    plan: ParallelPlan
    ranks: tuple[RankMemory, ...]

    @property
    def peak_bytes(self) -> int:
        """Largest rank."""
        return max(rank.peak_bytes for rank in self.ranks)


class MemoryPrediction(Artifact):
    """What plans of a workload need on a device, from running the program without memory."""

    kind: ClassVar[str] = "megagraph.memory/1"

    workload: str
    device: str
    plans: tuple[PlanMemory, ...]
    provenance: Provenance = Provenance()
