"""The files between rules: JSON artifacts as frozen models, written atomically, read with one-line errors.

Each carries a `schema` tag, so that a file of another kind or version is refused by name. Units are in the field
names (`seconds`, `bytes`); GB means 1e9 bytes wherever a person reads it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from megagraph import __version__
from megagraph.artifacts_quality import DepthReading, Interval, Quality
from megagraph.config import DatasetConfig, ParallelPlan, SplitConfig, UserError, validated
from megagraph.files import git_commit, read_json, write_text


class Record(BaseModel):
    """Base of what a file is made of: unknown keys refused, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Artifact(BaseModel):
    """Base of every JSON file: unknown keys refused, frozen, tagged."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    kind: ClassVar[str]

    def save(self, path: Path | str) -> None:
        """Write as JSON with the schema tag first, to a temporary name, then rename."""
        body = {"schema": self.kind, **self.model_dump(mode="json")}
        write_text(Path(path), json.dumps(body, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read and validate; raises `UserError` naming the file and the field."""
        body = read_json(Path(path))
        tag = body.pop("schema", None)
        if tag != cls.kind:
            raise UserError(f"{path}: schema is {tag!r}, expected {cls.kind!r}: make the file again")
        artifact: Self = validated(cls, body, str(path), "make the file again")
        return artifact


class Provenance(Record):
    """Where a number comes from. Left out of equality by comparing artifacts without it."""

    version: str = __version__
    commit: str = "unknown"
    python: str = ""
    torch: str = ""
    device: str = ""
    threads: int = 1
    command: str = ""
    time: str = ""

    @classmethod
    def collect(cls, torch: str = "", device: str = "", threads: int = 1) -> Self:
        """The present process: package version, git commit (with `+dirty`), interpreter, command line, UTC time."""
        return cls(
            commit=git_commit(),
            python=sys.version.split()[0],
            torch=torch,
            device=device,
            threads=threads,
            command=" ".join(["megagraph", *sys.argv[1:]]),
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )


class RawFile(Record):
    """One downloaded file: name, size, checksum; `pinned` if the checksum was known before the file came."""

    name: str
    bytes: int
    sha256: str
    pinned: bool = True


class GraphManifest(Artifact):
    """What is known of a downloaded graph without loading it."""

    kind: ClassVar[str] = "megagraph.graph/1"

    name: str
    source: str
    num_nodes: int
    num_edges: int = Field(description="stored directed edges; an undirected edge counts twice")
    num_features: int
    num_classes: int
    undirected: bool
    self_loops: int
    public_split: bool
    split: str = Field(default="none", description="name of the data set's own split in the graph")
    config: DatasetConfig | None = Field(default=None, description="the choices that made the graph")
    raw_files: tuple[RawFile, ...] = ()
    provenance: Provenance = Provenance()


class Workload(Record):
    """The sizes that cost models see: a pass of one replica is `batch / dp` sequences of N = N' + N_s tokens."""

    batch: int = Field(description="sequences per pass over all replicas; a step is one pass unless it accumulates")
    accumulate: int = Field(default=1, description="passes of an optimiser step")
    num_regular: int = Field(description="N': tokens that context parallelism shards")
    num_super: int = Field(description="N_s: super nodes and global tokens, resident on every rank")
    num_readout: int
    layers: int
    heads: int
    hidden: int
    ffn: int
    bias_channels: int
    global_tokens: int
    num_features: int
    num_classes: int
    num_rows: int = Field(default=0, description="rows of the feature table: nodes and super nodes; 0 if unknown")
    num_nodes: int = Field(default=0, description="V: rows of the table of learned node rows, if there is one")
    node_table: Literal["none", "replicated", "sharded"] = "none"
    element_bytes: int = Field(default=4, description="of weights and sums")
    autocast: Literal["none", "bfloat16"] = Field(default="none", description="type that layers compute in")
    attention: Literal["dense", "tiled", "all_to_all"] = "tiled"

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.num_regular + self.num_super

    @property
    def activation_bytes(self) -> int:
        """Bytes per element of what layers compute and ranks exchange: those of the autocast type, if there is one."""
        return self.element_bytes if self.autocast == "none" else 2


class Timing(Record):
    """Seconds of repeated runs: median and spread (interquartile range)."""

    median: float = Field(ge=0, allow_inf_nan=False)
    iqr: float = Field(ge=0, allow_inf_nan=False)
    repeats: int


class ComputeRow(Record):
    """One layer, the embedding and the head on one rank, for a cp degree and sequences per micro-batch."""

    cp: int
    sequences: int
    local_tokens: int = Field(description="S = ceil(N'/cp) + N_s")
    layer_forward: Timing
    layer_backward: Timing
    embed_forward: Timing
    embed_backward: Timing
    head_forward: Timing
    head_backward: Timing


class CommRow(Record):
    """One message of `bytes` in a group of `ranks`: p2p one way, or an all-reduce."""

    operation: Literal["p2p", "all_reduce"]
    ranks: int
    bytes: int
    seconds: Timing


class MemoryRow(Record):
    """Peak live tensor bytes of one rank of a stage during a training step."""

    first: bool
    last: bool
    layers: int
    cp: int
    microbatches: int
    sequences: int = Field(description="sequences per replica and step")
    peak_bytes: int


class HardwareProfile(Artifact):
    """Measurements of one device for one workload (paper, III-B1)."""

    kind: ClassVar[str] = "megagraph.profile/1"

    device: str
    world_size: int
    warmup: int
    workload: Workload
    compute: tuple[ComputeRow, ...]
    comm: tuple[CommRow, ...]
    memory: tuple[MemoryRow, ...]
    memory_source: str
    provenance: Provenance = Provenance()


class CostModel(Artifact):
    """Fitted coefficients of the memory and latency models, with their quality and validity range."""

    kind: ClassVar[str] = "megagraph.cost/1"

    device: str
    world_size: int
    workload: Workload
    memory: dict[str, float] = Field(description="coefficient by regressor name, physical units")
    compute: dict[str, dict[str, float]] = Field(description="by cp degree: affine coefficients in sequences")
    comm: dict[str, tuple[tuple[float, float], ...]] = Field(description="by operation: (bytes, seconds) knots")
    depth: dict[str, float] = Field(description="l_break, gamma, form of the depth penalty")
    quality: dict[str, Quality]
    valid: dict[str, tuple[float, float]]
    memory_margin: float = Field(
        default=1.0, ge=1.0, allow_inf_nan=False, description="upper quantile of the memory over its prediction"
    )
    intervals: dict[str, Interval] = Field(default={}, description="of memory and latency")
    depth_readings: dict[str, DepthReading] = Field(default={}, description="by form: none, hinge, jump")
    estimated_from: str = Field(default="", description="device that was measured, if `device` was not")
    provenance: Provenance = Provenance()


class RunSummary(Artifact):
    """The outcome of one training run; an out-of-memory run is a result with `status` oom."""

    kind: ClassVar[str] = "megagraph.summary/1"

    run: str
    system: str
    dataset: str
    status: Literal["ok", "oom"]
    split: SplitConfig
    plan: ParallelPlan
    plan_source: Literal["search", "config"]
    attention: str
    sequences_per_step: int
    num_tokens: int
    samples_per_node: int
    accumulate: int = Field(default=1, description="passes of a step")
    dtype: str = Field(default="", description="of weights; empty in files of older versions")
    autocast: str = Field(default="none", description="type that layers computed in, if another")
    num_parameters: int
    epochs: int
    best_epoch: int
    val_accuracy: float
    test_accuracy: float
    final_test_accuracy: float
    seconds_per_epoch: Timing
    heuristic_shares: dict[str, float] = Field(default={}, description="shares of the draws at the end of the run")
    data_seconds_fraction: float = Field(default=0.0, description="of the training seconds, rank 0 waiting for data")
    peak_bytes: tuple[int, ...] = Field(description="by rank")
    memory_source: str
    provenance: Provenance = Provenance()
