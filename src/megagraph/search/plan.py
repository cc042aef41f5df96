"""Search of the parallel plan: the fastest layout of W ranks whose every stage fits in memory, proven and explained.

Legend: P stages, L layers, W ranks, K micro-batches; R rows (plans of one cell).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megagraph.artifacts import CostModel, Provenance, Workload
from megagraph.artifacts_search import Candidate, SearchCounts, SearchResult
from megagraph.config import UserError
from megagraph.config_search import SearchConfig
from megagraph.search.explain import explain
from megagraph.search.partition import evaluate
from megagraph.search.remedies import NothingFitsError, find_remedies
from megagraph.search.solver import Found, Solver
from megagraph.search.space import Cell, num_partitions, partitions, random_cuts
from megagraph.search.tables import Limit, Problem, candidate

Array = NDArray[np.float64]

MAX_CANDIDATES = 5000
MAX_LISTED = 20_000
MAX_EVENTS = 512
"""Stages times micro-batches of a cell whose plans are drawn where there are too many to draw all."""
MAX_FRONTIER = 256
BUCKETS_PER_OCTAVE = 256
TIE = 1e-12


@dataclass(frozen=True)
class Block:
    """Some plans of one cell: layers [R, P], seconds of a step [R], bytes of every stage [R, P], which fit [R]."""

    cell: Cell
    layers: NDArray[np.int64]
    seconds: Array
    stage_bytes: Array
    fits: NDArray[np.bool_]

    def take(self, rows: NDArray[np.int64]) -> Block:
        """The plans at `rows`."""
        return Block(self.cell, self.layers[rows], self.seconds[rows], self.stage_bytes[rows], self.fits[rows])


def search(
    workload: Workload,
    world_size: int,
    limit_bytes: float,
    microbatches: Sequence[int],
    cost: CostModel,
    config: SearchConfig | None = None,
) -> SearchResult:
    """The plan with the least predicted time per sequence among all that fit in `limit_bytes` on every rank.

    `workload.batch` is the batch of all replicas (of each with `batch_mode: weak`), and padding earns nothing. Ties go
    to less memory. `candidates` holds all plans without recompute up to `MAX_CANDIDATES`, also those that do not fit;
    above that the fastest per strategy and memory bucket, of some cuts of each cell. `frontier` holds the fitting plans
    that no other beats in both memory and time, by rising memory. Raises `NothingFitsError`, which names what would
    fit.
    """
    chosen = config or SearchConfig()
    if not (math.isfinite(limit_bytes) and limit_bytes > 0):
        raise UserError(f"memory limit of {limit_bytes} bytes: give a positive memory_limit_gb")
    begin = time.perf_counter()
    problem = Problem(
        workload, world_size, limit_bytes, tuple(microbatches), cost, chosen, chosen.recompute == "allowed"
    )
    problem, solver, best = _pick(problem)
    if best is None:
        raise NothingFitsError(find_remedies(problem))
    counts = SearchCounts(
        cells=len(solver.cells), solved=solver.solved, labels=solver.labels, simulated=solver.simulated
    )
    middle, best_gap = time.perf_counter(), best.gap
    rival = runner_up(solver, best)
    solver.deadline = _deadline(chosen)
    points, complete = frontier(solver)
    best = points[-1]
    num_enumerated, num_fitting = count_plans(problem, solver.cells)
    return SearchResult(
        workload=workload,
        world_size=world_size,
        limit_bytes=limit_bytes,
        best=solver.candidate(best),
        frontier=tuple(solver.candidate(point) for point in points),
        candidates=tuple(_candidates(problem, solver.cells, num_enumerated)),
        num_enumerated=num_enumerated,
        num_fitting=num_fitting,
        seconds=middle - begin,
        batch_mode=chosen.batch_mode,
        recompute=problem.recompute,
        proven=best_gap == 0.0,
        gap=best_gap,
        frontier_complete=complete,
        counts=counts,
        **explain(problem, best, rival),
        report_seconds=time.perf_counter() - middle,
        provenance=Provenance.collect(device=cost.device),
    )


def _deadline(config: SearchConfig) -> float | None:
    budget = config.time_budget_seconds
    return None if budget is None else time.monotonic() + budget


def _pick(problem: Problem) -> tuple[Problem, Solver, Found | None]:
    """The best plan; with recompute where nothing fits without and `if_needed` says so."""
    deadline = _deadline(problem.config)
    solver = Solver(problem, deadline)
    best = solver.best(Limit())
    if best is None and problem.config.recompute == "if_needed":
        problem = replace(problem, recompute=True)
        solver = Solver(problem, deadline)
        best = solver.best(Limit())
    return problem, solver, best


def runner_up(solver: Solver, best: Found) -> Found | None:
    """The best plan of other degrees than the pick's; where there are none, of another K or schedule."""

    def degrees(cell: Cell) -> tuple[int, int, int]:
        return cell.pp, cell.cp, cell.dp

    other = np.array([degrees(cell) != degrees(best.cell) for cell in solver.cells])
    if not other.any():
        other = np.array([cell != best.cell for cell in solver.cells])
    return solver.best(Limit(), other)


def frontier(solver: Solver, most: int = MAX_FRONTIER) -> tuple[list[Found], bool]:
    """The plans that no other beats in both bytes and seconds, by rising memory, and whether these are all.

    Solve, forbid as much memory as the plan needs, and again until nothing fits: exact where every step is proven.
    """
    points: list[Found] = []
    found = solver.best(Limit())
    complete = True
    while found is not None:
        complete &= found.gap == 0.0
        if points and found.value <= points[-1].value * (1 + TIE):
            points.pop()
        if len(points) == most:
            return points[::-1], False
        points.append(found)
        found = solver.best(Limit(cap=float(np.nextafter(found.size, 0.0))))
    return points[::-1], complete


def count_plans(problem: Problem, cells: Sequence[Cell]) -> tuple[int, int]:
    """Plans of the space and those that fit, exact to 2^53; a cut counts once, with the least recompute that fits."""
    num_layers = problem.workload.layers
    total = sum(num_partitions(num_layers, cell.pp) for cell in cells)
    fitting = 0
    for cell in cells:
        options = problem.tables.options(cell, Limit())
        fits = np.isfinite(options.size).astype(np.float64)
        ways = np.zeros(num_layers + 1)
        ways[0] = 1.0
        for kind in options.kinds:
            ways = np.convolve(ways, fits[kind])[: num_layers + 1]
        fitting += round(float(ways[num_layers]))
    return total, fitting


def _candidates(problem: Problem, cells: Sequence[Cell], total: int) -> list[Candidate]:
    """Plans to draw: all of them, or the fastest by memory of as many cuts of each cell as there is time for."""
    if total <= MAX_CANDIDATES:
        blocks = [block for cell in cells for block in _blocks(problem, cell, total)]
        return [_listed(problem, block, row) for block in blocks for row in range(len(block.seconds))]
    share = MAX_LISTED // len(cells)
    few = [cell for cell in cells if cell.pp * cell.microbatches <= MAX_EVENTS]
    blocks = [_thin(block) for cell in few for block in _blocks(problem, cell, share)]
    return _fastest_by_bucket([_listed(problem, block, row) for block in blocks for row in range(len(block.seconds))])


def _blocks(problem: Problem, cell: Cell, most: int) -> Iterator[Block]:
    """Cuts of a cell, without recompute, whether they fit or not: all of them, or `most` at random."""
    options = problem.tables.options(cell, Limit(extra=math.inf))
    limits = np.array([place.limit_bytes for place in problem.tables.places(cell)])
    num_layers = problem.workload.layers
    every = num_partitions(num_layers, cell.pp) <= most
    for layers in partitions(num_layers, cell.pp) if every else [random_cuts(num_layers, cell.pp, most)]:
        size = options.size[options.kinds, layers]
        fits = np.asarray((size <= limits).all(axis=1))
        yield Block(cell, layers, evaluate(options, cell.schedule, layers), size, fits)


def _listed(problem: Problem, block: Block, row: int) -> Candidate:
    sizes = tuple((block.stage_bytes[row] / problem.cost.memory_margin).tolist())
    none = (0,) * block.cell.pp
    return candidate(problem, block.cell, block.layers[row].tolist(), none, block.seconds[row], sizes)


def _bucket(peak: Array) -> NDArray[np.int64]:
    return np.asarray(np.floor(np.log2(peak) * BUCKETS_PER_OCTAVE), dtype=np.int64)


def _thin(block: Block) -> Block:
    """The fastest plan of every memory bucket, among all and among those that fit."""
    peak = block.stage_bytes.max(axis=1)
    order = np.lexsort((peak, block.seconds))
    _, first = np.unique(_bucket(peak)[order] * 2 + block.fits[order], return_index=True)
    return block.take(np.sort(order[first]))


def _fastest_by_bucket(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest plan of every strategy and memory bucket; at most `MAX_CANDIDATES`, the fastest first."""
    fastest: dict[tuple[str, int, bool], Candidate] = {}
    for item in sorted(candidates, key=lambda c: (c.step_seconds, c.peak_bytes)):
        fastest.setdefault((item.strategy, int(_bucket(np.array(item.peak_bytes))), item.fits), item)
    return list(fastest.values())[:MAX_CANDIDATES]
