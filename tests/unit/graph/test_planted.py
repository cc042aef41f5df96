"""The planted partition: a pure function of its config with the asked degrees, communities and features."""

from __future__ import annotations

import numpy as np
import pytest

from megagraph.config import PlantedConfig, UserError
from megagraph.graph import planted as module
from megagraph.graph.assemble import row_of_edge
from megagraph.graph.planted import planted


def config(**changes):
    values = {"nodes": 4000, "communities": 5, "average_degree": 12.0, "features": 8, "seed": 3}
    return PlantedConfig(source="planted", **(values | changes))


def homophily(graph):
    return np.mean(graph.labels_V[row_of_edge(graph)] == graph.labels_V[graph.indices])


def test_deterministic_and_dependent_on_the_seed():
    first, second, other = planted("p", config()), planted("p", config()), planted("p", config(seed=4))
    for name in ("indptr", "indices", "features_VF", "labels_V"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


def test_simple_undirected_canonical():
    graph = planted("p", config())
    adjacency = graph.adjacency()
    assert adjacency.has_canonical_format
    assert (adjacency != adjacency.T).nnz == 0
    assert np.count_nonzero(adjacency.diagonal()) == 0
    assert (graph.indptr.dtype, graph.indices.dtype) == (np.int64, np.int32)
    assert (graph.features_VF.dtype, graph.labels_V.dtype) == (np.float32, np.int64)


def test_communities_are_equal_and_shuffled():
    graph = planted("p", config(nodes=4002))
    counts = np.bincount(graph.labels_V)
    assert graph.num_classes == len(counts) == 5
    assert np.ptp(counts) == 1
    assert np.any(np.diff(graph.labels_V) < 0)


@pytest.mark.parametrize("exponent", [1.01, 2.5, 6.0])
def test_mean_degree(exponent):
    graph = planted("p", config(degree_exponent=exponent))
    assert 0.85 * 12 < graph.num_edges / graph.num_nodes <= 12.1


def test_smaller_exponent_has_the_heavier_tail():
    heavy = np.diff(planted("p", config(degree_exponent=2.2)).indptr)
    light = np.diff(planted("p", config(degree_exponent=8.0)).indptr)
    assert heavy.max() > 3 * light.max()
    assert np.median(heavy) < 0.7 * heavy.mean()
    assert heavy.max() <= 1.5 * np.sqrt(12 * 4000)


@pytest.mark.parametrize("wanted", [0.0, 0.3, 0.75, 1.0])
def test_homophily(wanted):
    assert homophily(planted("p", config(homophily=wanted))) == pytest.approx(wanted, abs=0.02)


def test_edges_outside_reach_every_other_community():
    graph = planted("p", config(homophily=0.0))
    between = np.zeros((5, 5))
    np.add.at(between, (graph.labels_V[row_of_edge(graph)], graph.labels_V[graph.indices]), 1)
    off_diagonal = between[~np.eye(5, dtype=bool)]
    assert np.all(np.diag(between) == 0)
    assert off_diagonal.min() > 0.6 * off_diagonal.max()


def test_one_community_and_no_edges():
    assert homophily(planted("p", config(communities=1, homophily=0.0))) == 1.0
    assert planted("p", config(nodes=2, communities=1, average_degree=1e-9)).num_edges == 0


def test_features_are_community_means_plus_noise():
    exact = planted("p", config(feature_noise=0.0))
    for community in range(5):
        rows = exact.features_VF[exact.labels_V == community]
        np.testing.assert_array_equal(rows, np.broadcast_to(rows[0], rows.shape))
        assert np.linalg.norm(rows[0]) == pytest.approx(1.0, abs=1e-6)
    noisy = planted("p", config(feature_noise=0.5))
    noise = noisy.features_VF - exact.features_VF
    assert noise.std() == pytest.approx(0.5, rel=0.02)
    assert abs(noise.mean()) < 0.02


def test_block_size_changes_only_speed_of_features(monkeypatch):
    whole = planted("p", config())
    monkeypatch.setattr(module, "BLOCK", 17)
    blocks = planted("p", config())
    np.testing.assert_array_equal(whole.features_VF, blocks.features_VF)
    assert homophily(blocks) == pytest.approx(0.75, abs=0.03)
    assert blocks.num_edges == pytest.approx(whole.num_edges, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"communities": 5000}, "communities=5000"),
        ({"average_degree": 1000.0, "communities": 10}, "average_degree=1000.0 with homophily=0.75"),
        ({"average_degree": 4000.0, "communities": 1}, "average_degree=4000.0"),
        ({"nodes": 2**31}, "nodes=2147483648"),
    ],
)
def test_impossible_graphs_are_refused(changes, words):
    with pytest.raises(UserError) as caught:
        planted("p", config(**changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
