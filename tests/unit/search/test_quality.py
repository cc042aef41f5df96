"""Errors, conformal bounds and risks of plans, by hand and by simulation."""

import numpy as np
import pytest

from megagraph.search.quality import assess, cross_fitted, cross_margin, false_feasible, folds_of, interval, margin


def test_quality_by_hand():
    quality = assess(np.array([1.0, 2.0, 4.0]), np.array([1.1, 2.0, 3.2]), ["a", "b", "c"], held_out=True)
    assert quality.mape_percent == pytest.approx(10)
    assert quality.bias_percent == pytest.approx(-10 / 3)
    assert (quality.worst, quality.worst_percent) == ("c", pytest.approx(-20))
    assert quality.r2 == pytest.approx(1 - (0.01 + 0.64) / (16 / 9 + 1 / 9 + 25 / 9))
    assert quality.exceeded_percent is quality.false_feasible_percent is None


def test_risks_by_hand():
    measured, planned = np.array([1.0, 2.0, 4.0]), np.array([1.1, 1.5, 4.0])
    # limits 1, 2, 4: a fits at 2 and 4, b at 2 and 4 (truly), c at 4
    assert false_feasible(measured, planned) == 0
    # now c is planned with 2: it is called feasible at 2 and at 4, the first is wrong
    assert false_feasible(measured, np.array([1.1, 1.5, 2.0])) == pytest.approx(100 / 6)
    quality = assess(measured, planned / 1.1, ["a", "b", "c"], held_out=True, margin=1.1)
    assert quality.exceeded_percent == pytest.approx(100 / 3)
    assert quality.false_feasible_percent == 0


def test_bounds_are_order_statistics():
    found = interval(np.arange(1.0, 20.0), np.full(19, 10.0))
    assert found.upper == {"0.8": 1.6, "0.9": 1.8, "0.95": 1.9}
    assert found.lower == {"0.05": 0.1, "0.1": 0.2, "0.2": 0.4}
    assert margin(np.arange(1.0, 20.0), np.full(19, 10.0), 0.9) == 1.8
    assert margin(np.arange(1.0, 20.0), np.full(19, 10.0), 0.99) == 1.9
    assert margin(np.full(9, 5.0), np.full(9, 10.0), 0.9) == 1.0


@pytest.mark.parametrize("probability", ["0.8", "0.95"])
def test_the_share_below_the_bound_is_at_least_what_it_says(probability):
    rng = np.random.default_rng(0)
    below = [
        rng.lognormal(sigma=0.1) <= interval(rng.lognormal(sigma=0.1, size=39), np.ones(39)).upper[probability]
        for _ in range(4000)
    ]
    assert float(probability) - 0.015 <= np.mean(below) <= float(probability) + 0.04


def test_points_are_predicted_without_their_fold():
    y = np.array([1.0, 2.0, 30.0, 40.0, 500.0, 600.0, 7000.0, 8000.0])
    folds = folds_of(np.repeat([1.0, 2.0, 3.0, 4.0], 2))
    assert folds.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    predicted = cross_fitted(folds, lambda keep: np.full(len(y), y[keep].sum()))
    np.testing.assert_allclose(predicted, y.sum() - np.repeat([3.0, 70.0, 1100.0, 15000.0], 2))
    assert folds_of(np.array([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0])).tolist() == [0, 1, 2, 3, 4, 0, 1]
    margins = cross_margin(np.array([1.0, 1.0, 3.0, 2.0]), np.ones(4), np.array(["a", "a", "b", "b"]), 0.9)
    assert margins.tolist() == [3.0, 3.0, 1.0, 1.0]
