"""The files between rules: JSON artifacts as frozen models, written atomically, read with one-line errors.

Each carries a `schema` tag, so that a file of another kind or version is refused by name. Units are in the field
names (`seconds`, `bytes`); GB means 1e9 bytes wherever a person reads it.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megagraph import __version__
from megagraph.config import ParallelPlan, SplitConfig, UserError, one_line


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
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise UserError(f"{path}: {one_line(error)}: make the file again") from None


class Provenance(BaseModel):
    """Where a number comes from. Left out of equality by comparing artifacts without it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class RawFile(BaseModel):
    """One downloaded file: name, size, checksum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    bytes: int
    sha256: str


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
    raw_files: tuple[RawFile, ...] = ()
    provenance: Provenance = Provenance()


class Workload(BaseModel):
    """The sizes that cost models see: a step of one replica is `batch / dp` sequences of N = N' + N_s tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: int = Field(description="sequences per step over all replicas")
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
    element_bytes: int = 4
    attention: Literal["dense", "tiled"] = "tiled"

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.num_regular + self.num_super


class Timing(BaseModel):
    """Seconds of repeated runs: median and spread (interquartile range)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median: float = Field(ge=0, allow_inf_nan=False)
    iqr: float = Field(ge=0, allow_inf_nan=False)
    repeats: int


class ComputeRow(BaseModel):
    """One layer, the embedding and the head on one rank, for a cp degree and sequences per micro-batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cp: int
    sequences: int
    local_tokens: int = Field(description="S = ceil(N'/cp) + N_s")
    layer_forward: Timing
    layer_backward: Timing
    embed_forward: Timing
    embed_backward: Timing
    head_forward: Timing
    head_backward: Timing


class CommRow(BaseModel):
    """One message of `bytes` in a group of `ranks`: p2p one way, or an all-reduce."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operation: Literal["p2p", "all_reduce"]
    ranks: int
    bytes: int
    seconds: Timing


class MemoryRow(BaseModel):
    """Peak live tensor bytes of one rank of a stage during a training step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class Quality(BaseModel):
    """How well a fitted model predicts: MAPE and signed bias in percent, R2, number of points, worst cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mape_percent: float
    bias_percent: float
    r2: float
    num_points: int
    held_out: bool
    worst: str = ""
    worst_percent: float = 0.0


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
    provenance: Provenance = Provenance()


class Candidate(BaseModel):
    """One plan with its predicted cost."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: ParallelPlan
    strategy: str
    step_seconds: float
    stage_bytes: tuple[float, ...]
    fits: bool

    @property
    def peak_bytes(self) -> float:
        """Largest stage."""
        return max(self.stage_bytes)


class SearchResult(Artifact):
    """The best plan, the frontier and what was looked at."""

    kind: ClassVar[str] = "megagraph.search/1"

    workload: Workload
    world_size: int
    limit_bytes: float
    best: Candidate
    frontier: tuple[Candidate, ...]
    candidates: tuple[Candidate, ...]
    num_enumerated: int
    num_fitting: int
    seconds: float
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
    num_parameters: int
    epochs: int
    best_epoch: int
    val_accuracy: float
    test_accuracy: float
    final_test_accuracy: float
    seconds_per_epoch: Timing
    data_seconds_fraction: float = 0.0
    peak_bytes: tuple[int, ...] = Field(description="by rank")
    memory_source: str
    provenance: Provenance = Provenance()


A = TypeVar("A", bound=Artifact)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; `UserError` if the file is missing or broken."""
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: make it first") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON (line {error.lineno}): make the file again") from None
    if not isinstance(body, dict):
        raise UserError(f"{path}: holds a {type(body).__name__}, expected an object: make the file again")
    return body


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; renamed onto it if the block succeeds, removed if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with one header, the keys of the first row; every row must have the same keys."""
    rows = list(rows)
    if not rows:
        raise UserError(f"{path}: no rows to write: nothing was measured")
    with atomic_path(path) as temporary, temporary.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def git_commit() -> str:
    """Short commit of the source tree, `+dirty` if tracked files differ, `unknown` outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return (commit + ("+dirty" if git("status", "--porcelain", "-uno") else "")) if commit else "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
