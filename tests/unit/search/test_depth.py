import itertools

import numpy as np
import pytest

from megagraph.search.depth import Depth, fit_depth, linear_fit, predict

DEPTHS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 24, 32)


def data(depth, noise, seed, depths=DEPTHS):
    rng = np.random.default_rng(seed)
    cells = list(itertools.product(depths, (1.0, 2.0, 4.0, 8.0), (1.0, 3.0)))
    n = np.array([cell[0] for cell in cells], dtype=float)
    x_layer = np.array([[1.0, cell[1], cell[1] * cell[2]] for cell in cells])
    x_rest = np.array([[1.0, cell[1]] for cell in cells])
    y = depth.effective(n) * (x_layer @ [1.0, 2.0, 0.5]) + x_rest @ [3.0, 0.7]
    return x_layer, x_rest, n, y * np.exp(noise * rng.standard_normal(len(y)))


def test_effective_depth_by_hand():
    assert Depth("hinge", 8, 1.5).effective([4, 8, 12]).tolist() == [4, 8, 14]
    assert Depth("jump", 8, 1.5).effective([4, 8, 12]).tolist() == [4, 8, 18]
    assert Depth().effective([4, 12]).tolist() == [4, 12]


@pytest.mark.parametrize("seed", range(3))
def test_hinge_is_recovered_under_noise(seed):
    found = fit_depth(*data(Depth("hinge", 8.0, 1.68), 0.02, seed))
    assert found.form == "hinge"
    assert found.l_break == pytest.approx(8, abs=1.5)
    assert found.gamma == pytest.approx(1.68, abs=0.12)
    assert found.low <= found.l_break <= found.high < 16


def test_jump_is_recovered_under_noise():
    found = fit_depth(*data(Depth("jump", 8.0, 1.4), 0.02, 0))
    assert (found.form, found.l_break) == ("jump", 8.0)
    assert found.gamma == pytest.approx(1.4, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_no_penalty_is_invented(seed):
    found = fit_depth(*data(Depth(), 0.03, seed))
    assert found.form == "none" or found.gamma < 1.05


def test_seed_grid_depths_suffice():
    found = fit_depth(*data(Depth("hinge", 8.0, 1.68), 0.02, 5, depths=(2, 4, 8, 16, 24, 32)))
    assert found.form == "hinge"
    assert found.l_break == pytest.approx(8, abs=2)
    assert found.gamma == pytest.approx(1.68, abs=0.15)


def test_three_depths_are_too_few_for_a_break():
    assert fit_depth(*data(Depth("hinge", 2.0, 3.0), 0.0, 0, depths=(1, 4, 8))) == Depth()


def test_coefficients_are_recovered_and_predict():
    depth = Depth("hinge", 8.0, 1.68)
    x_layer, x_rest, n, y = data(depth, 0.0, 0)
    coefficients = linear_fit(x_layer, x_rest, n, y, depth)
    np.testing.assert_allclose(coefficients, [1.0, 2.0, 0.5, 3.0, 0.7], rtol=1e-6)
    np.testing.assert_allclose(predict(coefficients, x_layer, x_rest, n, depth), y, rtol=1e-9)


def test_stored_form_reads_back():
    depth = Depth("jump", 8.0, 1.4, 7.0, 9.0)
    assert Depth.read(depth.stored()) == depth
