"""How the time of a stage grows with its number of layers: a break point and a penalty (paper, l_break and gamma).

Two readings of "beyond l_break layers are gamma times as slow": a hinge (only the layers beyond it) and a jump (every
layer of a deeper stage). Both are fitted, and the one that predicts left-out depths best is kept, or none of them.

Legend: n layers; rows are grid cells; x_layer [R, k] and x_rest [R, r] regressors of one layer and of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar, nnls

from megagraph.artifacts_quality import DepthReading

Array = NDArray[np.float64]
Form = Literal["none", "hinge", "jump"]

FORMS: tuple[Form, ...] = ("none", "hinge", "jump")
MAX_GAMMA = 4.0
MIN_DEPTHS = 4
MIN_GAIN = 0.05
F_90 = 2.706
RESAMPLES = 50
SEED = 0


@dataclass(frozen=True)
class Depth:
    """A fitted penalty; `low`, `high` bound l_break at 90 % (equal to it where nothing was fitted)."""

    form: Form = "none"
    l_break: float = 0.0
    gamma: float = 1.0
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def read(cls, stored: dict[str, float]) -> Depth:
        """From `CostModel.depth`, where the form is its index in `FORMS`."""
        form = FORMS[int(stored["form"])]
        return cls(form, stored["l_break"], stored["gamma"], stored["l_break_low"], stored["l_break_high"])

    def stored(self) -> dict[str, float]:
        """For `CostModel.depth`."""
        form = float(FORMS.index(self.form))
        values = {"form": form, "l_break": self.l_break, "gamma": self.gamma}
        return {**values, "l_break_low": self.low, "l_break_high": self.high}

    def effective(self, layers: ArrayLike) -> Array:
        """g(n): how many shallow layers a stage of n layers costs."""
        n = np.asarray(layers, dtype=np.float64)
        return n + (self.gamma - 1.0) * _extra(self.form, self.l_break, n)


def _extra(form: Form, l_break: float, n: Array) -> Array:
    """The part of g(n) that gamma - 1 multiplies."""
    if form == "hinge":
        return np.maximum(0.0, n - l_break)
    return n * (n > l_break) if form == "jump" else np.zeros_like(n)


def linear_fit(x_layer: Array, x_rest: Array, n: Array, y: Array, depth: Depth) -> Array:
    """Non-negative coefficients [k + r] of g(n) x_layer + x_rest that minimise the relative error."""
    matrix = np.hstack([x_layer * depth.effective(n)[:, None], x_rest])
    return _scaled_nnls(matrix / y[:, None], np.ones(len(y)))[0]


def predict(coefficients: Array, x_layer: Array, x_rest: Array, n: Array, depth: Depth) -> Array:
    """Seconds [R] of the fitted law."""
    k = x_layer.shape[1]
    return np.asarray(depth.effective(n) * (x_layer @ coefficients[:k]) + x_rest @ coefficients[k:])


def fit_depth(x_layer: Array, x_rest: Array, n: Array, y: Array) -> Depth:
    """The penalty chosen by leave-one-depth-out error; none below `MIN_DEPTHS` depths or without a gain."""
    if len(np.unique(n)) < MIN_DEPTHS:
        return Depth()
    errors = {form: _left_out_error(form, x_layer, x_rest, n, y) for form in FORMS}
    return scan(_better(errors), x_layer, x_rest, n, y)


def _better(errors: dict[Form, float]) -> Form:
    """The form that predicts left-out depths best, if it gains `MIN_GAIN` on none."""
    form = min(FORMS, key=lambda name: errors[name])
    return form if errors[form] < (1 - MIN_GAIN) * errors["none"] else "none"


def read_depth(
    x_layer: Array, x_rest: Array, n: Array, y: Array, resamples: int = RESAMPLES
) -> tuple[Depth, dict[str, DepthReading]]:
    """`fit_depth`, and every form with its left-out error and 90 % bootstrap intervals of l_break and gamma.

    Cells are drawn with replacement within each depth, so that every depth stays; the law is fitted again to each draw.
    Below `MIN_DEPTHS` depths there are no readings.
    """
    if len(np.unique(n)) < MIN_DEPTHS:
        return Depth(), {}
    errors = {form: _left_out_error(form, x_layer, x_rest, n, y) for form in FORMS}
    fitted = {form: scan(form, x_layer, x_rest, n, y) for form in FORMS}
    rng = np.random.default_rng(SEED)
    draws = [_draw(n, rng) for _ in range(resamples)]
    readings: dict[str, DepthReading] = {}
    for form, depth in fitted.items():
        count = 0 if form == "none" else resamples
        again = [scan(form, x_layer[rows], x_rest[rows], n[rows], y[rows]) for rows in draws[:count]]
        readings[form] = DepthReading(
            l_break=depth.l_break,
            gamma=depth.gamma,
            l_break_interval=_interval([depth.l_break, *(one.l_break for one in again)]),
            gamma_interval=_interval([depth.gamma, *(one.gamma for one in again)]),
            left_out_mape_percent=100 * errors[form],
            resamples=count,
        )
    return fitted[_better(errors)], readings


def _draw(n: Array, rng: np.random.Generator) -> NDArray[np.int64]:
    """As many cells of every depth as there are, with replacement."""
    groups = [np.flatnonzero(n == depth) for depth in np.unique(n)]
    return np.concatenate([rng.choice(group, len(group)) for group in groups])


def _interval(values: list[float]) -> tuple[float, float]:
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(high)


def _left_out_error(form: Form, x_layer: Array, x_rest: Array, n: Array, y: Array) -> float:
    """Mean absolute relative error of each depth, predicted from the others."""
    errors = []
    for depth in np.unique(n):
        out = n == depth
        fitted = scan(form, x_layer[~out], x_rest[~out], n[~out], y[~out])
        coefficients = linear_fit(x_layer[~out], x_rest[~out], n[~out], y[~out], fitted)
        errors.append(np.abs(predict(coefficients, x_layer[out], x_rest[out], n[out], fitted) / y[out] - 1))
    return float(np.mean(np.concatenate(errors)))


def scan(form: Form, x_layer: Array, x_rest: Array, n: Array, y: Array) -> Depth:
    """The best penalty of a given form: l_break on a grid (whole layers, then halves beside the best), gamma by bounded
    minimisation for each, and the 90 % interval of l_break."""
    depths = np.unique(n)
    if form == "none" or len(depths) < 3:
        return Depth()
    # a hinge needs two depths beyond it; a jump is only known to lie between two measured depths
    breaks = depths[:-1] if form == "jump" else np.arange(depths[0], depths[-2] + 0.5)
    results = [(*_best_gamma(form, float(at), x_layer, x_rest, n, y), float(at)) for at in breaks]
    if form == "hinge":
        best = min(results)[2]
        beside = [at for at in (best - 0.5, best + 0.5) if depths[0] <= at <= depths[-2]]
        results += [(*_best_gamma(form, at, x_layer, x_rest, n, y), at) for at in beside]
    error, gamma, at = min(results)
    freedom = max(1, len(y) - x_layer.shape[1] - x_rest.shape[1] - 2)
    inside = [where for err, _, where in results if err <= error * (1 + F_90 / freedom) + 1e-18]
    return Depth(form, at, gamma, min(inside), max(inside))


def _best_gamma(form: Form, at: float, x_layer: Array, x_rest: Array, n: Array, y: Array) -> tuple[float, float]:
    """Squared relative error and gamma for a given break. One QR shrinks every trial to a handful of rows."""
    k = x_layer.shape[1]
    blocks = [x_layer * n[:, None], x_rest, x_layer * _extra(form, at, n)[:, None], y[:, None]]
    r = np.asarray(np.linalg.qr(np.hstack(blocks) / y[:, None], mode="r"), dtype=np.float64)
    base, extra, target = r[:, : -k - 1], r[:, -k - 1 : -1], r[:, -1]

    def error(gamma: float) -> float:
        matrix = base.copy()
        matrix[:, :k] += (gamma - 1.0) * extra
        return _scaled_nnls(matrix, target)[1] ** 2

    found = minimize_scalar(error, bounds=(1.0, MAX_GAMMA), method="bounded", options={"xatol": 1e-3})
    return float(found.fun), float(found.x)


def _scaled_nnls(matrix: Array, target: Array) -> tuple[Array, float]:
    """NNLS with unit columns, whose scales here differ by many powers of ten; coefficients and residual norm."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution, residual = nnls(matrix / scale, target, maxiter=100 * matrix.shape[1])
    return np.asarray(solution / scale), float(residual)
