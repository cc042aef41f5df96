"""Personalised PageRank against the dense inverse, one-hop rows, and their merging into candidates."""

import numpy as np
import pytest
import scipy.sparse as sp

from megagraph.graph.heuristics import candidates, merge, one_hop, personalised_pagerank


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
        assert set(kept) == set(np.argsort(-exact_V)[:6])


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


def test_one_hop_is_a_hat_without_diagonal(make):
    graph = make.graph(30)
    expected = make.dense_normalised(graph.adjacency().toarray())
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(one_hop(graph).toarray(), expected, atol=1e-15)


def test_merge_normalises_each_heuristic_and_drops_the_centre():
    first = sp.csr_array(np.array([[9.0, 1.0, 3.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]))
    second = sp.csr_array(np.array([[0.0, 0.0, 5.0], [0.0, 7.0, 0.0], [1.0, 1.0, 0.0]]))
    pool = merge({"a": first, "b": second}, {"a": 1.0, "b": 3.0})
    assert pool.indptr.tolist() == [0, 2, 2, 4]
    assert pool.indices.tolist() == [1, 2, 0, 1]
    np.testing.assert_allclose(pool.values_HE, [[0.25, 0.75, 1.0, 0.0], [0.0, 1.0, 0.5, 0.5]])
    np.testing.assert_allclose(pool.weights_H, [0.25, 0.75])
    np.testing.assert_allclose(pool.mixture(), [0.0625, 0.9375, 0.625, 0.375])


def test_candidates_of_a_graph(make):
    graph = make.graph(60, seed=4)
    pool = candidates(graph, {"ppr": 1.0, "one_hop": 1.0}, restart=0.15, epsilon=1e-5, top_k=8)
    assert pool.names == ("ppr", "one_hop")
    rows = np.repeat(np.arange(60), np.diff(pool.indptr))
    assert (rows != pool.indices).all()
    assert np.bincount(rows[pool.values_HE[0] > 0]).max() == 8
    neighbour_pairs = set(zip(*graph.adjacency().nonzero(), strict=True))
    assert set(zip(rows[pool.values_HE[1] > 0], pool.indices[pool.values_HE[1] > 0], strict=True)) == neighbour_pairs
    connected = np.diff(graph.indptr) > 0
    sums_HV = np.stack([np.bincount(rows, values_E, minlength=60) for values_E in pool.values_HE])
    np.testing.assert_allclose(sums_HV[:, connected], 1.0, rtol=1e-6)
    assert (sums_HV[:, ~connected] == 0).all()


def test_only_the_heuristics_named_are_used(make):
    graph = make.graph(30)
    pool = candidates(graph, {"one_hop": 2.0}, restart=0.15, epsilon=1e-4, top_k=8)
    assert pool.names == ("one_hop",)
    np.testing.assert_array_equal(pool.indices, graph.indices)
    np.testing.assert_array_equal(pool.mixture(), pool.values_HE[0])
