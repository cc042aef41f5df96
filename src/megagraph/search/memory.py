"""Peak bytes of one rank of a pipeline stage: a closed form whose few coefficients are fitted.

A step has three moments that can be the peak: the end of all forwards, the start of the second backward (gradients
exist, one micro-batch is freed) and the weight update. Each is linear in the same coefficients, which count live
copies of a physical quantity, so each has an expected value (`PRIOR`) and a fit that strays from it says something.

Legend: B sequences per replica, m = B/K of one micro-batch, S local and N all tokens, M bias channels, H heads,
d hidden, f FFN, F features, C classes, g global tokens, R read-out tokens, n layers of the stage; e bytes per element,
a of what layers compute (less than e under autocast, which also holds a copy of the weights in that type).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from megagraph.artifacts import Workload
from megagraph.config import ParallelPlan, UserError

Array = NDArray[np.float64]

TILE_BYTES = 2 << 20
"""Scores that the tiled kernel holds at once, but at least `MIN_TILE_ROWS` rows of one sequence."""

PRIOR: dict[str, float] = {
    "constant": 0.0,
    "table_rows": 0.0,
    "hidden": 5.0,
    "keys": 4.0,
    "ffn": 2.0,
    "statistics": 1.0,
    "scores": 2.25,
    "bias": 1.0,
    "features": 1.0,
    "readout": 1.0,
    "pipeline": 1.0,
    "ring": 1.0,
    "transient": 4.0,
    "transient_scores": 2.5,
    "tile": 4.0,
    "bucket": 1.0,
    "update": 0.5,
}
"""Expected live copies by regressor. Those at 0 have no expectation: `constant` is bytes, `table_rows` the rows of the
feature table that the first stage holds."""

PRIOR_WEIGHT = 1e-5
MIN_POINTS = 4
MIN_TILE_ROWS = 16


@dataclass(frozen=True)
class Stage:
    """One rank of a stage: its place, its layers, and the sequences (padded to K equal micro-batches) it sees."""

    workload: Workload
    first: bool
    last: bool
    layers: int
    cp: int
    dp: int
    microbatches: int
    sequences: int

    @property
    def local_tokens(self) -> int:
        """S = ceil(N'/cp) + N_s."""
        return -(-self.workload.num_regular // self.cp) + self.workload.num_super

    @property
    def query_rows(self) -> int:
        """Query rows over all layers of the stage: S each, but what is read out in the last layer of the model."""
        rows = self.layers * self.local_tokens
        return rows - self.local_tokens + last_rows(self.workload, self.cp) if self.last else rows


def last_rows(w: Workload, cp: int) -> int:
    """Query rows of the last layer on the rank that has most: its read-out tokens, or all rows for `all_to_all`."""
    own = -(-w.num_regular // cp)
    return own + w.num_super if w.attention == "all_to_all" else min(w.num_readout, own)


def distinct_rows(w: Workload, tokens: float) -> float:
    """Rows of the feature table among `tokens` tokens, if all rows were equally likely: R (1 - exp(-tokens / R)).

    Neighbourhoods overlap, so there are fewer; the fitted copies of `features` say how many.
    """
    return w.num_rows * -math.expm1(-tokens / w.num_rows) if w.num_rows else tokens


def batch_split(batch: int, dp: int, microbatches: int) -> tuple[int, int]:
    """Sequences of one micro-batch and of a replica: ceil(ceil(batch/dp)/K) and K times that (padding included)."""
    replica = -(-batch // dp)
    micro = -(-replica // microbatches)
    return micro, micro * microbatches


def stage_of(workload: Workload, plan: ParallelPlan, index: int) -> Stage:
    """Stage `index` (0 .. pp-1) of a plan."""
    if not 0 <= index < plan.pp:
        raise UserError(f"stage={index} is outside plan {plan.label}: name one of 0..{plan.pp - 1}")
    _, sequences = batch_split(workload.batch, plan.dp, plan.microbatches)
    last = index == plan.pp - 1
    return Stage(workload, index == 0, last, plan.layers[index], plan.cp, plan.dp, plan.microbatches, sequences)


def table_parameters(w: Workload, replicas: int = 1) -> int:
    """Learned node rows times d on a rank of the first stage: all V, or ceil(V / replicas) of a sharded table."""
    rows = {"none": 0, "replicated": w.num_nodes, "sharded": -(-w.num_nodes // replicas)}[w.node_table]
    return rows * w.hidden


def num_parameters(w: Workload, *, first: bool, last: bool, layers: int, replicas: int = 1) -> int:
    """Weights of a stage (ans-gt 2.5), on one of the cp x dp `replicas` that share a sharded node table.

    The bias of the global tokens, g*M, lives on every stage.
    """
    d, f = w.hidden, w.ffn
    layer = 4 * (d * d + d) + w.bias_channels * w.heads + w.heads + 2 * d * f + f + d + 4 * d
    embed = w.num_features * d + d + w.global_tokens * d + table_parameters(w, replicas) if first else 0
    head = 2 * d + d * w.num_classes + w.num_classes if last else 0
    return layers * layer + embed + head + w.global_tokens * w.bias_channels


def moments(stage: Stage, *, eager: bool) -> tuple[Array, Array]:
    """Fixed bytes [T] and regressors in bytes [T, len(PRIOR)] of the T moments that can be the peak.

    eager: gradients stay allocated between steps; otherwise they appear during backward. They do between the passes of
    a step that accumulates.
    """
    w, K, b = stage.workload, stage.microbatches, stage.sequences
    S, N, e, a = stage.local_tokens, w.num_tokens, w.element_bytes, w.activation_bytes
    micro = b / K
    dense = w.attention == "dense"
    replicas = stage.cp * stage.dp
    weights = e * num_parameters(w, first=stage.first, last=stage.last, layers=stage.layers, replicas=replicas)
    # The node table is reduced in place, or by rows, and updated by a fused kernel: it has neither bucket nor scratch.
    rest = weights - stage.first * e * table_parameters(w, replicas)
    casts = a * rest // e if a < e else 0
    keys, queries = stage.layers * b * S, b * stage.query_rows
    score = e * w.heads * S * N
    resident = {
        "constant": 1.0,
        "bias": e * b * S * N * (w.bias_channels + w.global_tokens),
        "table_rows": stage.first * e * w.num_features,
        "pipeline": ((not stage.first) + (not stage.last)) * a * b * S * w.hidden,
    }
    saved = {
        "hidden": (2 * e + 3 * a) / 5 * queries * w.hidden,  # two of the five copies are the residual stream
        "keys": (e if dense else a) * keys * w.hidden,
        "ffn": a * queries * w.ffn,
        "statistics": queries * (16 + (0 if dense else e * w.heads)),
        "scores": queries * e * w.heads * N if dense else 0.0,
        "features": stage.first * (K * distinct_rows(w, micro * S) * a * w.num_features + b * S * 8),
        "readout": stage.last * e * b * (S * w.hidden + w.num_readout * (w.num_classes + w.hidden)),
    }
    passing = {
        "transient": e * micro * S * (w.hidden + w.ffn),
        "transient_scores": micro * score if dense else 0.0,
        "tile": 0.0 if dense else min(micro * score, max(TILE_BYTES, MIN_TILE_ROWS * e * w.heads * N)),
        "ring": (stage.cp > 1) * 8 * a * micro * S * w.hidden,
    }
    update = {"bucket": (replicas > 1) * rest, "update": rest}
    kept = eager or w.accumulate > 1
    rows = [((3 + kept) * weights + casts, {**resident, **saved, **passing}), (4 * weights, {**resident, **update})]
    if K > 1:
        left = {name: value * (K - 1) / K for name, value in saved.items()}
        rows.append((4 * weights + casts, {**resident, **left, **passing}))
    fixed = np.array([row[0] for row in rows], dtype=np.float64)
    return fixed, np.array([[row[1].get(name, 0.0) for name in PRIOR] for row in rows], dtype=np.float64)


def peak_bytes(coefficients: dict[str, float], stage: Stage) -> float:
    """Predicted peak bytes of one rank of `stage`, from the coefficients of `fit_memory`."""
    fixed, regressors = moments(stage, eager=bool(coefficients["eager_gradients"]))
    return float((fixed + regressors @ np.array([coefficients[name] for name in PRIOR])).max())


def fit_memory(stages: Sequence[Stage], measured: Sequence[float]) -> dict[str, float]:
    """Non-negative coefficients (copies) that minimise the relative error of the measured peak bytes.

    Both readings of gradient storage are fitted and the better one kept (`eager_gradients` 0 or 1). Directions that
    the points do not determine stay at `PRIOR`. Raises `UserError` for fewer than `MIN_POINTS` points.
    """
    if len(stages) < MIN_POINTS:
        raise UserError(
            f"{len(stages)} memory points cannot fit the memory model: profile at least {MIN_POINTS} (add a grid)"
        )
    y = np.asarray(measured, dtype=np.float64)
    if not (np.isfinite(y).all() and (y > 0).all()):
        where = int(np.argmax(~(np.isfinite(y) & (y > 0))))
        raise UserError(f"memory point {where} has peak_bytes={y[where]}: it must be positive; measure again")
    fits = [(*_alternate([moments(stage, eager=eager) for stage in stages], y), eager) for eager in (False, True)]
    _, coefficients, eager = min(fits, key=lambda item: item[0])
    named = {name: float(value) for name, value in zip(PRIOR, coefficients, strict=True)}
    return {**named, "eager_gradients": float(eager)}


def _alternate(rows: list[tuple[Array, Array]], y: Array) -> tuple[float, Array]:
    """Relative squared error and coefficients: assign every point to its largest moment, solve, repeat."""
    coefficients = np.array(list(PRIOR.values()))
    best, kept = np.inf, coefficients
    seen: set[tuple[int, ...]] = set()
    while True:
        peak = [int(np.argmax(fixed + regressors @ coefficients)) for fixed, regressors in rows]
        if tuple(peak) in seen:
            return best, kept
        seen.add(tuple(peak))
        fixed = np.array([row[0][moment] for row, moment in zip(rows, peak, strict=True)])
        regressors = np.stack([row[1][moment] for row, moment in zip(rows, peak, strict=True)])
        coefficients = _solve(regressors / y[:, None], (y - fixed) / y)
        predicted = np.array([(fixed + regressors @ coefficients).max() for fixed, regressors in rows])
        error = float(np.sum((predicted / y - 1) ** 2))
        if error < best:
            best, kept = error, coefficients


def _solve(regressors: Array, target: Array) -> Array:
    """Non-negative least squares with a weak pull towards `PRIOR`; columns scaled to unit effect."""
    prior = np.array(list(PRIOR.values()))
    scale = np.where(prior > 0, prior, 1.0 / np.maximum(regressors.max(axis=0), 1e-300))
    pull = np.sqrt(PRIOR_WEIGHT) * np.diag(prior > 0).astype(np.float64)
    matrix = np.vstack([regressors * scale, pull])
    solution, _ = nnls(matrix, np.concatenate([target, pull.sum(axis=1)]), maxiter=200)
    return np.asarray(solution) * scale
