"""A quick lower bound of the step of a cell, whatever the cut, the recompute and the limit of memory.

Legend: P stages, L layers, K micro-batches, n layers of a stage, c seconds of a link; f, b, a seconds of forward,
backward and update, v = f + b; tables [4, L + 1] by role and layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megagraph.search.makespan import Schedule
from megagraph.search.stages import StageCosts, role_index, stage_roles

Array = NDArray[np.float64]


def cell_bounds(
    costs: list[StageCosts], pp: int, microbatches: list[int], num_layers: int, speed: float
) -> dict[Schedule, Array]:
    """Seconds [Q] that no step can be below, for Q numbers of micro-batches and their costs; `speed` is that of the
    fastest rank."""
    K, c = np.array(microbatches, dtype=np.float64), np.array([one.link for one in costs])
    f, b = (np.stack(tables) / speed for tables in zip(*((one.forward, one.backward) for one in costs), strict=True))
    optimiser, reduce = costs[0].optimiser / speed, costs[0].reduce
    if pp == 1:
        own = role_index(True, True), num_layers
        exact = np.asarray(K * (f[:, *own] + b[:, *own]) + (optimiser + reduce)[own])
        return {"gpipe": exact, "1f1b": exact}
    most, deepest = num_layers - pp + 1, -(-num_layers // pp)
    roles, counts = np.unique(stage_roles(pp), return_counts=True)
    tables = np.stack([f, b, f + b])[:, :, roles, 1 : most + 1]
    totals = _totals(tables, counts, num_layers)
    # some stage has at least the mean of the layers, and some at least the mean of the time
    slow_f, slow_b, slow = np.maximum(tables[..., deepest - 1 :].min(axis=(2, 3)), totals / pp)
    path = totals[2] + 2 * (pp - 1) * c
    update = (optimiser + reduce)[role_index(True, False), 1 : most + 1].min()
    gpipe = path + (K - 1) * (np.maximum(slow_f, c) + np.maximum(slow_b, c)) + update
    least = np.minimum(tables[2].min(axis=(1, 2)), slow)
    window = path + (K - pp) * slow + (pp - 1) * least
    return {"gpipe": gpipe, "1f1b": np.maximum(window, K * slow) + update}


def _totals(tables: Array, counts: NDArray[np.int64], num_layers: int) -> Array:
    """At least the sum over the stages of t(n), for every cut: [..., roles, n] to [...], `counts` stages of each role.

    For any slope r, t(n) >= r n + min over n of (t(n) - r n); the slopes tried are those around an even cut.
    """
    n = np.arange(1, tables.shape[-1] + 1)
    middle = min(len(n), max(1, num_layers // int(counts.sum()))) - 1
    after, before = min(middle + 1, len(n) - 1), max(middle - 1, 0)
    inner = tables[..., 0, :]
    slopes = np.stack(
        [
            inner[..., middle] / n[middle],
            (inner[..., after] - inner[..., middle]) / max(1, after - middle),
            (inner[..., middle] - inner[..., before]) / max(1, middle - before),
        ]
    )
    rest = (tables - slopes[..., None, None] * n).min(axis=-1)
    return np.asarray((rest @ counts + slopes * num_layers).max(axis=0))
