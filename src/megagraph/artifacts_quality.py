"""How good a fitted cost model is, and how far off it may be: parts of `CostModel`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megagraph.config_data import Strict


class Quality(Strict):
    """How well a fitted model predicts: MAPE and signed bias in percent, R2, number of points, worst cell.

    Of memory also two rates in percent, at the margin that plans are made with: points whose peak exceeds the planned
    bytes, and wrong ones among the decisions "it fits" at limits as large as each measured peak.
    """

    mape_percent: float
    bias_percent: float
    r2: float
    num_points: int
    held_out: bool
    worst: str = ""
    worst_percent: float = 0.0
    exceeded_percent: float | None = None
    false_feasible_percent: float | None = None


class Interval(Strict):
    """Measured over predicted, by probability: of a new point like the fitted ones, a share of at most (`lower`) or at
    least (`upper`) that probability lies below. Probabilities that so few points cannot support are left out."""

    method: Literal["cross-fitted"] = "cross-fitted"
    num_points: int
    lower: dict[str, float]
    upper: dict[str, float]


class DepthReading(Strict):
    """One reading of the depth penalty, fitted: values, 90 % bootstrap intervals over cells, error of left-out depths.

    `none` has l_break 0 and gamma 1.
    """

    l_break: float
    gamma: float
    l_break_interval: tuple[float, float]
    gamma_interval: tuple[float, float]
    left_out_mape_percent: float = Field(description="each depth predicted by a fit to the others")
    resamples: int
