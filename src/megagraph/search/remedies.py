"""What would fit where nothing does: a larger limit, a smaller batch, more ranks, recompute; memory alone decides.

Legend: P stages, L layers, W ranks, K micro-batches, m sequences of a micro-batch, n layers of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megagraph.artifacts import Provenance
from megagraph.artifacts_search import Remedies, Remedy
from megagraph.config import ParallelPlan, UserError
from megagraph.search.space import Cell
from megagraph.search.tables import Limit, Problem, candidate, problem_cells

NEAR_RANKS = 64
MOST_RANKS = 8


class NothingFitsError(UserError):
    """No plan fits; `remedies` say what would."""

    def __init__(self, remedies: Remedies) -> None:
        self.remedies = remedies
        would = "; ".join(f"{one.change}: {_shown(one.value)} ({one.plan.label})" for one in remedies.remedies)
        size = f"{remedies.limit_bytes / 1e9:.4g} GB"
        super().__init__(f"no plan of {remedies.world_size} ranks fits in {size}: set one of {would}")


@dataclass(frozen=True)
class Smallest:
    """The plan of a cell whose largest rank is smallest, relative to the limits of its ranks and in bytes."""

    cell: Cell
    layers: tuple[int, ...]
    recompute: tuple[int, ...]
    size: float
    fits: bool


def find_remedies(problem: Problem) -> Remedies:
    """The smallest changes of one setting each after which something fits."""
    wanted = problem.config.recompute != "never"
    tried = replace(problem, recompute=wanted)
    found = [_budget(tried), _batch(tried), _ranks(tried), *([] if wanted else [_recompute(problem)])]
    return Remedies(
        workload=problem.workload,
        world_size=problem.world_size,
        limit_bytes=problem.limit_bytes,
        remedies=tuple(remedy for remedy in found if remedy is not None),
        provenance=Provenance.collect(device=problem.cost.device),
    )


def smallest_plan(problem: Problem, cell: Cell) -> Smallest:
    """The cut and recompute that make the largest rank of a cell smallest."""
    stages = problem.tables.stages(cell)
    sizes, recompute = stages.least_bytes()
    num_layers, most = problem.workload.layers, sizes.shape[1] - 1
    at = np.arange(num_layers + 1)[:, None] - np.arange(1, most + 1)
    at[at < 0] = num_layers + 1
    least, choices = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf), []
    for kind in stages.kinds:
        largest = np.maximum(np.append(least, np.inf)[at], sizes[kind, 1:])
        choices.append(largest.argmin(axis=1) + 1)
        least = largest.min(axis=1)
    layers, rest = [], num_layers
    for choice in reversed(choices):
        layers.append(int(choice[rest]))
        rest -= layers[-1]
    cut = np.array(layers[::-1])
    own = sizes[stages.kinds, cut]
    limits = np.array([place.limit_bytes for place in problem.tables.places(cell)])
    again = tuple(recompute[stages.kinds, cut].tolist())
    return Smallest(cell, tuple(cut.tolist()), again, float(own.max()), bool((own <= limits).all()))


def fits(problem: Problem, cell: Cell) -> bool:
    """Whether some plan of the cell fits: bytes grow with the layers of a stage, so the most that each holds decide."""
    options = problem.tables.options(cell, Limit())
    held = np.isfinite(options.size[:, 1:])[options.kinds]
    return bool(held[:, 0].all() and held.sum(axis=1).sum() >= problem.workload.layers)


def _remedy(problem: Problem, found: Smallest, change: str, value: float | str) -> Remedy:
    plan: ParallelPlan = candidate(problem, found.cell, found.layers, found.recompute, math.nan).plan
    return Remedy.model_validate({"change": change, "value": value, "plan": plan, "peak_bytes": found.size})


def _budget(problem: Problem) -> Remedy:
    """The smallest memory per rank, in GB, rounded up to a megabyte."""
    found = min((smallest_plan(problem, cell) for cell in problem_cells(problem)), key=lambda one: one.size)
    return _remedy(problem, found, "memory_limit_gb", math.ceil(found.size / 1e6) / 1e3)


def _batch(problem: Problem) -> Remedy | None:
    """The largest smaller batch. Bytes of a cell grow with m alone, so m is found by bisection, cell by cell, and only
    in cells that can beat the best so far; K m D sequences fill the micro-batches."""
    best, found = 0, None
    weak = problem.config.batch_mode == "weak"
    for cell in problem_cells(problem):
        unit = cell.microbatches * (1 if weak else cell.dp)

        def sized(micro: int, unit: int = unit) -> Problem:
            return replace(problem, workload=problem.workload.model_copy(update={"batch": micro * unit}))

        low, high = best // unit + 1, (problem.workload.batch - 1) // unit
        if low > high or not fits(sized(low), cell):
            continue
        while low < high:
            middle = -(-(low + high) // 2)
            low, high = (middle, high) if fits(sized(middle), cell) else (low, middle - 1)
        best, found = low * unit, smallest_plan(sized(low), cell)
    return None if found is None else _remedy(problem, found, "batch", float(best))


def _ranks(problem: Problem) -> Remedy | None:
    """The fewest more ranks of the same kind (every number nearby, then doublings)."""
    if problem.config.devices:
        return None
    for world_size in _more_ranks(problem.world_size):
        larger = replace(problem, world_size=world_size)
        try:
            cells = problem_cells(larger)
        except UserError:
            continue
        for cell in cells:
            if fits(larger, cell):
                return _remedy(larger, smallest_plan(larger, cell), "world_size", float(world_size))
    return None


def _more_ranks(world_size: int) -> Iterator[int]:
    near = range(world_size + 1, min(world_size + NEAR_RANKS, MOST_RANKS * world_size) + 1)
    yield from near
    yield from (world_size * factor for factor in (2, 4, MOST_RANKS) if world_size * factor not in near)


def _recompute(problem: Problem) -> Remedy | None:
    """Recompute, where it is forbidden and would do."""
    allowed = replace(problem, recompute=True)
    for cell in problem_cells(allowed):
        found = smallest_plan(allowed, cell)
        if found.fits:
            return _remedy(allowed, found, "recompute", "if_needed")
    return None


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
