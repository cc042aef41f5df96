"""What a search writes: the plan, what it costs stage by stage, what lost and why, or what would fit.

Seconds are of one step, bytes of one rank, GB is 1e9 bytes.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megagraph.artifacts import Artifact, Provenance, Record, Workload
from megagraph.config import ParallelPlan


class Candidate(Record):
    """One plan with its predicted cost."""

    plan: ParallelPlan
    strategy: str
    step_seconds: float
    stage_bytes: tuple[float, ...]
    fits: bool
    sequences: int = Field(default=0, description="per step over all replicas; 0: those of the workload")
    devices: tuple[str, ...] = Field(default=(), description="device type of each stage, where there are several")

    @property
    def peak_bytes(self) -> float:
        """Largest stage."""
        return max(self.stage_bytes)


class StageReport(Record):
    """One stage of the pick: seconds of a micro-batch, and its peak bytes by what they hold."""

    layers: int
    recompute: int
    device: str = ""
    forward_seconds: float
    backward_seconds: float
    update_seconds: float = Field(description="optimiser")
    all_reduce_seconds: float = Field(description="gradients over cp x dp")
    busy_fraction: float = Field(description="share of the step in which it computes micro-batches")
    moment: str = Field(description="when the peak is reached")
    bytes_by_term: dict[str, float]
    peak_bytes: float
    upper_bytes: float = Field(description="peak times the memory margin of the cost model: what must fit")
    limit_bytes: float


class StepParts(Record):
    """Where a step's seconds go; they add up to it."""

    compute: float = Field(description="micro-batches, mean over the stages")
    waiting: float = Field(description="filling and draining the pipeline, and unequal stages")
    messages: float = Field(description="activations between stages, as far as they are not hidden")
    update: float = Field(description="gradient all-reduce and optimiser, as far as they are not hidden")


class Binding(Record):
    """What keeps the pick from being faster: the memory of a stage, or the time of one."""

    constraint: Literal["memory", "time"]
    stage: int
    reason: str


class RunnerUp(Record):
    """The best plan of other degrees (or, where there are none, of another K or schedule)."""

    candidate: Candidate
    slower: float = Field(description="time per sequence over that of the pick, minus 1")
    parts: StepParts
    reason: str


class GigabytePrice(Record):
    """Time per sequence of the best plan with one GB more or less on every rank, over that of the pick, minus 1."""

    more: float
    more_plan: str
    less: float | None = Field(description="none: nothing fits then")
    less_plan: str


class SearchCounts(Record):
    """The work done for the pick alone: cells are (pp, cp, dp, K, schedule, order of devices)."""

    cells: int
    solved: int
    labels: int
    simulated: int


class SearchResult(Artifact):
    """The best plan, the frontier and what was looked at."""

    kind: ClassVar[str] = "megagraph.search/1"

    workload: Workload
    world_size: int
    limit_bytes: float
    best: Candidate
    frontier: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    num_enumerated: int = Field(description="plans in the space, whether listed or proven to be no better")
    num_fitting: int
    seconds: float = Field(description="to find the pick and prove it")
    report_seconds: float = Field(default=0.0, description="frontier, candidates and explanation")
    batch_mode: Literal["strong", "weak"] = "strong"
    recompute: bool = Field(default=False, description="whether plans with recompute were in the space")
    proven: bool = True
    gap: float = Field(default=0.0, description="the pick is at most this much (relative) slower than the optimum")
    frontier_complete: bool = True
    counts: SearchCounts | None = None
    stages: tuple[StageReport, ...] = ()
    parts: StepParts | None = None
    binding: Binding | None = None
    runner_up: RunnerUp | None = None
    gigabyte: GigabytePrice | None = None
    estimated_from: str = Field(default="", description="device that was measured, if the plans are for another")
    provenance: Provenance = Provenance()


class Remedy(Record):
    """A change after which a plan fits: `value` is the new setting."""

    change: Literal["memory_limit_gb", "batch", "world_size", "recompute"]
    value: float | str
    plan: ParallelPlan
    peak_bytes: float


class Remedies(Artifact):
    """Written where nothing fits: the smallest changes after which something does."""

    kind: ClassVar[str] = "megagraph.remedies/1"

    workload: Workload
    world_size: int
    limit_bytes: float
    remedies: tuple[Remedy, ...]
    provenance: Provenance = Provenance()
