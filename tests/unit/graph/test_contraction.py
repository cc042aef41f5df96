"""Contraction: connected super nodes, the asked ratio, Loukas' cost, and a spectrum that is kept."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from megagraph.config import CoarseningConfig, PublicConfig
from megagraph.graph import contraction, spectral
from megagraph.graph.assemble import assemble
from megagraph.graph.coarsen import coarsen
from megagraph.graph.datasets import make_graph

METHODS = ["algebraic_jc", "variation_neighborhoods"]


def graph_of(dense, seed=0):
    dense = np.asarray(dense)
    features = np.random.default_rng(seed).standard_normal((len(dense), 3)).astype(np.float32)
    return assemble("toy", sp.csr_array(dense), features, np.zeros(len(dense), np.int64), 1)


def grid(side):
    path = sp.diags_array([np.ones(side - 1)], offsets=[1]).toarray()
    return graph_of(np.kron(path, np.eye(side)) + np.kron(np.eye(side), path))


def random_graph(num_nodes, density, seed):
    return graph_of(np.random.default_rng(seed).random((num_nodes, num_nodes)) < density, seed)


def laplacian(dense):
    return np.diag(dense.sum(1)) - dense


def normalised_eigenvalues(dense):
    """Ascending eigenvalues of I - D^(-1/2) W D^(-1/2) of a dense matrix without empty rows."""
    scale = 1 / np.sqrt(dense.sum(1))
    return np.linalg.eigvalsh(np.eye(len(dense)) - scale[:, None] * dense * scale)


@settings(max_examples=25, deadline=None)
@given(
    num_nodes=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    ratio=st.floats(0.01, 1.0),
    seed=st.integers(0, 5),
    method=st.sampled_from(METHODS),
)
def test_invariants_on_any_graph(num_nodes, density, ratio, seed, method):
    graph = random_graph(num_nodes, density, seed)
    coarse = coarsen(graph, CoarseningConfig(method=method, ratio=ratio, seed=seed))
    indicator = np.zeros((coarse.num_super, num_nodes))
    indicator[coarse.membership_V, np.arange(num_nodes)] = 1
    sizes = indicator.sum(1)
    assert sizes.min() >= 1
    root = np.diag(sizes**-0.5)
    dense = graph.adjacency().toarray()
    np.testing.assert_allclose(coarse.adjacency().toarray(), root @ indicator @ dense @ indicator.T @ root, rtol=1e-6)
    np.testing.assert_allclose(coarse.features_SF, indicator @ graph.features_VF / sizes[:, None], rtol=1e-5, atol=1e-6)
    assert coarse.num_super >= max(1, np.ceil(ratio * num_nodes - 1e-9)), "never fewer than asked for"
    num_components, component = connected_components(dense, directed=False)
    joint = [len(set(component[coarse.membership_V == number])) for number in range(coarse.num_super)]
    assert joint == [1] * coarse.num_super, "no super node joins two components"
    assert connected_components(coarse.adjacency(), directed=False)[0] == num_components


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.3, 0.7])
def test_ratio_is_met_on_a_grid(method, ratio):
    graph = grid(20)
    coarse = coarsen(graph, CoarseningConfig(method=method, ratio=ratio))
    assert coarse.num_super == round(ratio * 400)
    assert coarse.attributes["achieved_ratio"] == f"{ratio:.6g}"


def test_contraction_keeps_the_spectrum_better_than_random_matching():
    graph = grid(25)
    half = {method: coarsen(graph, CoarseningConfig(method=method, ratio=0.5)) for method in METHODS}
    order = np.random.default_rng(0).permutation(625)
    random = spectral.spectral_errors(graph, order % 313, 10).mean()
    for coarse in half.values():
        assert float(coarse.attributes["spectral_error_mean"]) < 0.4 < 0.1 * random


def test_stars_stall_instead_of_using_up_all_levels(monkeypatch):
    star = np.zeros((200, 200))
    star[0, 1:150] = 1
    calls = []
    whole = contraction._matching
    monkeypatch.setattr(contraction, "_matching", lambda *args: calls.append(0) or whole(*args))
    coarse = coarsen(graph_of(star), CoarseningConfig(method="algebraic_jc", ratio=0.1))
    assert (coarse.num_super, len(calls)) == (200, 1)
    wide = coarsen(graph_of(star), CoarseningConfig(method="variation_neighborhoods", ratio=0.25))
    assert wide.num_super == 52, "the centre with one leaf, the other leaves at once"


def test_matching_takes_near_pairs_and_leaves_first():
    graph = random_graph(60, 0.08, 1)
    weights = contraction._weights(graph)
    group = contraction._matching(weights, 60, 10, np.random.default_rng(0))
    assert np.bincount(group).max() == 2
    alone = [np.flatnonzero(group == number)[0] for number in np.flatnonzero(np.bincount(group) == 1)]
    assert weights.toarray()[np.ix_(alone, alone)].sum() == 0, "the matching is maximal"
    limited = contraction._matching(weights, 7, 10, np.random.default_rng(0))
    assert len(np.unique(limited)) == 53
    # Two triangles joined by a long path: smoothing leaves the largest differences on the path.
    path = np.zeros((12, 12))
    path[[0, 0, 1, 9, 9, 10], [1, 2, 2, 10, 11, 11]] = 1
    path[np.arange(2, 9), np.arange(3, 10)] = 1
    pairs = contraction._matching(contraction._weights(graph_of(path)), 2, 10, np.random.default_rng(0))
    merged = [set(np.flatnonzero(pairs == number)) for number in np.flatnonzero(np.bincount(pairs) == 2)]
    assert all(pair <= {0, 1, 2} or pair <= {9, 10, 11} for pair in merged)


def dense_cost(dense, nodes, basis):
    """Loukas' local variation cost by dense arithmetic."""
    inside = dense[np.ix_(nodes, nodes)]
    local = np.diag(2 * dense.sum(1)[nodes] - inside.sum(1)) - inside
    centred = basis[nodes] - basis[nodes].mean(0)
    return np.linalg.norm(centred.T @ local @ centred) / (len(nodes) - 1)


def test_local_variation_cost_equals_its_definition():
    graph = random_graph(30, 0.15, 3)
    weights = contraction._weights(graph)
    weights.data *= np.round(1 + weights.data * 0.5, 2)
    dense = weights.toarray()
    basis = np.random.default_rng(0).standard_normal((30, 4))
    indptr, indices = weights.indptr.astype(np.int64), weights.indices.astype(np.int64)
    scratch = np.zeros(30, bool)
    for nodes in ([0, 1], [3, 7, 9, 20], list(range(30))):
        members = np.array(nodes, np.int64)
        cost = contraction._cost(members, indptr, indices, weights.data, dense.sum(1), basis, scratch)
        assert cost == pytest.approx(dense_cost(dense, nodes, basis), rel=1e-10)
        assert not scratch.any()


def reference_neighbourhoods(dense, basis, to_remove):
    """The greedy choice of disjoint neighbourhoods with plain lists."""
    sets = [sorted({centre, *np.flatnonzero(dense[centre])}) for centre in range(len(dense))]
    family = [(dense_cost(dense, nodes, basis), nodes) for nodes in sets if len(nodes) > 1]
    taken, chosen = set(), []
    while family and to_remove > 0:
        family.sort(key=lambda item: item[0])
        _, nodes = family.pop(0)
        free = [node for node in nodes if node not in taken]
        if len(free) == len(nodes):
            if len(nodes) - 1 <= to_remove:
                taken |= set(nodes)
                chosen.append(set(nodes))
                to_remove -= len(nodes) - 1
        elif len(free) > 1:
            family.append((dense_cost(dense, free, basis), free))
    return chosen


@pytest.mark.parametrize("to_remove", [3, 12, 40])
def test_neighbourhoods_are_taken_by_increasing_cost(to_remove):
    graph = random_graph(50, 0.06, 4)
    weights = contraction._weights(graph)
    basis = np.random.default_rng(1).standard_normal((50, 5))
    indptr, indices = weights.indptr.astype(np.int64), weights.indices.astype(np.int64)
    degree = np.asarray(weights.sum(1))
    group = contraction._neighbourhoods(indptr, indices, weights.data, degree, basis, to_remove)
    mine = {frozenset(np.flatnonzero(group == number)) for number in set(group)}
    wanted = {frozenset(nodes) for nodes in reference_neighbourhoods(weights.toarray(), basis, to_remove)}
    assert {nodes for nodes in mine if len(nodes) > 1} == wanted


def test_basis_is_scaled_to_unit_energy():
    dense = grid(8).adjacency().toarray().astype(np.float64)
    matrix = sp.csr_array(laplacian(dense))
    basis = np.random.default_rng(0).standard_normal((64, 6))
    basis[:, 5] = 1.0
    scaled = contraction._scaled(matrix, basis)
    assert scaled.shape == (64, 5), "the constant vector has no energy"
    np.testing.assert_allclose(scaled.T @ matrix @ scaled, np.eye(5), atol=1e-10)


def test_first_eigenvectors_skip_the_constants_of_components(monkeypatch):
    side = grid(9).adjacency().toarray()
    dense = np.zeros((400, 400))
    for first in (0, 100, 200, 300):
        dense[first : first + 81, first : first + 81] = side
    matrix = sp.csr_array(laplacian(dense))
    truth = np.linalg.eigvalsh(matrix.toarray())
    truth = truth[truth > 1e-9][:6]
    vectors = spectral.first_eigenvectors(matrix, 6, seed=0)
    values = np.linalg.eigvalsh(vectors.T @ matrix @ vectors)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(6), atol=1e-6)
    np.testing.assert_allclose(values, truth, rtol=0.05)
    small = spectral.first_eigenvectors(sp.csr_array(laplacian(side.astype(float))), 6, seed=0)
    assert np.abs(small.sum(0)).max() < 1e-8


@pytest.mark.parametrize("dense_nodes", [10, 10_000])
def test_spectral_error_equals_dense_arithmetic(monkeypatch, dense_nodes):
    monkeypatch.setattr(spectral, "DENSE_NODES", dense_nodes)
    dense = random_graph(150, 0.03, 2).adjacency().toarray().astype(np.float64)
    dense = np.maximum(dense, dense.T)
    _, component = connected_components(dense, directed=False)
    nodes = np.flatnonzero(component == np.bincount(component).argmax())
    membership = np.arange(150) % 60
    indicator = np.eye(60)[:, membership[nodes]]
    inner = dense[np.ix_(nodes, nodes)]
    fine = normalised_eigenvalues(inner)[1:8]
    coarse = normalised_eigenvalues(indicator @ inner @ indicator.T)[1:8]
    errors = spectral.spectral_errors(graph_of(dense), membership, 7)
    np.testing.assert_allclose(errors, coarse / fine - 1, rtol=1e-4)
    assert errors.min() > 0


def test_spectral_error_of_the_same_graph_is_zero_and_of_one_super_node_absent():
    graph = grid(6)
    np.testing.assert_allclose(spectral.spectral_errors(graph, np.arange(36), 5), 0, atol=1e-9)
    assert len(spectral.spectral_errors(graph, np.zeros(36, int), 5)) == 0
    assert "spectral_values" not in coarsen(graph, CoarseningConfig(ratio=0.01)).attributes


@pytest.mark.mirror
@pytest.mark.parametrize(
    ("source", "method", "num_super"),
    [
        ("cora", "algebraic_jc", 271),
        ("cora", "variation_neighborhoods", 271),
        ("citeseer", "algebraic_jc", 448),
        ("citeseer", "variation_neighborhoods", 440),
    ],
)
def test_super_nodes_of_the_real_graphs(source, method, num_super, tmp_path):
    graph, _ = make_graph(source, PublicConfig(source=source), tmp_path, Path(os.environ["MEGAGRAPH_MIRROR"]))
    coarse = coarsen(graph, CoarseningConfig(method=method))
    assert coarse.num_super == num_super
    assert num_super >= connected_components(graph.adjacency(), directed=False)[0]
