"""Personalised PageRank against the dense inverse, one-hop rows, and their merging into candidates."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

from megagraph.config import SamplingConfig
from megagraph.graph import heuristics
from megagraph.graph.candidates import HeuristicSource, merge
from megagraph.graph.heuristics import Nearest, OneHop, PageRank, TwoHop
from megagraph.graph.pagerank import personalised_pagerank


def dense_rows(heuristic, centres, num_nodes):
    starts, columns, values = heuristic.rows(np.asarray(centres))
    return sp.csr_array((values, columns, starts), shape=(len(centres), num_nodes)).toarray()


def rows_of(matrix):
    csr = sp.csr_array(matrix)
    return csr.indptr.astype(np.int64), csr.indices.astype(np.int32), csr.data.astype(np.float64)


def dense_pagerank(make, graph, restart):
    a_hat = make.dense_normalised(graph.adjacency().toarray())
    return restart * np.linalg.inv(np.eye(graph.num_nodes) - (1 - restart) * a_hat)


@pytest.mark.parametrize("epsilon", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize("restart", [0.15, 0.5])
def test_pagerank_is_below_the_inverse_by_at_most_the_bound(make, restart, epsilon):
    graph = make.graph(80, seed=1)
    exact = dense_pagerank(make, graph, restart)
    rows = personalised_pagerank(graph, np.arange(80), restart=restart, epsilon=epsilon, top_k=80).toarray()
    missing = exact - rows
    assert missing.min() > -1e-14
    assert (missing <= epsilon * np.sqrt(np.diff(graph.indptr) + 1.0) + 1e-14).all()


def test_coarse_epsilon_leaves_work_undone(make):
    graph = make.graph(80, seed=1)
    exact = dense_pagerank(make, graph, 0.15)
    rows = personalised_pagerank(graph, np.arange(80), restart=0.15, epsilon=1e-2, top_k=80)
    assert rows.nnz < np.count_nonzero(exact > 1e-12)


def test_self_loop_in_the_graph_counts_twice_in_a_plus_i(make):
    adjacency = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 0]], np.float32)
    graph = make.graph_of(adjacency)
    rows = personalised_pagerank(graph, np.arange(3), restart=0.15, epsilon=1e-9, top_k=3).toarray()
    np.testing.assert_allclose(rows, dense_pagerank(make, graph, 0.15), atol=1e-8)


def test_top_k_keeps_the_largest(make):
    graph = make.graph(80, seed=2)
    targets = np.array([5, 0, 30])
    exact = dense_pagerank(make, graph, 0.15)[targets]
    rows = personalised_pagerank(graph, targets, restart=0.15, epsilon=1e-10, top_k=6)
    assert rows.shape == (3, 80)
    assert np.diff(rows.indptr).tolist() == [6, 6, 6]
    for row, exact_V in enumerate(exact):
        kept = rows.indices[rows.indptr[row] : rows.indptr[row + 1]]
        # By value: which of two equal entries is kept is a matter of the last bit.
        np.testing.assert_allclose(np.sort(exact_V[kept]), np.sort(exact_V)[-6:], atol=1e-8)


def test_rows_do_not_depend_on_the_other_targets(make):
    graph = make.graph(80, seed=3)
    every = personalised_pagerank(graph, np.arange(80), restart=0.15, epsilon=1e-3, top_k=20).toarray()
    some = personalised_pagerank(graph, np.array([70, 2]), restart=0.15, epsilon=1e-3, top_k=20).toarray()
    np.testing.assert_array_equal(some, every[[70, 2]])


def test_isolated_node_reaches_itself_only(make):
    graph = make.graph(20, isolated=1)
    row = personalised_pagerank(graph, np.array([19]), restart=0.15, epsilon=1e-4, top_k=20)
    assert row.indices.tolist() == [19]
    np.testing.assert_allclose(row.data, 1.0)


def test_pagerank_of_a_hub_outgrows_the_first_work_arrays(make):
    adjacency_VV = np.zeros((3000, 3000), np.float32)
    adjacency_VV[0, 1:] = adjacency_VV[1:, 0] = 1
    graph = make.graph_of(adjacency_VV)
    rows = personalised_pagerank(graph, np.array([0, 7, 0]), restart=0.15, epsilon=1e-6, top_k=3000).toarray()
    exact = dense_pagerank(make, graph, 0.15)[[0, 7, 0]]
    assert ((exact - rows) <= 1e-6 * np.sqrt(np.diff(graph.indptr) + 1.0) + 1e-14).all()
    np.testing.assert_array_equal(rows[0], rows[2])


def test_one_hop_is_a_hat_without_diagonal(make):
    graph = make.graph(30)
    expected = make.dense_normalised(graph.adjacency().toarray())
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(dense_rows(OneHop(graph), [3, 0, 29], 30), expected[[3, 0, 29]], atol=1e-15)


def test_two_hop_is_the_square_without_diagonal(make):
    graph = make.graph(60, seed=3)
    expected = np.linalg.matrix_power(make.dense_normalised(graph.adjacency().toarray()), 2)
    np.fill_diagonal(expected, 0)
    centres = [*range(60), 5]
    np.testing.assert_allclose(dense_rows(TwoHop(graph), centres, 60), expected[centres], atol=1e-15)


def test_a_loop_in_the_graph_counts_in_one_hop_and_two_hop(make):
    graph = make.graph_of(np.array([[1, 1, 0], [1, 0, 1], [0, 1, 0]], np.float32))
    a_hat = make.dense_normalised(graph.adjacency().toarray())
    for heuristic, expected in ((OneHop(graph), a_hat.copy()), (TwoHop(graph), a_hat @ a_hat)):
        np.fill_diagonal(expected, 0)
        np.testing.assert_allclose(dense_rows(heuristic, range(3), 3), expected, atol=1e-15)


@pytest.mark.parametrize("block", [1 << 14, 64])
@pytest.mark.parametrize("top_k", [3, 100])
def test_knn_rows_are_the_largest_positive_cosines(make, monkeypatch, block, top_k):
    monkeypatch.setattr("megagraph.graph.nearest.BLOCK", block)
    rng = np.random.default_rng(0)
    features_VF = rng.standard_normal((150, 5)).astype(np.float32)
    features_VF[7] = 0
    graph = replace(make.graph(150), features_VF=features_VF)
    unit_VF = features_VF / np.maximum(np.linalg.norm(features_VF, axis=1), 1e-9)[:, None]
    expected = unit_VF.astype(np.float64) @ unit_VF.T
    np.fill_diagonal(expected, 0)
    expected[expected <= 0] = 0
    limit_V = np.sort(expected, axis=1)[:, -top_k]
    expected[expected < limit_V[:, None]] = 0
    centres = rng.permutation(150)[:100]
    np.testing.assert_allclose(dense_rows(Nearest(graph, top_k), centres, 150), expected[centres], atol=1e-6)


def test_a_knn_row_does_not_depend_on_its_company(make):
    features_VF = np.random.default_rng(1).standard_normal((300, 37)).astype(np.float32)
    graph = replace(make.graph(300), features_VF=features_VF)
    whole = dense_rows(Nearest(graph, 9), range(300), 300)
    for centre in (0, 77, 299):
        np.testing.assert_array_equal(dense_rows(Nearest(graph, 9), [centre], 300)[0], whole[centre])


def test_cached_rows_equal_computed_ones_and_memory_stays_bounded(make, monkeypatch):
    graph = make.graph(80, seed=1)
    options = {"restart": 0.15, "epsilon": 1e-5, "top_k": 8}
    fresh = dense_rows(PageRank(graph, **options), range(80), 80)
    monkeypatch.setattr(heuristics, "CACHE_BYTES", 10 * (8 * 9 + 12))
    small = PageRank(graph, **options)
    pushed = []
    push = small._push
    small._push = lambda centres_T, *rest: (pushed.append(len(centres_T)), push(centres_T, *rest))
    for centres in ([3, 4], [4, 3, 5], range(20), range(80), [70, 79, 2], [79, 70]):
        np.testing.assert_array_equal(dense_rows(small, list(centres), 80), fresh[list(centres)])
    assert pushed == [2, 1, 17, 80 - 10, 1, 1]
    assert len(small._cache._owner) == 10 and (small._cache._place_V >= 0).sum() == 10


def test_merge_normalises_each_heuristic_and_drops_the_centre():
    first = rows_of([[9.0, 1.0, 3.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    second = rows_of([[0.0, 0.0, 5.0], [0.0, 7.0, 0.0], [1.0, 1.0, 0.0]])
    pool = merge([first, second], np.arange(3))
    assert pool.indptr.tolist() == [0, 2, 2, 4]
    assert pool.indices.tolist() == [1, 2, 0, 1]
    np.testing.assert_allclose(pool.values_HE, [[0.25, 0.75, 1.0, 0.0], [0.0, 1.0, 0.5, 0.5]])
    np.testing.assert_allclose(pool.mixture(np.array([0.25, 0.75])), [0.0625, 0.9375, 0.625, 0.375])


def test_candidates_of_a_graph(make):
    graph = make.graph(60, seed=4)
    source = HeuristicSource.from_config(graph, SamplingConfig(num_sampled=0, ppr_epsilon=1e-5))
    assert source.names == ("ppr", "one_hop")
    centres = np.array([5, 0, 59, 17])
    pool = source.of(centres)
    rows = np.repeat(centres, np.diff(pool.indptr))
    assert (rows != pool.indices).all()
    assert len(set(zip(rows, pool.indices, strict=True))) == len(rows)
    near = pool.values_HE[1] > 0
    expected = {(row, other) for row, other in zip(*graph.adjacency().nonzero(), strict=True) if row in centres}
    assert set(zip(rows[near], pool.indices[near], strict=True)) == expected
    sums_HT = np.add.reduceat(pool.values_HE, pool.indptr[[0, 1, 3]], axis=1)
    np.testing.assert_allclose(sums_HT, 1.0, rtol=1e-6)
    assert pool.indptr[2] == pool.indptr[3], "an isolated node has no candidates"


@pytest.mark.parametrize("name", ["ppr", "one_hop", "two_hop", "knn"])
def test_only_the_heuristic_named_is_used(make, name):
    graph = make.graph(30)
    source = HeuristicSource.from_config(graph, SamplingConfig(heuristics={name: 2.0}))
    assert source.names == (name,)
    pool = source.of(np.arange(30))
    assert pool.values_HE.shape[0] == 1 and len(pool.indices) > 0


@pytest.mark.mirror
def test_pagerank_of_cora_equals_the_dense_inverse_within_the_bound(make, cora):
    exact = dense_pagerank(make, cora, 0.15)
    epsilon = SamplingConfig().ppr_epsilon
    rows = personalised_pagerank(cora, np.arange(2708), restart=0.15, epsilon=epsilon, top_k=2708).toarray()
    missing = exact - rows
    assert missing.min() > -1e-12
    assert (missing <= epsilon * np.sqrt(np.diff(cora.indptr) + 1.0) + 1e-12).all()
