"""Fit of the memory model: non-negative copies that reproduce measured peaks.

Legend: T moments of a step; bytes throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from megagraph.config import UserError
from megagraph.search.memory import PRIOR, Stage, moments

Array = NDArray[np.float64]

PRIOR_WEIGHT = 1e-5
MIN_POINTS = 4


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
    fits = [(*_alternate([_system(stage, eager) for stage in stages], y), eager) for eager in (False, True)]
    _, coefficients, eager = min(fits, key=lambda item: item[0])
    named = {name: float(value) for name, value in zip(PRIOR, coefficients, strict=True)}
    return {**named, "eager_gradients": float(eager)}


def _system(stage: Stage, eager: bool) -> tuple[Array, Array]:
    """Fixed bytes [T] and regressors [T, len(PRIOR)] of the T moments of one stage."""
    found = moments(stage, eager=eager)
    fixed = np.array([sum(moment.fixed.values()) for moment in found], dtype=np.float64)
    return fixed, np.array([[moment.copies.get(name, 0.0) for name in PRIOR] for moment in found], dtype=np.float64)


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
