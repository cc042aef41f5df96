"""Normalised adjacencies and the stores of their powers, against dense matrix powers in float64."""

import numpy as np
import pytest
import scipy.sparse as sp

from megagraph.config import UserError
from megagraph.graph.powers import DensePowers, SparsePowers, _bound_nonzeros
from megagraph.graph.structure import (
    coarse_powers,
    fine_powers,
    normalised_adjacency,
    normalised_coarse_adjacency,
)

TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}


def filled(powers, tokens_BN, num_powers, dtype, first=0, count=None):
    count = tokens_BN.shape[1] if count is None else count
    out = np.full((len(tokens_BN), num_powers, count + 2, tokens_BN.shape[1] + 3), 7.0, dtype)
    powers.fill(out, tokens_BN, first, count, 1, 2)
    inside = out[:, :, 1 : 1 + count, 2 : 2 + tokens_BN.shape[1]].copy()
    out[:, :, 1 : 1 + count, 2 : 2 + tokens_BN.shape[1]] = 7.0
    assert (out == 7.0).all(), "wrote outside its block"
    return inside


def expected(matrix, tokens_BN, num_powers):
    powers = [np.linalg.matrix_power(matrix, m + 1) for m in range(num_powers)]
    return np.stack([[power[np.ix_(row, row)] for power in powers] for row in tokens_BN])


def tokens_of(num_nodes, shape=(5, 9), seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(num_nodes)[: shape[1]] for _ in range(shape[0])])


def test_matrices_match_their_dense_definitions(make):
    graph = make.graph(50)
    coarsening = make.coarsening(graph, 7)
    a_hat, b_1 = normalised_adjacency(graph), normalised_coarse_adjacency(coarsening)
    np.testing.assert_allclose(a_hat.toarray(), make.dense_normalised(graph.adjacency().toarray()), atol=1e-15)
    np.testing.assert_allclose(b_1.toarray(), make.dense_normalised(coarsening.adjacency().toarray()), atol=1e-15)
    assert a_hat.has_sorted_indices and b_1.has_sorted_indices
    assert a_hat.nnz == graph.num_edges + graph.num_nodes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_powers", [1, 2, 3, 4, 5, 6])
def test_sparse_powers_are_exact(make, num_powers, dtype):
    graph = make.graph(50, seed=num_powers)
    tokens_BN = tokens_of(50)
    got = filled(fine_powers(graph, "global", num_powers, dtype), tokens_BN, num_powers, dtype)
    matrix = make.dense_normalised(graph.adjacency().toarray())
    np.testing.assert_allclose(got, expected(matrix, tokens_BN, num_powers), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_induced_powers_stay_inside_the_sequence(make, dtype):
    graph = make.graph(50)
    matrix = make.dense_normalised(graph.adjacency().toarray())
    tokens_BN = tokens_of(50, (12, 9))
    tokens_BN[0, :2] = [0, 48]  # the hub, whose row is searched, and a node without edges
    got = filled(fine_powers(graph, "induced", 4, dtype), tokens_BN, 4, dtype)
    want = np.stack([expected(matrix[np.ix_(row, row)], np.arange(9)[None], 4)[0] for row in tokens_BN])
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype])
    assert np.abs(got - expected(matrix, tokens_BN, 4)).max() > 1e-3


def test_induced_powers_search_a_row_much_longer_than_the_sequence(make):
    adjacency_VV = np.zeros((400, 400), np.float32)
    adjacency_VV[7, :] = adjacency_VV[:, 7] = 1
    adjacency_VV[350, 351] = adjacency_VV[351, 350] = 1
    matrix = make.dense_normalised(adjacency_VV)
    tokens_BN = np.array([[7, 350, 351], [399, 7, 0], [3, 5, 7]])
    got = filled(fine_powers(make.graph_of(adjacency_VV), "induced", 3, np.float64), tokens_BN, 3, np.float64)
    want = np.stack([expected(matrix[np.ix_(row, row)], np.arange(3)[None], 3)[0] for row in tokens_BN])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("max_dense", [0, 100])
def test_coarse_powers_dense_and_sparse(make, dtype, max_dense):
    graph = make.graph(60, average_degree=2.0)
    coarsening = make.coarsening(graph, 20)
    powers = coarse_powers(coarsening, "global", 4, dtype, max_dense=max_dense)
    assert isinstance(powers, DensePowers if max_dense else SparsePowers)
    tokens_BN = np.random.default_rng(0).integers(20, size=(4, 11))
    matrix = make.dense_normalised(coarsening.adjacency().toarray())
    got = filled(powers, tokens_BN, 4, dtype)
    np.testing.assert_allclose(got, expected(matrix, tokens_BN, 4), rtol=0, atol=TOLERANCE[dtype])


def test_induced_coarse_powers_are_of_the_distinct_super_nodes_of_a_sequence(make):
    graph = make.graph(60, average_degree=2.0)
    coarsening = make.coarsening(graph, 20)
    powers = coarse_powers(coarsening, "induced", 4, np.float64, max_dense=0)
    tokens_BN = np.random.default_rng(0).integers(20, size=(6, 11))
    matrix = make.dense_normalised(coarsening.adjacency().toarray())
    want = []
    for row in tokens_BN:
        distinct, place = np.unique(row, return_inverse=True)
        want.append(expected(matrix[np.ix_(distinct, distinct)], place[None], 4)[0])
    np.testing.assert_allclose(filled(powers, tokens_BN, 4, np.float64), np.stack(want), rtol=0, atol=1e-7)


def test_a_loop_in_the_graph_counts_in_induced_powers(make):
    graph = make.graph_of(np.array([[1, 1, 0], [1, 0, 1], [0, 1, 0]], np.float32))
    tokens_BN = np.array([[0, 1, 2], [2, 0, 1]])
    matrix = make.dense_normalised(graph.adjacency().toarray())
    got = filled(fine_powers(graph, "induced", 3, np.float64), tokens_BN, 3, np.float64)
    np.testing.assert_allclose(got, expected(matrix, tokens_BN, 3), rtol=0, atol=1e-15)


@pytest.mark.parametrize("store", ["global", "induced", "dense"])
@pytest.mark.parametrize(("first", "count"), [(0, 3), (2, 5), (7, 2), (4, 0)])
def test_some_rows_are_a_slice_of_all(make, store, first, count):
    graph = make.graph(50)
    matrix = normalised_adjacency(graph)
    powers = DensePowers(matrix, 4, np.float64) if store == "dense" else fine_powers(graph, store, 4, np.float64)
    tokens_BN = tokens_of(50)
    whole = filled(powers, tokens_BN, 4, np.float64)
    part = filled(powers, tokens_BN, 4, np.float64, first, count)
    if store == "induced":
        np.testing.assert_allclose(part, whole[:, :, first : first + count], rtol=0, atol=1e-15)
    else:
        np.testing.assert_array_equal(part, whole[:, :, first : first + count])


@pytest.mark.parametrize("store", ["global", "induced", "dense"])
def test_padding_is_left_alone(make, store):
    graph = make.graph(50)
    matrix = normalised_adjacency(graph)
    powers = DensePowers(matrix, 2, np.float64) if store == "dense" else fine_powers(graph, store, 2, np.float64)
    tokens_BN = tokens_of(50)
    tokens_BN[1] = -1
    out = np.zeros((5, 2, 9, 9))
    powers.fill(out, tokens_BN, 0, 9, 0, 0)
    assert (out[1] == 0).all() and (out[[0, 2, 3, 4]].sum((1, 2, 3)) > 0).all()


def test_too_many_nonzeros_are_refused_before_any_product(make, monkeypatch):
    graph = make.graph(50)
    matrix = normalised_adjacency(graph)
    exact = matrix.nnz + (matrix @ matrix).nnz
    fine_powers(graph, "global", 4, np.float32, max_nonzeros=exact)
    monkeypatch.setattr(sp.csr_array, "__matmul__", lambda *_: pytest.fail("multiplied before the check"))
    with pytest.raises(UserError, match=r"bias_channels=4 .* 50 vertices .* set sampling\.powers: induced"):
        fine_powers(graph, "global", 4, np.float32, max_nonzeros=exact - 1)
    fine_powers(graph, "global", 2, np.float32, max_nonzeros=matrix.nnz)
    fine_powers(graph, "induced", 4, np.float32, max_nonzeros=1)


@pytest.mark.parametrize("num_powers", [1, 2, 3])
def test_the_cheap_bound_is_never_below_the_number_of_nonzeros(make, num_powers):
    matrix = normalised_adjacency(make.graph(50))
    exact = sum((matrix**m).nnz for m in range(1, num_powers + 1))
    bound = _bound_nonzeros(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), num_powers)
    assert exact <= bound <= num_powers * 50 * 50
    assert bound == exact or num_powers > 1


@pytest.mark.parametrize("density", [0.01, 0.6])
def test_dense_powers_of_sparse_and_full_matrices(density):
    matrix = sp.random_array((60, 60), density=density, rng=np.random.default_rng(0), format="csr")
    out = np.zeros((1, 3, 60, 60))
    DensePowers(matrix, 3, np.float64).fill(out, np.arange(60)[None], 0, 60, 0, 0)
    truth = [np.linalg.matrix_power(matrix.toarray(), m) for m in (1, 2, 3)]
    np.testing.assert_allclose(out[0], truth, rtol=1e-12)
