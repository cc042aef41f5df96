"""Search of the parallel plan: the fastest layout of W ranks whose every stage fits in memory.

A cell is (pp, cp, dp, K). Each cell has tables of seconds and bytes by role of a stage and number of layers; a solver
combines them. The solver here enumerates all layer partitions, vectorised, so its answer is the optimum.

Legend: P stages, L layers, W ranks, K micro-batches; R rows (plans of one cell).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np
from numpy.typing import NDArray

from megagraph.artifacts import Candidate, CostModel, Provenance, SearchResult, Workload
from megagraph.config import ParallelPlan, UserError
from megagraph.search.cost import role_index, stage_costs
from megagraph.search.makespan import gpipe_makespan
from megagraph.search.memory import Stage, batch_split, peak_bytes

Array = NDArray[np.float64]
Layers = NDArray[np.int64]

MAX_CANDIDATES = 5000
MAX_PLANS = 20_000_000
CHUNK = 65536
BUCKETS_PER_OCTAVE = 256


@dataclass(frozen=True)
class Cell:
    """The degrees of a plan without its layer partition."""

    pp: int
    cp: int
    dp: int
    microbatches: int

    @property
    def strategy(self) -> str:
        """Name of the degrees above 1, for example `PP+DP`; `single` if there are none."""
        return strategy_name(self.pp, self.cp, self.dp)


@dataclass(frozen=True)
class Block:
    """Some plans of one cell: layers [R, P], seconds of a step [R], bytes of every stage [R, P]."""

    cell: Cell
    layers: Layers
    seconds: Array
    stage_bytes: Array

    @property
    def peak(self) -> Array:
        """Bytes of the largest stage [R]."""
        return np.asarray(self.stage_bytes.max(axis=1))

    def take(self, rows: NDArray[np.int64]) -> Block:
        """The plans at `rows`."""
        return Block(self.cell, self.layers[rows], self.seconds[rows], self.stage_bytes[rows])

    def candidate(self, row: int, limit_bytes: float) -> Candidate:
        """One plan as an artifact."""
        cell = self.cell
        layers = tuple(int(n) for n in self.layers[row])
        plan = ParallelPlan(pp=cell.pp, cp=cell.cp, dp=cell.dp, layers=layers, microbatches=cell.microbatches)
        size = tuple(float(value) for value in self.stage_bytes[row])
        return Candidate(
            plan=plan,
            strategy=cell.strategy,
            step_seconds=float(self.seconds[row]),
            stage_bytes=size,
            fits=max(size) <= limit_bytes,
        )


def strategy_name(pp: int, cp: int, dp: int) -> str:
    """`single`, `DP`, `CP`, `PP`, `PP+DP`, `CP+DP`, `PP+CP` or `PP+CP+DP`."""
    return "+".join(name for name, degree in (("PP", pp), ("CP", cp), ("DP", dp)) if degree > 1) or "single"


def num_partitions(num_layers: int, num_stages: int) -> int:
    """C(L-1, P-1): ways to cut L layers into P stages of at least one layer (paper, II-B: 1771 for 24 and 4)."""
    return math.comb(num_layers - 1, num_stages - 1)


def partitions(num_layers: int, num_stages: int) -> Iterator[Layers]:
    """All ways to cut L layers into P stages, lazily, as arrays [at most CHUNK, P]."""
    cuts = combinations(range(1, num_layers), num_stages - 1)
    while chunk := list(islice(cuts, CHUNK)):
        inner = np.array(chunk, dtype=np.int64).reshape(len(chunk), num_stages - 1)
        yield np.diff(inner, axis=1, prepend=0, append=num_layers)


def list_cells(workload: Workload, world_size: int, microbatches: Sequence[int]) -> list[Cell]:
    """Every (pp, cp, dp, K) of W ranks that the workload allows: pp <= L, cp <= N' (1 for dense attention),
    dp <= batch, K <= sequences of a replica. `UserError` where there is none."""
    if world_size < 1 or not microbatches or min(microbatches) < 1:
        raise UserError(
            f"world_size={world_size}, microbatches={list(microbatches)}: both need whole numbers of 1 or more"
        )
    w = workload
    cells = []
    for pp in (p for p in range(1, min(world_size, w.layers) + 1) if world_size % p == 0):
        rest = world_size // pp
        most = 1 if w.attention == "dense" else min(rest, w.num_regular)
        for cp in (c for c in range(1, most + 1) if rest % c == 0):
            dp = rest // cp
            replica = -(-w.batch // dp)
            if dp <= w.batch:
                cells += [Cell(pp, cp, dp, k) for k in sorted(set(microbatches)) if k <= replica]
    if not cells:
        raise UserError(
            f"no layout of world_size={world_size} exists for layers={w.layers}, N'={w.num_regular}, batch={w.batch}, "
            f"attention={w.attention}, microbatches={list(microbatches)}: use fewer ranks or a larger batch"
        )
    return cells


def search(
    workload: Workload, world_size: int, limit_bytes: float, microbatches: Sequence[int], cost: CostModel
) -> SearchResult:
    """The plan with the least predicted time per sample among all that fit in `limit_bytes` on every rank.

    `workload.batch` is the batch of all replicas, so time per sample is step time over that batch and padding earns
    nothing. `candidates` holds all plans up to `MAX_CANDIDATES`, also those that do not fit; above that the fastest
    per strategy and memory bucket. `frontier` holds the fitting plans that no other beats in both memory and time,
    by rising memory. Raises `UserError` if nothing fits, naming the smallest requirement.
    """
    start = time.perf_counter()
    if not (math.isfinite(limit_bytes) and limit_bytes > 0):
        raise UserError(f"memory limit of {limit_bytes} bytes: give a positive memory_limit_gb")
    cells = list_cells(workload, world_size, microbatches)
    total = sum(num_partitions(workload.layers, cell.pp) for cell in cells)
    if total > MAX_PLANS:
        raise UserError(
            f"{total} plans for layers={workload.layers}, world_size={world_size}: more than the {MAX_PLANS} that are "
            "enumerated; allow fewer microbatches or fix parallel.plan"
        )
    kept: list[Block] = []
    num_fitting = 0
    for cell in cells:
        for block in solve(cell, workload, cost):
            num_fitting += int(np.count_nonzero(block.peak <= limit_bytes))
            kept.append(block if total <= MAX_CANDIDATES else _thin(block, limit_bytes))
    candidates = [block.candidate(row, limit_bytes) for block in kept for row in range(len(block.seconds))]
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        raise _nothing_fits(candidates, limit_bytes, world_size)
    best = min(fitting, key=lambda item: (item.step_seconds, item.peak_bytes))
    return SearchResult(
        workload=workload,
        world_size=world_size,
        limit_bytes=limit_bytes,
        best=best,
        frontier=pareto(fitting),
        candidates=tuple(candidates if total <= MAX_CANDIDATES else _fastest_by_bucket(candidates)),
        num_enumerated=total,
        num_fitting=num_fitting,
        seconds=time.perf_counter() - start,
        provenance=Provenance.collect(device=cost.device),
    )


def solve(cell: Cell, workload: Workload, cost: CostModel) -> Iterator[Block]:
    """All plans of a cell with their exact makespan and stage bytes."""
    costs = stage_costs(cost, workload, cell.pp, cell.cp, cell.dp, cell.microbatches)
    memory = memory_table(cell, workload, cost)
    roles = np.array([role_index(stage == 0, stage == cell.pp - 1) for stage in range(cell.pp)])
    for layers in partitions(workload.layers, cell.pp):
        seconds = gpipe_makespan(
            costs.forward[roles, layers],
            costs.backward[roles, layers],
            costs.update[roles, layers],
            microbatches=cell.microbatches,
            link_forward=costs.link,
            link_backward=costs.link,
        )
        yield Block(cell, layers, seconds, memory[roles, layers])


def memory_table(cell: Cell, workload: Workload, cost: CostModel) -> Array:
    """Peak bytes [4, L + 1] by role (`role_index`) and layers; infinite where no plan of the cell has such a stage."""
    _, sequences = batch_split(workload.batch, cell.dp, cell.microbatches)
    memory = np.full((4, workload.layers + 1), np.inf)
    counts = range(1, workload.layers - cell.pp + 2) if cell.pp > 1 else (workload.layers,)
    for first, last in {(stage == 0, stage == cell.pp - 1) for stage in range(cell.pp)}:
        for n in counts:
            stage = Stage(workload, first, last, n, cell.cp, cell.dp, cell.microbatches, sequences)
            memory[role_index(first, last), n] = peak_bytes(cost.memory, stage)
    return memory


def pareto(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The plans that no other beats in both peak bytes and step seconds, by rising memory and falling time."""
    frontier: list[Candidate] = []
    for item in sorted(candidates, key=lambda c: (c.peak_bytes, c.step_seconds)):
        if not frontier or item.step_seconds < frontier[-1].step_seconds:
            frontier.append(item)
    return tuple(frontier)


def _bucket(peak: Array) -> Layers:
    return np.asarray(np.floor(np.log2(peak) * BUCKETS_PER_OCTAVE), dtype=np.int64)


def _thin(block: Block, limit_bytes: float) -> Block:
    """The fastest plan of every memory bucket, the block's own frontier, and its smallest plan."""
    peak = block.peak
    order = np.lexsort((peak, block.seconds))
    _, first = np.unique(_bucket(peak)[order], return_index=True)
    by_memory = np.lexsort((block.seconds, peak))
    by_memory = np.concatenate([by_memory[:1], by_memory[peak[by_memory] <= limit_bytes]])
    seconds = block.seconds[by_memory]
    record = np.concatenate([[True], seconds[1:] < np.minimum.accumulate(seconds)[:-1]])
    return block.take(np.unique(np.concatenate([order[first], by_memory[record]])))


def _fastest_by_bucket(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest plan of every strategy and memory bucket; at most `MAX_CANDIDATES`, the fastest first."""
    fastest: dict[tuple[str, int, bool], Candidate] = {}
    for item in sorted(candidates, key=lambda c: (c.step_seconds, c.peak_bytes)):
        fastest.setdefault((item.strategy, int(_bucket(np.array(item.peak_bytes))), item.fits), item)
    return list(fastest.values())[:MAX_CANDIDATES]


def _nothing_fits(candidates: Sequence[Candidate], limit_bytes: float, world_size: int) -> UserError:
    """The error that names the smallest requirement and what to change."""
    least = min(candidates, key=lambda item: (item.peak_bytes, item.step_seconds))
    return UserError(
        f"no plan of {world_size} ranks fits in {limit_bytes / 1e9:.3g} GB: the smallest, {least.plan.label}, needs "
        f"{math.ceil(least.peak_bytes / 1e6) / 1e3:.3f} GB; raise memory_limit_gb, allow more microbatches or add ranks"
    )
