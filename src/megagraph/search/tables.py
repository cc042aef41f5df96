"""What the stages of each cell cost: seconds and bytes by kind of stage and layers, under a limit of memory.

Legend: P stages, L layers, K micro-batches, n layers of a stage, q of them recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megagraph.artifacts import CostModel, Workload
from megagraph.artifacts_search import Candidate
from megagraph.config import ParallelPlan
from megagraph.config_search import SearchConfig
from megagraph.search.cost import profiled_degrees
from megagraph.search.labels import Options
from megagraph.search.makespan import warm_up
from megagraph.search.memory import Stage, batch_split, peak_bytes, peak_of_many, stage_of
from megagraph.search.space import Cell, list_cells
from megagraph.search.stages import StageCosts, compute_tables, link_seconds, role_index, update_tables

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Limit:
    """Bytes of a rank: `cap` for every rank, and `extra` on top of what its device has."""

    cap: float = math.inf
    extra: float = 0.0


@dataclass(frozen=True)
class Place:
    """The ranks of one stage: slowest speed, least memory, names of their types."""

    speed: float
    limit_bytes: float
    name: str


@dataclass(frozen=True)
class Problem:
    """A search: sizes, ranks, prices, and what may be proposed."""

    workload: Workload
    world_size: int
    limit_bytes: float
    microbatches: tuple[int, ...]
    cost: CostModel
    config: SearchConfig
    recompute: bool = False

    def sequences(self, dp: int) -> int:
        """Sequences per step over all replicas."""
        return self.workload.batch * (dp if self.config.batch_mode == "weak" else 1)

    def sized(self, dp: int) -> Workload:
        """The workload of a step with `dp` replicas."""
        return self.workload.model_copy(update={"batch": self.sequences(dp)})

    @cached_property
    def tables(self) -> Tables:
        """Prices of all cells, computed when asked for."""
        return Tables(self)


class Tables:
    """Costs by cell; the parts that cells share are computed once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._costs: dict[tuple[int, int], dict[int, StageCosts]] = {}
        self._stages: dict[Cell, CellStages] = {}

    def costs(self, cell: Cell) -> StageCosts:
        """Seconds by role and layers, on the profiled device."""
        key = cell.cp, cell.dp
        if key not in self._costs:
            self._costs[key] = self._by_microbatches(*key)
        found = self._costs[key][cell.microbatches]
        return found if cell.pp > 1 else replace(found, link=0.0)

    def _by_microbatches(self, cp: int, dp: int) -> dict[int, StageCosts]:
        cost, workload, batch = self._problem.cost, self._problem.workload, self._problem.sequences(dp)
        micros = {k: batch_split(batch, dp, k)[0] for k in self._problem.microbatches}
        sizes = np.array(sorted(set(micros.values())))
        forward, backward, layer, spared = compute_tables(cost, workload, cp, sizes)
        update = update_tables(cost, workload, cp * dp)
        found = {}
        for count, micro in micros.items():
            at = int(np.searchsorted(sizes, micro))
            link = link_seconds(cost, workload, cp, micro) if self._problem.world_size > cp * dp else 0.0
            found[count] = StageCosts(forward[at], backward[at], *update, layer[at], spared, link)
        return found

    def places(self, cell: Cell) -> list[Place]:
        """Where each stage runs: ranks stand in the order of the cell's device types."""
        devices = self._problem.config.devices
        if not devices:
            return [Place(1.0, self._problem.limit_bytes, "")] * cell.pp
        ranks = [devices[kind] for kind in cell.order for _ in range(devices[kind].count)]
        size = cell.cp * cell.dp
        stages = [ranks[stage * size : (stage + 1) * size] for stage in range(cell.pp)]
        return [
            Place(
                min(one.speed for one in own),
                1e9 * min(one.memory_gb for one in own),
                "+".join(dict.fromkeys(one.name for one in own)),
            )
            for own in stages
        ]

    def options(self, cell: Cell, limit: Limit) -> Options:
        """What each kind of stage costs under a limit, with the least recompute that fits."""
        return self.stages(cell).options(limit)

    def stages(self, cell: Cell) -> CellStages:
        """The kinds of stages of a cell."""
        if cell not in self._stages:
            self._stages[cell] = CellStages(self._problem, cell)
        return self._stages[cell]


class CellStages:
    """The kinds of stages of a cell: those of equal role, place and, under 1F1B, window."""

    def __init__(self, problem: Problem, cell: Cell) -> None:
        self._problem, self._cell = problem, cell
        self._costs = problem.tables.costs(cell)
        windows = [
            warm_up(cell.pp, stage, cell.microbatches) if cell.schedule == "1f1b" else cell.microbatches
            for stage in range(cell.pp)
        ]
        ends = [(stage == 0, stage == cell.pp - 1) for stage in range(cell.pp)]
        keys = list(zip(ends, problem.tables.places(cell), windows, strict=True))
        distinct = list(dict.fromkeys(keys))
        self._kinds = np.array([distinct.index(key) for key in keys])
        self._ends = np.array([key[0] for key in distinct])
        self._limits = np.array([[key[1].limit_bytes] for key in distinct])
        self._speeds = np.array([[key[1].speed] for key in distinct])
        self._windows = np.array([[key[2]] for key in distinct])
        self._roles = np.array([[role_index(*key[0])] for key in distinct])
        first = problem.workload.layers if cell.pp == 1 else 1
        self._layers = np.arange(first, problem.workload.layers - cell.pp + 2)[None]

    def options(self, limit: Limit) -> Options:
        """See `Tables.options`."""
        recompute, size, fits = self._least_recompute(np.minimum(limit.cap, self._limits + limit.extra))
        costs, roles, layers = self._costs, self._roles, self._layers
        backward = costs.backward_with(roles, layers, recompute) / self._speeds
        update = costs.optimiser[roles, layers] / self._speeds + costs.reduce[roles, layers]
        return Options(
            self._table(costs.forward[roles, layers] / self._speeds, fits),
            self._table(backward, fits),
            self._table(update, fits),
            self._table(recompute, fits, 0).astype(np.int64),
            self._table(size, fits),
            self._kinds,
            costs.link,
            self._cell.microbatches,
        )

    def _table(self, values: Array | Counts, fits: Flags, empty: float = np.inf) -> Array:
        """[kinds, n] from n = 0 up; `empty` where nothing fits."""
        table = np.full((len(self._roles), int(self._layers[0, -1]) + 1), empty)
        table[:, self._layers[0]] = np.where(fits, values, empty)
        return table

    def _least_recompute(self, limits: Array) -> tuple[Counts, Array, Flags]:
        """q, bytes and whether they fit [kinds, n]. More recompute never costs less time, so the least that fits is
        the best."""
        enough = self._sizes <= limits[..., None]
        least = enough.argmax(axis=2)
        size = np.take_along_axis(self._sizes, least[..., None], axis=2)[..., 0]
        return least, size, np.asarray(enough.any(axis=2))

    def least_bytes(self) -> tuple[Array, Counts]:
        """The smallest bytes [kinds, n] (infinite at n = 0) that any allowed recompute leaves, and that recompute."""
        every = np.ones(self._sizes.shape[:2], dtype=bool)
        least = self._sizes.argmin(axis=2)
        return self._table(self._sizes.min(axis=2), every), self._table(least, every, 0).astype(np.int64)

    @property
    def kinds(self) -> Counts:
        """Which kind each stage is [P]."""
        return self._kinds

    @cached_property
    def _sizes(self) -> Array:
        """Bytes to reckon with [kinds, n, q], the predicted peak times the margin; infinite where q exceeds n."""
        problem, cell = self._problem, self._cell
        _, sequences = batch_split(problem.sequences(cell.dp), cell.dp, cell.microbatches)
        layers = self._layers[..., None]
        recompute = np.arange(int(layers.max()) + 1 if problem.recompute else 1)
        stage = Stage(
            problem.workload,
            self._ends[:, :1, None],
            self._ends[:, 1:, None],
            layers,
            cell.cp,
            cell.dp,
            cell.microbatches,
            sequences,
            np.minimum(recompute, layers),
            self._windows[..., None],
        )
        size = peak_of_many(problem.cost.memory, stage) * problem.cost.memory_margin
        shape = len(self._roles), self._layers.shape[1], len(recompute)
        return np.where(recompute <= layers, np.broadcast_to(size, shape), np.inf)


def problem_cells(problem: Problem) -> list[Cell]:
    """The cells of a search."""
    degrees = profiled_degrees(problem.cost)
    return list_cells(problem.workload, problem.world_size, problem.microbatches, degrees, problem.config)


def candidate(
    problem: Problem,
    cell: Cell,
    layers: Sequence[int],
    recompute: Sequence[int],
    seconds: float,
    sizes: tuple[float, ...] = (),
) -> Candidate:
    """One plan as an artifact; `sizes` are the predicted peaks of its stages where they are known already."""
    plan = ParallelPlan(
        pp=cell.pp,
        cp=cell.cp,
        dp=cell.dp,
        layers=tuple(map(int, layers)),
        microbatches=cell.microbatches,
        schedule=cell.schedule,
        recompute=tuple(map(int, recompute)) if any(recompute) else (),
    )
    places = problem.tables.places(cell)
    workload = problem.sized(cell.dp)
    sizes = sizes or tuple(peak_bytes(problem.cost.memory, stage_of(workload, plan, stage)) for stage in range(cell.pp))
    margin = problem.cost.memory_margin
    return Candidate(
        plan=plan,
        strategy=cell.strategy,
        step_seconds=float(seconds),
        stage_bytes=sizes,
        fits=all(size * margin <= place.limit_bytes for size, place in zip(sizes, places, strict=True)),
        sequences=problem.sequences(cell.dp),
        devices=tuple(place.name for place in places) if problem.config.devices else (),
    )
