"""The best plan over all cells: cells in the order of what they may still reach, until none can be better.

Legend: C cells; values are seconds per sequence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megagraph.artifacts_search import Candidate
from megagraph.search.bounds import cell_bounds
from megagraph.search.partition import TOLERANCE, Outcome, best_cut, first_cut, list_cuts
from megagraph.search.space import Cell
from megagraph.search.tables import Limit, Problem, candidate, problem_cells

ROUNDING = 1e-10
"""A gap below this is none: bounds and lengths are summed in different orders."""
LABELS, DONE = 1, 3
SEEDS = 4
"""Cells of each pp that are tried for a first plan."""

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Found:
    """The best plan under a limit, its seconds per sequence, and by how much (relative) a better one may exist."""

    cell: Cell
    layers: tuple[int, ...]
    recompute: tuple[int, ...]
    seconds: float
    value: float
    size: float
    gap: float


class Solver:
    """Best plans of a problem under falling limits: what was proven under a larger limit stays proven.

    `low` bounds each cell from below, `plans` are the best known ones that fit, `depth` is how far a cell has been
    looked into at the present limit: not at all, one good cut, labels, a list of cuts; `DONE`, nothing more to give
    below the value `rival`, that of the best plan at the time.
    """

    def __init__(self, problem: Problem, deadline: float | None = None) -> None:
        self._problem, self.deadline = problem, deadline
        self.cells = problem_cells(problem)
        self._pp = np.array([cell.pp for cell in self.cells])
        self._sequences = np.array([problem.sequences(cell.dp) for cell in self.cells], dtype=np.float64)
        self._low = self._bounds() / self._sequences
        self._plans: list[Found | None] = [None] * len(self.cells)
        self._depth = np.zeros(len(self.cells), dtype=np.int64)
        self._rival = np.full(len(self.cells), np.inf)
        self._limit = Limit(np.inf, np.inf)
        self.solved = self.labels = self.simulated = 0

    def _bounds(self) -> Array:
        """Seconds [C] that no plan of a cell is below."""
        problem, low = self._problem, np.zeros(len(self.cells))
        speed = max((device.speed for device in problem.config.devices), default=1.0)
        groups: dict[tuple[int, int, int], list[int]] = {}
        for index, cell in enumerate(self.cells):
            groups.setdefault((cell.pp, cell.cp, cell.dp), []).append(index)
        for (pp, _, _), own in groups.items():
            numbers = sorted({self.cells[index].microbatches for index in own})
            one_of = {self.cells[index].microbatches: self.cells[index] for index in own}
            costs = [problem.tables.costs(one_of[number]) for number in numbers]
            found = cell_bounds(costs, pp, numbers, problem.workload.layers, speed)
            for index in own:
                low[index] = found[self.cells[index].schedule][numbers.index(self.cells[index].microbatches)]
        return low

    def best(self, limit: Limit, among: Flags | None = None) -> Found | None:
        """The fastest plan within `limit`, which must not exceed any before; `among` [C] leaves cells out."""
        self._lower(limit)
        allowed = np.ones(len(self.cells), dtype=bool) if among is None else among
        self._seed(allowed)
        while True:
            values = np.where(allowed, [plan.value if plan else np.inf for plan in self._plans], np.inf)
            best = float(values.min(initial=np.inf))
            target = best * (1 - TOLERANCE)
            open_cells = np.flatnonzero(
                allowed & (self._low < target) & ((self._depth < DONE) | (self._rival < target))
            )
            late = self.deadline is not None and time.monotonic() > self.deadline and np.isfinite(best)
            if late or not len(open_cells):
                break
            self._solve(int(open_cells[np.argmin(self._low[open_cells])]), best)
        plan = self._plans[int(np.argmin(values))]
        if not np.isfinite(best) or plan is None:
            return None
        low = min(best, float(np.min(self._low[allowed])))
        gap = best / low - 1.0
        return replace(plan, gap=gap if gap > ROUNDING else 0.0)

    def candidate(self, found: Found) -> Candidate:
        """A plan as an artifact."""
        return candidate(self._problem, found.cell, found.layers, found.recompute, found.seconds)

    def _lower(self, limit: Limit) -> None:
        """Forget plans that no longer fit; cells that had none below another's plan may have one now."""
        if limit == self._limit:
            return
        assert limit.cap <= self._limit.cap and limit.extra <= self._limit.extra, "limits must fall"
        self._limit = limit
        for index, plan in enumerate(self._plans):
            if plan is not None and not self._fits(plan):
                self._plans[index] = None
        kept = np.array([plan is not None for plan in self._plans]) | ~np.isfinite(self._low)
        self._depth = np.where(kept, self._depth, 0)

    def _seed(self, allowed: Flags) -> None:
        """A first plan of every pp, most promising cell first, so that no cell is looked into without a rival."""
        best = np.inf
        for pp in sorted({cell.pp for cell in self.cells}):
            own = np.flatnonzero(allowed & (self._pp == pp) & (self._low < best))
            for index in own[np.argsort(self._low[own], kind="stable")][:SEEDS]:
                if self._depth[index] == 0:
                    self._solve(int(index), np.inf)
                plan = self._plans[index]
                if plan is not None:
                    best = min(best, plan.value)
                    break

    def _fits(self, plan: Found) -> bool:
        options = self._problem.tables.options(plan.cell, self._limit)
        at = options.kinds, np.array(plan.layers)
        return bool(np.isfinite(options.size[at]).all() and (options.recompute[at] == plan.recompute).all())

    def _solve(self, index: int, below: float) -> None:
        """One cell, as far as it can beat `below`."""
        cell, sequences = self.cells[index], self._sequences[index]
        options = self._problem.tables.options(cell, self._limit)
        num_layers = self._problem.workload.layers
        # what was closed against a rival that is gone is opened again, where its labels begin
        depth = LABELS if self._depth[index] == DONE else int(self._depth[index])
        if depth == 0:
            outcome = first_cut(options, cell.schedule, num_layers)
        elif depth == LABELS:
            outcome = best_cut(options, cell.schedule, num_layers, below * sequences)
        else:
            outcome = list_cuts(options, num_layers, below * sequences)
        self._count(outcome)
        self._depth[index] = DONE if outcome.finished else depth + 1
        self._rival[index] = np.inf if outcome.layers is not None else below
        self._low[index] = max(self._low[index], outcome.low / sequences)
        plan = self._plans[index]
        if outcome.layers is not None and (plan is None or outcome.seconds < plan.seconds):
            at = options.kinds, np.array(outcome.layers)
            self._plans[index] = Found(
                cell,
                outcome.layers,
                tuple(options.recompute[at].tolist()),
                outcome.seconds,
                outcome.seconds / sequences,
                float(options.size[at].max()),
                0.0,
            )
        plan = self._plans[index]
        if plan is not None:
            self._low[index] = min(self._low[index], plan.value)

    def _count(self, outcome: Outcome) -> None:
        self.solved += 1
        self.labels += outcome.labels
        self.simulated += outcome.simulated
