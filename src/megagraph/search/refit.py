"""A cost model of a new device from a few measured points: the laws of an old one, with new scale factors.

The structure stays: which terms there are, their relative sizes, the depth penalty. What is fitted again is one factor
for what every pass of a part costs at least and one for its seconds per sequence, by part and direction; one for the
memory beyond weights; and the messages, by size where they were measured, else by the mean factor of those that were.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from megagraph.artifacts import CostModel, HardwareProfile, Provenance
from megagraph.artifacts_quality import Quality
from megagraph.config import UserError
from megagraph.search.cost import PARTS, all_reduce_seconds, p2p_seconds, part_seconds
from megagraph.search.fit import fit_comm, profiled_stage, stage_name, timing_of
from megagraph.search.memory import peak_bytes
from megagraph.search.quality import assess

Array = NDArray[np.float64]
Factors = dict[str, tuple[float, float]]
"""By part: factors of the fixed seconds and of those per sequence."""

MIN_ROWS = 2


def refit(cost: CostModel, profile: HardwareProfile) -> CostModel:
    """`cost` with the scale factors that a small profile of another device asks for.

    Needs compute rows of two micro-batch sizes; cp degrees that were not measured again keep their law with the same
    factors. Quality says how far off the old model was on these points (`layer_before`) and how far the new one is
    (`layer_in_sample`, `memory_in_sample`); the margin of the old model is kept. Raises `UserError` for an estimated
    model, another precision or attention, or too few points.
    """
    old, new = cost.workload, profile.workload
    if cost.estimated_from:
        raise UserError(f"the cost model is estimated from {cost.estimated_from}: start from a measured one")
    for name in ("element_bytes", "autocast", "attention", "node_table"):
        if getattr(old, name) != getattr(new, name):
            raise UserError(
                f"the cost model has {name}={getattr(old, name)} but the profile {getattr(new, name)}: "
                "profile the same again"
            )
    if len({row.sequences for row in profile.compute}) < MIN_ROWS:
        raise UserError(f"{len(profile.compute)} compute rows cannot tell fixed seconds from slopes: give two sizes")
    factors = {part: _factors(cost, profile, part) for part in PARTS}
    memory, quality = _memory(cost, profile)
    found = cost.model_copy(
        update={
            "device": profile.device,
            "world_size": profile.world_size,
            "workload": new,
            "compute": _compute(cost, profile, factors),
            "comm": _messages(cost, profile),
            "memory": memory,
            "intervals": {},
            "depth_readings": {},
            "provenance": Provenance.collect(device=profile.device),
        }
    )
    quality |= {"layer_before": _layers(cost, profile), "layer_in_sample": _layers(found, profile)}
    return found.model_copy(update={"quality": quality})


def _law(cost: CostModel, profile: HardwareProfile, part: str, cp: int) -> tuple[float, float]:
    """Old fixed seconds and seconds per sequence of a part, for the shape of the new profile."""
    at_zero, at_one = (part_seconds(cost, profile.workload, cp, m)[part] for m in (0.0, 1.0))
    return at_zero, at_one - at_zero


def _factors(cost: CostModel, profile: HardwareProfile, part: str) -> tuple[float, float]:
    """Non-negative factors that minimise the relative error over all cp degrees; of a term that the old law does not
    have, that of the other."""
    rows = [row for row in profile.compute if str(row.cp) in cost.compute]
    if not rows:
        raise UserError("no cp degree of the profile is in the cost model: profile one that is")
    seconds = np.array([max(timing_of(row, part), 1e-9) for row in rows])
    laws = [_law(cost, profile, part, row.cp) for row in rows]
    matrix = np.array([[fixed, slope * row.sequences] for (fixed, slope), row in zip(laws, rows, strict=True)])
    present: NDArray[np.bool_] = np.abs(matrix).sum(axis=0) > 0
    if not present.any():
        return 1.0, 1.0
    solution = np.zeros(2)
    scaled = (matrix / seconds[:, None])[:, present]
    solution[present] = nnls(scaled, np.ones(len(rows)))[0]
    return (
        float(solution[0] if present[0] else solution[1]),
        float(solution[1] if present[1] else solution[0]),
    )


def _compute(cost: CostModel, profile: HardwareProfile, factors: Factors) -> dict[str, dict[str, float]]:
    """Tables by cp degree for the new shape, and the laws of whole models scaled as layers and embedding are."""
    found: dict[str, dict[str, float]] = {}
    for key in (key for key in cost.compute if key.isdigit()):
        found[key] = {}
        for part, (fixed_factor, slope_factor) in factors.items():
            fixed, slope = _law(cost, profile, part, int(key))
            found[key] |= {f"{part}_fixed": fixed * fixed_factor, f"{part}_slope": slope * slope_factor}
    for direction in ("forward", "backward"):
        if f"grid_{direction}" in cost.compute:
            found[f"grid_{direction}"] = {
                name: value
                * factors[f"{'embed' if name.startswith('rest') else 'layer'}_{direction}"][
                    0 if name.endswith("fixed") else 1
                ]
                for name, value in cost.compute[f"grid_{direction}"].items()
            }
    if "update" in cost.compute:
        # The update is not profiled by itself: like a layer's backward, it launches kernels and moves bytes.
        fixed_factor, slope_factor = factors["layer_backward"]
        each = {"fixed": fixed_factor, "layer": fixed_factor, "parameter": slope_factor}
        found["update"] = {name: value * each[name] for name, value in cost.compute["update"].items()}
    return found


def _messages(cost: CostModel, profile: HardwareProfile) -> dict[str, tuple[tuple[float, float], ...]]:
    """Measured messages as they are; others by the geometric mean of the factors of those."""
    own = fit_comm(profile.comm)
    ratios = []
    for key, knots in own.items():
        ranks = int(key.partition("/")[2] or 0)
        if key in cost.comm:
            for size, seconds in knots:
                old = all_reduce_seconds(cost, ranks, size) if ranks else p2p_seconds(cost, size)
                ratios.append(math.log(seconds / float(old)))
    factor = math.exp(float(np.mean(ratios))) if ratios else 1.0
    kept = {key: tuple((size, factor * seconds) for size, seconds in knots) for key, knots in cost.comm.items()}
    return kept | own


def _memory(cost: CostModel, profile: HardwareProfile) -> tuple[dict[str, float], dict[str, Quality]]:
    """Coefficients times one factor, and a new constant; as they are where no peak was measured."""
    if not profile.memory:
        return cost.memory, {}
    stages = [profiled_stage(profile, row) for row in profile.memory]
    measured = np.array([float(row.peak_bytes) for row in profile.memory])
    unit = float(measured.min())

    def scaled(values: Array) -> dict[str, float]:
        copies = {name: value * float(values[0]) for name, value in cost.memory.items()}
        kept = {"constant": float(values[1]) * unit, "eager_gradients": cost.memory["eager_gradients"]}
        return copies | kept

    def errors(values: Array) -> Array:
        return np.array([peak_bytes(scaled(values), stage) for stage in stages]) / measured - 1

    start = np.array([1.0, cost.memory["constant"] / unit])
    bounds = ([0.0, 0.0], [np.inf, np.inf])
    found = scaled(least_squares(errors, np.maximum(start, 1e-6), bounds=bounds).x)
    predicted = np.array([peak_bytes(found, stage) for stage in stages])
    names = [stage_name(stage) for stage in stages]
    quality = assess(measured, predicted, names, held_out=False, margin=cost.memory_margin)
    return found, {"memory_in_sample": quality}


def _layers(cost: CostModel, profile: HardwareProfile) -> Quality:
    """Layers of the profile, forward and backward, as a cost model predicts them."""
    rows = [row for row in profile.compute if str(row.cp) in cost.compute]
    cases = [(row, part) for row in rows for part in ("layer_forward", "layer_backward")]
    measured = np.array([max(timing_of(row, part), 1e-9) for row, part in cases])
    predicted = np.array([part_seconds(cost, profile.workload, row.cp, row.sequences)[part] for row, part in cases])
    names = [f"{part} cp{row.cp} m{row.sequences}" for row, part in cases]
    return assess(measured, predicted, names, held_out=False)
