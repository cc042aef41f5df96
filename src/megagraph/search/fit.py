"""Fit of the memory and latency models to a hardware profile and, where there is one, a grid of whole models.

Legend: m sequences of one micro-batch, n layers; seconds and bytes throughout; errors are relative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from megagraph.artifacts import (
    CommRow,
    ComputeRow,
    CostModel,
    HardwareProfile,
    MemoryRow,
    Provenance,
    Quality,
    Timing,
    Workload,
)
from megagraph.config import UserError
from megagraph.search.cost import (
    LAYER_TERMS,
    PARTS,
    REST_TERMS,
    UPDATE_TERMS,
    cell_workload,
    dimensions,
    last_layer_factor,
    layer_terms,
    rest_terms,
    update_terms,
    whole_model,
)
from megagraph.search.depth import Depth, Form, fit_depth, linear_fit, predict, scan
from megagraph.search.fit_memory import fit_memory
from megagraph.search.memory import Stage, peak_bytes

Array = NDArray[np.float64]

GRID_TIMES = ("forward_seconds", "backward_seconds", "step_seconds")
MIN_SIZES = 2
MIN_CELLS = len(LAYER_TERMS) + len(REST_TERMS)
NUM_FOLDS = 5


class _Grid:
    """The grid as arrays: workloads, measured columns, regressors."""

    def __init__(self, base: Workload, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            raise UserError("the grid has no rows: measure it again or fit without a grid")
        if len(rows) < MIN_CELLS:
            raise UserError(f"{len(rows)} grid cells cannot fit {MIN_CELLS} coefficients: measure at least {MIN_CELLS}")
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


class _Latency:
    """Coefficients of the grid's forward, backward and update, and the depth penalty that they share."""

    def __init__(self, grid: _Grid, keep: NDArray[np.bool_], form: Form | None = None) -> None:
        x_layer, x_rest, n = grid.x_layer[keep], grid.x_rest[keep], grid.n[keep]
        both = (grid.forward + grid.backward)[keep]
        self.depth = scan(form, x_layer, x_rest, n, both) if form else fit_depth(x_layer, x_rest, n, both)
        self.forward = linear_fit(x_layer, x_rest, n, grid.forward[keep], self.depth)
        self.backward = linear_fit(x_layer, x_rest, n, grid.backward[keep], self.depth)
        rest = np.maximum(0.0, grid.step[keep] - both)
        scale = np.maximum(np.linalg.norm(grid.x_update[keep], axis=0), 1e-300)
        weights = 1 / grid.step[keep]
        matrix = grid.x_update[keep] / scale * weights[:, None]
        self.update = np.asarray(nnls(matrix, rest * weights, maxiter=100)[0]) / scale

    def step(self, grid: _Grid) -> Array:
        """Predicted step seconds of every cell."""
        passes = (predict(c, grid.x_layer, grid.x_rest, grid.n, self.depth) for c in (self.forward, self.backward))
        return np.asarray(sum(passes) + grid.x_update @ self.update)

    def stored(self) -> dict[str, dict[str, float]]:
        """For `CostModel.compute`."""
        names = (*LAYER_TERMS, *REST_TERMS)
        tables = {"grid_forward": self.forward, "grid_backward": self.backward}
        named = {key: _named(names, table) for key, table in tables.items()}
        return {**named, "update": _named(UPDATE_TERMS, self.update)}


def fit(profile: HardwareProfile, grid: Sequence[Mapping[str, Any]] | None = None) -> CostModel:
    """The cost model of a device (paper, III-B1; l_break and gamma from the grid's depths).

    grid: rows of the grid files as read by `csv.DictReader`, or None where no grid was measured (then no depth
    penalty, no optimiser time and no `predict_cell`). Memory is fitted on the profile's and the grid's points
    together. Quality is given twice: held out (`memory`, `latency`) and on the fitted points (`*_in_sample`).
    Raises `UserError` for an empty grid, too few points, or a value that is not finite and positive.
    """
    table = None if grid is None else _Grid(profile.workload, grid)
    compute = _fit_compute(profile.compute)
    memory, quality = _memory(profile, table)
    depth = Depth()
    if table is None:
        quality |= _compute_quality(profile.compute)
    else:
        latency = _Latency(table, np.ones(len(table.rows), dtype=bool))
        depth = latency.depth
        compute |= latency.stored()
        quality |= _latency_quality(table, latency)
    return CostModel(
        device=profile.device,
        world_size=profile.world_size,
        workload=profile.workload,
        memory=memory,
        compute=compute,
        comm=_fit_comm(profile.comm),
        depth=depth.stored(),
        quality=quality,
        valid=_valid(profile, table),
        provenance=Provenance.collect(device=profile.device),
    )


def assess(measured: Array, predicted: Array, names: Sequence[str], *, held_out: bool) -> Quality:
    """MAPE and signed bias in percent, R2, and the worst cell by name."""
    error = (predicted - measured) / measured * 100
    spread, residual = float(np.sum((measured - measured.mean()) ** 2)), float(np.sum((measured - predicted) ** 2))
    worst = int(np.argmax(np.abs(error)))
    return Quality(
        mape_percent=float(np.abs(error).mean()),
        bias_percent=float(error.mean()),
        r2=1 - residual / spread if spread > 0 else float(residual == 0),
        num_points=len(measured),
        held_out=held_out,
        worst=names[worst],
        worst_percent=float(error[worst]),
    )


def _named(names: Sequence[str], values: Array) -> dict[str, float]:
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def _folds(n: Array) -> Array:
    """Group of each point: its depth if there are at least four and none holds half of the points, else in turn."""
    depths, counts = np.unique(n, return_counts=True)
    if len(depths) >= 4 and 2 * counts.max() <= len(n):
        return n
    return np.arange(len(n), dtype=np.float64) % NUM_FOLDS


def _held_out(n: Array, model: Callable[[NDArray[np.bool_]], Array]) -> Array:
    """Prediction of every point by a model fitted without its fold; `model(keep)` predicts all points."""
    folds = _folds(n)
    predicted = np.empty(len(n))
    for fold in np.unique(folds):
        out = folds == fold
        predicted[out] = model(~out)[out]
    return predicted


def _profiled_stage(profile: HardwareProfile, row: MemoryRow) -> Stage:
    """The stage of a memory row. Its dp is not recorded: all ranks took part, in one stage or in two."""
    dp = max(1, profile.world_size // (row.cp * (1 if row.first and row.last else 2)))
    return Stage(profile.workload, row.first, row.last, row.layers, row.cp, dp, row.microbatches, row.sequences)


def _memory(profile: HardwareProfile, grid: _Grid | None) -> tuple[dict[str, float], dict[str, Quality]]:
    """Coefficients from all memory points, with their quality."""
    stages = [_profiled_stage(profile, row) for row in profile.memory]
    measured = [float(row.peak_bytes) for row in profile.memory]
    names = [f"first={s.first} last={s.last} l{s.layers} cp{s.cp} k{s.microbatches} b{s.sequences}" for s in stages]
    if grid is not None:
        stages += [whole_model(w) for w in grid.workloads]
        measured += grid.peak.tolist()
        names += grid.names()
    coefficients = fit_memory(stages, measured)
    y = np.array(measured)

    def model(keep: NDArray[np.bool_]) -> Array:
        chosen = np.flatnonzero(keep)
        fitted = fit_memory([stages[i] for i in chosen], y[chosen].tolist())
        return np.array([peak_bytes(fitted, stage) for stage in stages])

    inside = np.array([peak_bytes(coefficients, stage) for stage in stages])
    quality = {"memory_in_sample": assess(y, inside, names, held_out=False)}
    if len(y) >= 2 * NUM_FOLDS:
        outside = _held_out(np.array([stage.layers for stage in stages], dtype=np.float64), model)
        return coefficients, {"memory": assess(y, outside, names, held_out=True), **quality}
    return coefficients, {"memory": quality["memory_in_sample"], **quality}


def _latency_quality(grid: _Grid, latency: _Latency) -> dict[str, Quality]:
    """Quality of the predicted step of each cell; l_break and gamma are fitted again in every fold."""
    form = latency.depth.form
    outside = _held_out(grid.n, lambda keep: _Latency(grid, keep, form).step(grid))
    return {
        "latency": assess(grid.step, outside, grid.names(), held_out=True),
        "latency_in_sample": assess(grid.step, latency.step(grid), grid.names(), held_out=False),
    }


def _timing(row: ComputeRow, part: str) -> float:
    value: Timing = getattr(row, part)
    if not (math.isfinite(value.median) and value.median >= 0):
        where = f"cp={row.cp}, sequences={row.sequences}"
        raise UserError(f"profile has {part}={value.median} s at {where}: it must be 0 or more; profile again")
    return value.median


def _fit_compute(rows: Sequence[ComputeRow]) -> dict[str, dict[str, float]]:
    """By cp degree: fixed and per-sequence seconds of every part, non-negative, relative error."""
    if not rows:
        raise UserError("the profile has no compute rows: profile again")
    fitted = {}
    for cp in sorted({row.cp for row in rows}):
        own = [row for row in rows if row.cp == cp]
        sizes = np.array([row.sequences for row in own], dtype=np.float64)
        if len(np.unique(sizes)) < MIN_SIZES:
            raise UserError(
                f"cp={cp} was profiled for {len(np.unique(sizes))} micro-batch size(s), "
                f"an affine law needs {MIN_SIZES}: give more profile.microbatch_sizes"
            )
        table: dict[str, float] = {}
        for part in PARTS:
            seconds = np.array([_timing(row, part) for row in own])
            weights = 1 / np.maximum(seconds, 1e-9)
            matrix = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
            fixed, slope = nnls(matrix, seconds * weights)[0]
            table |= {f"{part}_fixed": float(fixed), f"{part}_slope": float(slope)}
        fitted[str(cp)] = table
    return fitted


def _compute_quality(rows: Sequence[ComputeRow]) -> dict[str, Quality]:
    """Without a grid: how well the affine law reproduces the profiled layers, on the points it was fitted to."""
    fitted = _fit_compute(rows)
    parts = [(row, f"layer_{direction}") for row in rows for direction in ("forward", "backward")]
    measured = np.array([max(_timing(row, part), 1e-9) for row, part in parts])
    tables = [(fitted[str(row.cp)], row.sequences, part) for row, part in parts]
    predicted = np.array([t[f"{part}_fixed"] + t[f"{part}_slope"] * m for t, m, part in tables])
    names = [f"{part} cp{row.cp} m{row.sequences}" for row, part in parts]
    quality = assess(measured, predicted, names, held_out=False)
    return {"latency": quality, "latency_in_sample": quality}


def _fit_comm(rows: Sequence[CommRow]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Knots (bytes, seconds) of `p2p` and `all_reduce/G`, sorted, equal sizes averaged, made non-decreasing."""
    groups: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        key = "p2p" if row.operation == "p2p" else f"all_reduce/{row.ranks}"
        if not (math.isfinite(row.seconds.median) and row.seconds.median > 0 and row.bytes > 0):
            raise UserError(
                f"profile has {key} of {row.bytes} bytes in {row.seconds.median} s: "
                "both must be positive; profile again"
            )
        groups.setdefault(key, {}).setdefault(float(row.bytes), []).append(row.seconds.median)
    knots = {}
    for key, sizes in groups.items():
        order = sorted(sizes)
        seconds = np.maximum.accumulate([float(np.median(sizes[size])) for size in order])
        knots[key] = tuple((size, float(value)) for size, value in zip(order, seconds, strict=True))
    return knots


def _valid(profile: HardwareProfile, grid: _Grid | None) -> dict[str, tuple[float, float]]:
    """Range of every size over the points of the fit."""
    w = profile.workload
    points = [dimensions(w, 1, row.cp, row.sequences) for row in profile.compute]
    points += [dimensions(w, row.layers, row.cp, profile.compute[0].sequences) for row in profile.memory]
    if grid is not None:
        points += [dimensions(cell, cell.layers, 1, cell.batch) for cell in grid.workloads]
    return {name: (min(p[name] for p in points), max(p[name] for p in points)) for name in points[0]}
