"""Fit of the memory and latency models to a hardware profile and, where there is one, a grid of whole models.

Legend: m sequences of one micro-batch, n layers; seconds and bytes throughout; errors are relative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from megagraph.artifacts import CommRow, ComputeRow, CostModel, HardwareProfile, MemoryRow, Provenance, Timing
from megagraph.artifacts_quality import Interval, Quality
from megagraph.config import UserError
from megagraph.search.cost import PARTS, dimensions, whole_model
from megagraph.search.depth import Depth
from megagraph.search.fit_memory import fit_memory
from megagraph.search.grid import MIN_CELLS, Grid, Latency
from megagraph.search.memory import Stage, peak_bytes
from megagraph.search.quality import NUM_FOLDS, assess, cross_fitted, cross_margin, folds_of, interval, margin

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

MIN_SIZES = 2
QUANTILE = 0.95


def fit(
    profile: HardwareProfile, grid: Sequence[Mapping[str, Any]] | None = None, quantile: float = QUANTILE
) -> CostModel:
    """The cost model of a device (paper, III-B1; l_break and gamma from the grid's depths).

    grid: rows of the grid files as read by `csv.DictReader`, or None where no grid was measured (then no depth
    penalty, no optimiser time and no `predict_cell`). Memory is fitted on the profile's and the grid's points
    together. quantile: of measured over predicted memory, kept as `memory_margin`, which plans are made with. Quality
    is given twice: held out (`memory`, `latency`) and on the fitted points (`*_in_sample`). Raises `UserError` for an
    empty grid, one of another device, too few points, or a value that is not finite and positive.
    """
    table = None if grid is None else Grid(profile.workload, grid, profile.device)
    if table is not None and len(table.rows) < MIN_CELLS:
        raise UserError(
            f"{len(table.rows)} grid cells cannot fit {MIN_CELLS} coefficients: measure at least {MIN_CELLS}"
        )
    compute = fit_compute(profile.compute)
    memory = _Memory(profile, table, quantile)
    quality, intervals = memory.quality, memory.intervals
    latency = None
    if table is None:
        quality |= _compute_quality(profile.compute)
    else:
        latency = Latency(table, np.ones(len(table.rows), dtype=bool))
        compute |= latency.stored()
        quality, intervals = _with_latency(table, latency, quality, intervals)
    return CostModel(
        device=profile.device,
        world_size=profile.world_size,
        workload=profile.workload,
        memory=memory.coefficients,
        compute=compute,
        comm=fit_comm(profile.comm),
        depth=(latency.depth if latency else Depth()).stored(),
        quality=quality,
        valid=_valid(profile, table),
        memory_margin=memory.margin,
        intervals=intervals,
        depth_readings=latency.readings if latency else {},
        provenance=Provenance.collect(device=profile.device),
    )


def profiled_stage(profile: HardwareProfile, row: MemoryRow) -> Stage:
    """The stage of a memory row. Its dp is not recorded: all ranks took part, in one stage or in two."""
    dp = max(1, profile.world_size // (row.cp * (1 if row.first and row.last else 2)))
    return Stage(profile.workload, row.first, row.last, row.layers, row.cp, dp, row.microbatches, row.sequences)


def stage_name(stage: Stage) -> str:
    """A memory point in a few words."""
    place = f"first={stage.first} last={stage.last} l{stage.layers}"
    return f"{place} cp{stage.cp} k{stage.microbatches} b{stage.sequences}"


class _Memory:
    """Coefficients from all memory points, their quality, and how far beyond them a peak may be.

    `memory` is predicted without the point's depth (or fold), `memory/cp` without its cp degree, `memory/stage` without
    stages of its place.
    """

    def __init__(self, profile: HardwareProfile, grid: Grid | None, quantile: float) -> None:
        self._stages = [profiled_stage(profile, row) for row in profile.memory]
        measured = [float(row.peak_bytes) for row in profile.memory]
        names = [stage_name(stage) for stage in self._stages]
        if grid is not None:
            self._stages += [whole_model(w) for w in grid.workloads]
            measured += grid.peak.tolist()
            names += grid.names()
        self.coefficients = fit_memory(self._stages, measured)
        self._measured = y = np.array(measured)
        inside = self._predicted(self.coefficients)
        self.intervals: dict[str, Interval] = {}
        self.margin = margin(y, inside, quantile)
        self.quality = {"memory_in_sample": assess(y, inside, names, held_out=False, margin=self.margin)}
        if len(y) < 2 * NUM_FOLDS:
            self.quality["memory"] = self.quality["memory_in_sample"]
            return
        folds = folds_of(np.array([stage.layers for stage in self._stages], dtype=np.float64))
        outside = cross_fitted(folds, self._without)
        self.intervals["memory"] = interval(y, outside)
        self.margin = margin(y, outside, quantile)
        margins = cross_margin(y, outside, folds, quantile)
        self.quality["memory"] = assess(y, outside, names, held_out=True, margin=margins)
        self.quality |= self._left_out("cp", [str(stage.cp) for stage in self._stages], names)
        self.quality |= self._left_out("stage", [f"{s.first} {s.last}" for s in self._stages], names)

    def _predicted(self, coefficients: dict[str, float]) -> Array:
        return np.array([peak_bytes(coefficients, stage) for stage in self._stages])

    def _without(self, keep: Mask) -> Array:
        chosen = np.flatnonzero(keep)
        return self._predicted(fit_memory([self._stages[i] for i in chosen], self._measured[chosen].tolist()))

    def _left_out(self, kind: str, groups: list[str], names: Sequence[str]) -> dict[str, Quality]:
        """Quality of points whose whole group was left out of the fit; nothing if the others are too few."""
        labels, counts = np.unique(groups, return_counts=True)
        if len(labels) < 2 or len(groups) - counts.max() < 2 * NUM_FOLDS:
            return {}
        outside = cross_fitted(np.array(groups), self._without)
        return {f"memory/{kind}": assess(self._measured, outside, names, held_out=True, margin=self.margin)}


def _with_latency(
    grid: Grid, latency: Latency, quality: dict[str, Quality], intervals: dict[str, Interval]
) -> tuple[dict[str, Quality], dict[str, Interval]]:
    """Quality and interval of the predicted step of each cell; l_break and gamma are fitted again in every fold."""
    form = latency.depth.form
    outside = cross_fitted(folds_of(grid.n), lambda keep: Latency(grid, keep, form).step(grid))
    found = {
        "latency": assess(grid.step, outside, grid.names(), held_out=True),
        "latency_in_sample": assess(grid.step, latency.step(grid), grid.names(), held_out=False),
    }
    return {**quality, **found}, {**intervals, "latency": interval(grid.step, outside)}


def timing_of(row: ComputeRow, part: str) -> float:
    """Median seconds of a part; `UserError` for what is no number."""
    value: Timing = getattr(row, part)
    if not (math.isfinite(value.median) and value.median >= 0):
        where = f"cp={row.cp}, sequences={row.sequences}"
        raise UserError(f"profile has {part}={value.median} s at {where}: it must be 0 or more; profile again")
    return value.median


def fit_compute(rows: Sequence[ComputeRow]) -> dict[str, dict[str, float]]:
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
            seconds = np.array([timing_of(row, part) for row in own])
            weights = 1 / np.maximum(seconds, 1e-9)
            matrix = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
            fixed, slope = nnls(matrix, seconds * weights)[0]
            table |= {f"{part}_fixed": float(fixed), f"{part}_slope": float(slope)}
        fitted[str(cp)] = table
    return fitted


def _compute_quality(rows: Sequence[ComputeRow]) -> dict[str, Quality]:
    """Without a grid: how well the affine law reproduces the profiled layers, on the points it was fitted to."""
    fitted = fit_compute(rows)
    parts = [(row, f"layer_{direction}") for row in rows for direction in ("forward", "backward")]
    measured = np.array([max(timing_of(row, part), 1e-9) for row, part in parts])
    tables = [(fitted[str(row.cp)], row.sequences, part) for row, part in parts]
    predicted = np.array([t[f"{part}_fixed"] + t[f"{part}_slope"] * m for t, m, part in tables])
    names = [f"{part} cp{row.cp} m{row.sequences}" for row, part in parts]
    quality = assess(measured, predicted, names, held_out=False)
    return {"latency": quality, "latency_in_sample": quality}


def fit_comm(rows: Sequence[CommRow]) -> dict[str, tuple[tuple[float, float], ...]]:
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


def _valid(profile: HardwareProfile, grid: Grid | None) -> dict[str, tuple[float, float]]:
    """Range of every size over the points of the fit."""
    w = profile.workload
    points = [dimensions(w, 1, row.cp, row.sequences) for row in profile.compute]
    points += [dimensions(w, row.layers, row.cp, profile.compute[0].sequences) for row in profile.memory]
    if grid is not None:
        points += [dimensions(cell, cell.layers, 1, cell.batch) for cell in grid.workloads]
    return {name: (min(p[name] for p in points), max(p[name] for p in points)) for name in points[0]}
