"""How good predictions are: errors, intervals from points that the model has not seen, and what a plan risks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megagraph.artifacts_quality import Interval, Quality
from megagraph.config import UserError

Array = NDArray[np.float64]
Folds = NDArray[Any]

UPPER = (0.8, 0.9, 0.95, 0.99)
NUM_FOLDS = 5


def assess(
    measured: Array, predicted: Array, names: Sequence[str], *, held_out: bool, margin: ArrayLike | None = None
) -> Quality:
    """MAPE and signed bias in percent, R2, the worst cell by name; with `margin` (planned over predicted bytes, one or
    one per point) also the two rates of what a plan risks."""
    error = (predicted - measured) / measured * 100
    spread, residual = float(np.sum((measured - measured.mean()) ** 2)), float(np.sum((measured - predicted) ** 2))
    worst = int(np.argmax(np.abs(error)))
    planned = None if margin is None else predicted * np.asarray(margin)
    return Quality(
        mape_percent=float(np.abs(error).mean()),
        bias_percent=float(error.mean()),
        r2=1 - residual / spread if spread > 0 else float(residual == 0),
        num_points=len(measured),
        held_out=held_out,
        worst=names[worst],
        worst_percent=float(error[worst]),
        exceeded_percent=None if planned is None else float((measured > planned).mean() * 100),
        false_feasible_percent=None if planned is None else false_feasible(measured, planned),
    )


def false_feasible(measured: Array, planned: Array) -> float:
    """Percent of the decisions "planned bytes fit" that are wrong, at limits as large as each measured peak."""
    fits = planned[:, None] <= measured[None, :]
    wrong = fits & (measured[:, None] > measured[None, :])
    return float(wrong.sum() / max(1, fits.sum()) * 100)


def interval(measured: Array, predicted: Array) -> Interval:
    """Split-conformal bounds of measured over predicted, from predictions of points that were not fitted.

    For n points the bound at probability p is the ceil((n+1) p)-th smallest ratio: if a new point is exchangeable with
    these, it lies below with probability p at least. Here each point is predicted by a fit without its fold, which is
    exact for that fit and nearly so for the fit to all points.
    """
    ratios = np.sort(measured / predicted)
    count = len(ratios)
    above = {p: _place(count, p) for p in UPPER}
    below = {1 - p: count + 1 - place for p, place in above.items()}
    return Interval(
        num_points=count,
        lower={f"{p:g}": float(ratios[k - 1]) for p, k in sorted(below.items()) if k >= 1},
        upper={f"{p:g}": float(ratios[k - 1]) for p, k in above.items() if k <= count},
    )


def margin(measured: Array, predicted: Array, quantile: float) -> float:
    """What a prediction is multiplied with so that a share of `quantile` of new points stays below it, at least 1.

    Where the points are too few for that quantile it is the largest ratio seen.
    """
    if not 0.5 <= quantile < 1:
        raise UserError(f"quantile={quantile} must be from 0.5 to below 1: give for example 0.95")
    ratios = np.sort(measured / predicted)
    return max(1.0, float(ratios[min(len(ratios), _place(len(ratios), quantile)) - 1]))


def _place(count: int, quantile: float) -> int:
    """ceil((n+1) p), without the rounding of the product."""
    return math.ceil((count + 1) * quantile - 1e-9)


def folds_of(n: Array) -> Folds:
    """Group of each point: its depth if there are at least four and none holds half of the points, else in turn."""
    depths, counts = np.unique(n, return_counts=True)
    if len(depths) >= 4 and 2 * counts.max() <= len(n):
        return n
    return np.arange(len(n), dtype=np.float64) % NUM_FOLDS


def cross_fitted(folds: Folds, model: Callable[[NDArray[np.bool_]], Array]) -> Array:
    """Prediction of every point by a model fitted without its fold; `model(keep)` predicts all points."""
    predicted = np.empty(len(folds))
    for fold in np.unique(folds):
        out = folds == fold
        predicted[out] = model(~out)[out]
    return predicted


def cross_margin(measured: Array, predicted: Array, folds: Folds, quantile: float) -> Array:
    """For every point the margin that the points of the other folds give."""
    margins = np.empty(len(folds))
    for fold in np.unique(folds):
        out = folds == fold
        margins[out] = margin(measured[~out], predicted[~out], quantile)
    return margins
