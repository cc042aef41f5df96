"""The grid of whole models as arrays, and the latency laws that are fitted to it.

Legend: n layers of a cell; seconds and bytes throughout; errors are relative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from megagraph.artifacts import Workload
from megagraph.artifacts_quality import DepthReading
from megagraph.config import UserError
from megagraph.search.cost import (
    LAYER_TERMS,
    REST_TERMS,
    UPDATE_TERMS,
    cell_workload,
    last_layer_factor,
    layer_terms,
    rest_terms,
    update_terms,
)
from megagraph.search.depth import Form, linear_fit, predict, read_depth, scan

Array = NDArray[np.float64]

GRID_TIMES = ("forward_seconds", "backward_seconds", "step_seconds")
MIN_CELLS = len(LAYER_TERMS) + len(REST_TERMS)


class Grid:
    """The grid as arrays: workloads, measured columns, regressors.

    base: the profiled workload, of `device`; rows that say they are of another device are refused.
    """

    def __init__(self, base: Workload, rows: Sequence[Mapping[str, Any]], device: str = "") -> None:
        if not rows:
            raise UserError("the grid has no rows: measure it again or fit without a grid")
        others = {str(row["device"]) for row in rows if row.get("device") and device} - {device}
        if others:
            raise UserError(
                f"the grid was measured on {', '.join(sorted(others))} but the profile on {device}: "
                "measure both on one device"
            )
        self.rows = rows
        self.workloads = [cell_workload(base, row) for row in rows]
        self.n = np.array([w.layers for w in self.workloads], dtype=np.float64)
        self.peak = self._column("peak_bytes")
        self.forward, self.backward, self.step = (self._column(name) for name in GRID_TIMES)
        factors = [last_layer_factor(w, 1, w.layers) for w in self.workloads]
        self.x_layer = np.stack([f * layer_terms(w, 1, w.batch) for f, w in zip(factors, self.workloads, strict=True)])
        self.x_rest = np.stack([rest_terms(w, 1, w.batch) for w in self.workloads])
        self.x_update = np.stack([update_terms(w, first=True, last=True, layers=w.layers) for w in self.workloads])

    def _column(self, name: str) -> Array:
        """A measured column; `UserError` names the row of a value that is no positive number."""
        values = []
        for number, row in enumerate(self.rows):
            try:
                value = float(row[name])
            except (KeyError, TypeError, ValueError):
                value = math.nan
            if not (math.isfinite(value) and value > 0):
                found = f"{name}={row.get(name)!r}"
                raise UserError(f"grid row {number} has {found}: it must be a positive number; measure the grid again")
            values.append(value)
        return np.array(values)

    def names(self) -> list[str]:
        """A short name of every cell."""
        return [f"b{w.batch} l{w.layers} h{w.heads} d{w.hidden}" for w in self.workloads]


class Latency:
    """Coefficients of the grid's forward, backward and update, and the depth penalty that they share."""

    def __init__(self, grid: Grid, keep: NDArray[np.bool_], form: Form | None = None) -> None:
        x_layer, x_rest, n = grid.x_layer[keep], grid.x_rest[keep], grid.n[keep]
        both = (grid.forward + grid.backward)[keep]
        self.readings: dict[str, DepthReading] = {}
        if form:
            self.depth = scan(form, x_layer, x_rest, n, both)
        else:
            self.depth, self.readings = read_depth(x_layer, x_rest, n, both)
        self.forward = linear_fit(x_layer, x_rest, n, grid.forward[keep], self.depth)
        self.backward = linear_fit(x_layer, x_rest, n, grid.backward[keep], self.depth)
        rest = np.maximum(0.0, grid.step[keep] - both)
        scale = np.maximum(np.linalg.norm(grid.x_update[keep], axis=0), 1e-300)
        weights = 1 / grid.step[keep]
        matrix = grid.x_update[keep] / scale * weights[:, None]
        self.update = np.asarray(nnls(matrix, rest * weights, maxiter=100)[0]) / scale

    def step(self, grid: Grid) -> Array:
        """Predicted step seconds of every cell."""
        passes = (predict(c, grid.x_layer, grid.x_rest, grid.n, self.depth) for c in (self.forward, self.backward))
        return np.asarray(sum(passes) + grid.x_update @ self.update)

    def stored(self) -> dict[str, dict[str, float]]:
        """For `CostModel.compute`."""
        names = (*LAYER_TERMS, *REST_TERMS)
        tables = {"grid_forward": self.forward, "grid_backward": self.backward}
        passes = {key: named(names, table) for key, table in tables.items()}
        return {**passes, "update": named(UPDATE_TERMS, self.update)}


def named(names: Sequence[str], values: Array) -> dict[str, float]:
    """Coefficients by name."""
    return {name: float(value) for name, value in zip(names, values, strict=True)}
