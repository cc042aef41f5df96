"""How well a fitted cost model predicts what was measured for that alone: other depths, widths, degrees, data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megagraph.artifacts import CostModel, HardwareProfile, Workload
from megagraph.artifacts_quality import Quality
from megagraph.config import UserError
from megagraph.search.cost import part_seconds, predict_cell
from megagraph.search.fit import profiled_stage, stage_name, timing_of
from megagraph.search.grid import Grid
from megagraph.search.memory import peak_bytes
from megagraph.search.quality import assess

KINDS = {
    "layers": "depth",
    "heads": "width",
    "hidden": "width",
    "ffn": "width",
    "batch": "batch",
    "num_regular": "tokens",
    "num_features": "dataset",
    "num_classes": "dataset",
}
"""What a size is called that the fit has not seen."""

Point = tuple[str, str, float, float]
"""Kind, name, measured, predicted."""


def held_out(
    cost: CostModel,
    profile: HardwareProfile,
    grid: Sequence[Mapping[str, Any]],
    cells: Sequence[Mapping[str, Any]] = (),
    profiles: Sequence[HardwareProfile] = (),
) -> CostModel:
    """The cost model with the quality of its predictions of points that had no part in it.

    profile, grid: what it was fitted to; cells: rows of other grids; profiles: of other degrees, stages or data sets.
    Adds `heldout_memory` (all peaks, at the planned quantile), `heldout_latency` (steps of cells) and `heldout_layer`
    (forward and backward of a layer, profiles), and each by kind, such as `heldout_memory/depth`. Raises `UserError`
    for points of another device or for cells without a grid.
    """
    memory, latency, layer = _cells(cost, grid, cells) if cells else ([], [], [])
    for other in profiles:
        if other.device != cost.device:
            raise UserError(
                f"the held-out profile is of {other.device} but the cost model of {cost.device}: "
                "measure both on one device"
            )
        memory += _memory(cost, profile, other)
        layer += _layers(cost, profile, other)
    found = dict(cost.quality)
    for name, points in (("memory", memory), ("latency", latency), ("layer", layer)):
        margin = cost.memory_margin if name == "memory" else None
        found |= _qualities(f"heldout_{name}", points, margin)
    return cost.model_copy(update={"quality": found})


def _cells(
    cost: CostModel, grid: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]
) -> tuple[list[Point], list[Point], list[Point]]:
    """Peaks and steps of held-out cells."""
    table = Grid(cost.workload, cells, cost.device)
    seen = {size: {int(row[size]) for row in grid} for size in KINDS}
    names = table.names()
    kinds = [_join(KINDS[size] for size in KINDS if getattr(w, size) not in seen[size]) for w in table.workloads]
    predicted = [predict_cell(cost, row) for row in cells]
    peaks = zip(kinds, names, table.peak.tolist(), [cell.peak_bytes for cell in predicted], strict=True)
    steps = zip(kinds, names, table.step.tolist(), [cell.step_seconds for cell in predicted], strict=True)
    return list(peaks), list(steps), []


def _memory(cost: CostModel, profile: HardwareProfile, other: HardwareProfile) -> list[Point]:
    degrees = {row.cp for row in profile.memory}
    places = {(row.first, row.last, row.layers) for row in profile.memory}
    points = []
    for row in other.memory:
        stage = profiled_stage(other, row)
        kinds = [*_differences(profile.workload, other.workload)]
        kinds += ["cp"] * (row.cp not in degrees) + ["stage"] * ((row.first, row.last, row.layers) not in places)
        points.append((_join(kinds), stage_name(stage), float(row.peak_bytes), peak_bytes(cost.memory, stage)))
    return points


def _layers(cost: CostModel, profile: HardwareProfile, other: HardwareProfile) -> list[Point]:
    """Seconds of a layer, forward and backward, at the cp degrees that the cost model has."""
    points = []
    for row in other.compute:
        if str(row.cp) in cost.compute:
            parts = part_seconds(cost, other.workload, row.cp, row.sequences)
            both = ("layer_forward", "layer_backward")
            measured, predicted = sum(timing_of(row, part) for part in both), sum(parts[part] for part in both)
            kind = _join(_differences(profile.workload, other.workload))
            points.append((kind, f"layer cp{row.cp} m{row.sequences}", measured, predicted))
    return points


def _differences(fitted: Workload, other: Workload) -> list[str]:
    """Of two profiles; their batches and depths are not what is measured in them."""
    sizes = [size for size in KINDS if size not in ("batch", "layers")]
    return [KINDS[size] for size in sizes if getattr(fitted, size) != getattr(other, size)]


def _join(kinds: Any) -> str:
    """Kinds joined once each, `inside` for none."""
    return "+".join(dict.fromkeys(kinds)) or "inside"


def _qualities(name: str, points: Sequence[Point], margin: float | None) -> dict[str, Quality]:
    """Quality of all points and, if there are several kinds, of each; nothing for no points."""
    if not points:
        return {}
    kinds = sorted({point[0] for point in points})
    groups = {name: list(points)}
    groups |= {f"{name}/{kind}": [one for one in points if one[0] == kind] for kind in kinds if len(kinds) > 1}
    return {
        key: assess(
            np.array([one[2] for one in group]),
            np.array([one[3] for one in group]),
            [one[1] for one in group],
            held_out=True,
            margin=margin,
        )
        for key, group in groups.items()
    }
