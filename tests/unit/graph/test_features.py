"""Feature normalisation: in place, in blocks, with zero rows and constant columns."""

from __future__ import annotations

import numpy as np
import pytest

from megagraph.graph import features as module
from megagraph.graph.features import normalise_features


@pytest.fixture(params=[3, 1 << 16], autouse=True)
def block_rows(request, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ROWS", request.param)


def matrix():
    values = np.random.default_rng(0).normal(5, 3, (50, 4)).astype(np.float32)
    values[7] = 0
    return values


def test_none_leaves_everything():
    values = matrix()
    normalise_features(values, "none")
    np.testing.assert_array_equal(values, matrix())


def test_row_makes_absolute_sums_one_and_keeps_zero_rows():
    values = matrix()
    normalise_features(values, "row")
    np.testing.assert_allclose(np.abs(values).sum(1), np.arange(50) != 7, rtol=1e-6)
    np.testing.assert_allclose(values[3], matrix()[3] / np.abs(matrix()[3]).sum(), rtol=1e-6)


def test_standard_equals_float64_and_zeroes_constant_columns():
    values = matrix()
    values[:, 2] = 0.1
    truth = values.astype(np.float64)
    normalise_features(values, "standard")
    kept = [0, 1, 3]
    np.testing.assert_allclose(values[:, kept], (truth - truth.mean(0))[:, kept] / truth.std(0)[kept], rtol=1e-4)
    np.testing.assert_array_equal(values[:, 2], 0)


def test_no_nodes():
    values = np.empty((0, 3), np.float32)
    normalise_features(values, "standard")
    assert values.shape == (0, 3)
