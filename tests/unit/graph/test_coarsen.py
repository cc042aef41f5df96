"""Coarsening: a partition without empty parts, mean features, and A_c by its dense formula."""

from __future__ import annotations

from dataclasses import replace

import kaminpar
import numpy as np
import pymetis
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph.config import CoarseningConfig, PlantedConfig, UserError
from megagraph.graph import coarsen as coarsen_module
from megagraph.graph.assemble import assemble
from megagraph.graph.coarsen import METHODS, coarsen
from megagraph.graph.planted import planted
from megagraph.graph.store import load_coarsening, save_coarsening


def graph_of(dense, seed=0):
    dense = np.asarray(dense)
    features = np.random.default_rng(seed).standard_normal((len(dense), 3)).astype(np.float32)
    return assemble("toy", sp.csr_array(dense), features, np.zeros(len(dense), np.int64), 1)


def random_graph(num_nodes, density, seed):
    rng = np.random.default_rng(seed)
    return graph_of(rng.random((num_nodes, num_nodes)) < density, seed)


@pytest.fixture(scope="module")
def communities():
    return planted("p", PlantedConfig(source="planted", nodes=1500, communities=6, homophily=0.9, features=4))


def check(graph, coarse):
    """Every invariant that holds for any graph and ratio, in float64."""
    num_super = coarse.num_super
    indicator = np.zeros((num_super, graph.num_nodes))
    indicator[coarse.membership_V, np.arange(graph.num_nodes)] = 1
    sizes = indicator.sum(1)
    assert sizes.min() >= 1, "no super node is empty"
    root = np.diag(sizes**-0.5)
    dense = root @ indicator @ graph.adjacency().toarray().astype(np.float64) @ indicator.T @ root
    adjacency = coarse.adjacency()
    np.testing.assert_allclose(adjacency.toarray(), dense, rtol=1e-6)
    assert (adjacency != adjacency.T).nnz == 0
    assert adjacency.has_canonical_format
    assert np.all(coarse.weights > 0)
    means = indicator @ graph.features_VF.astype(np.float64) / sizes[:, None]
    np.testing.assert_allclose(coarse.features_SF, means, rtol=1e-5, atol=1e-6)
    assert (coarse.membership_V.dtype, coarse.indptr.dtype, coarse.indices.dtype) == (np.int64, np.int64, np.int32)
    assert (coarse.weights.dtype, coarse.features_SF.dtype) == (np.float32, np.float32)


@settings(max_examples=60, deadline=None)
@given(
    num_nodes=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    ratio=st.floats(0.01, 1.0),
    seed=st.integers(0, 5),
)
def test_invariants_on_any_graph(num_nodes, density, ratio, seed):
    graph = random_graph(num_nodes, density, seed)
    above = 0 if seed % 2 else 20_000_000
    coarse = coarsen(graph, CoarseningConfig(ratio=ratio, seed=seed, kaminpar_above=above))
    check(graph, coarse)
    wanted = max(1, round(ratio * num_nodes))
    # A partitioner may leave parts empty on a graph of a few nodes; it never makes more than asked for.
    assert 1 <= coarse.num_super <= wanted


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("kaminpar_above", [0, 20_000_000])
def test_ratio_is_met_and_invariants_hold(communities, ratio, kaminpar_above):
    coarse = coarsen(communities, CoarseningConfig(ratio=ratio, kaminpar_above=kaminpar_above))
    assert coarse.attributes["partitioner"] == ("metis" if kaminpar_above else "kaminpar")
    check(communities, coarse)
    assert coarse.num_super == round(ratio * 1500)
    assert float(coarse.attributes["achieved_ratio"]) == pytest.approx(ratio)
    sizes = np.bincount(coarse.membership_V)
    assert sizes.max() <= 2 / ratio, "parts are balanced"


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_labels_make_the_parts_asked_for_within_their_bound(communities, ratio):
    coarse = coarsen(communities, CoarseningConfig(method="label_propagation", ratio=ratio))
    check(communities, coarse)
    assert coarse.num_super == round(ratio * 1500)
    assert np.bincount(coarse.membership_V).max() <= np.ceil(1.25 / ratio)


@settings(max_examples=40, deadline=None)
@given(
    num_nodes=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    ratio=st.floats(0.01, 1.0),
    seed=st.integers(0, 5),
)
def test_labels_reach_every_node_of_any_graph(num_nodes, density, ratio, seed):
    graph = random_graph(num_nodes, density, seed)
    coarse = coarsen(graph, CoarseningConfig(method="label_propagation", ratio=ratio, seed=seed))
    check(graph, coarse)
    assert coarse.num_super == max(1, round(ratio * num_nodes))


def test_labels_follow_edges():
    """Twelve cliques of ten nodes in a row, nodes shuffled: most nodes end beside their clique."""
    order = np.random.default_rng(0).permutation(120)
    clique = order // 10
    dense = clique[:, None] == clique[None, :]
    ring = np.roll(np.eye(120, dtype=bool), 1, 0)[np.ix_(order, order)]
    coarse = coarsen(graph_of(dense | ring | ring.T), CoarseningConfig(method="label_propagation", ratio=0.1))
    random_parts = 1 - 1 / 12
    assert float(coarse.attributes["cut_fraction"]) < 0.6 * random_parts


def test_attributes(communities):
    coarse = coarsen(communities, CoarseningConfig(ratio=0.02, seed=5))
    dense = communities.adjacency().toarray()
    apart = coarse.membership_V[:, None] != coarse.membership_V[None, :]
    cut = dense[apart].sum() / dense.sum()
    assert float(coarse.attributes.pop("cut_fraction")) == pytest.approx(cut, rel=1e-5)
    assert 0 < float(coarse.attributes.pop("spectral_error_mean")) < float(coarse.attributes.pop("spectral_error_max"))
    assert coarse.attributes == {
        "method": "partition",
        "partitioner": "metis",
        "spectral_values": "10",
        "requested_ratio": "0.02",
        "achieved_ratio": "0.02",
        "seed": "5",
    }


def test_cut_is_far_below_that_of_random_parts(communities):
    coarse = coarsen(communities, CoarseningConfig(ratio=6 / 1500))
    assert float(coarse.attributes["cut_fraction"]) < 0.35 < 5 / 6


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"kaminpar_above": 0},
        {"kaminpar_above": 0, "ratio": 0.8},
        {"method": "label_propagation"},
        {"method": "algebraic_jc"},
        {"method": "variation_neighborhoods"},
    ],
)
def test_deterministic_and_dependent_on_the_seed(communities, keys):
    first, again, other = (coarsen(communities, CoarseningConfig(seed=seed, **keys)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.membership_V, again.membership_V)
    np.testing.assert_array_equal(first.weights, again.weights)
    assert not np.array_equal(first.membership_V, other.membership_V)


@pytest.mark.parametrize("method", METHODS)
def test_ratio_one_keeps_the_graph(communities, method):
    coarse = coarsen(communities, CoarseningConfig(method=method, ratio=1.0))
    np.testing.assert_array_equal(coarse.membership_V, np.arange(1500))
    np.testing.assert_array_equal(coarse.features_SF, communities.features_VF)
    assert (coarse.adjacency() != communities.adjacency()).nnz == 0


def test_one_super_node_holds_everything(communities):
    coarse = coarsen(communities, CoarseningConfig(ratio=1e-6))
    assert coarse.num_super == 1
    assert coarse.weights == pytest.approx([communities.num_edges / 1500])
    assert coarse.attributes["cut_fraction"] == "0"


def test_isolated_nodes_are_grouped_apart_from_the_joined_ones():
    ring = np.zeros((40, 40))
    ring[np.arange(20), (np.arange(20) + 1) % 20] = 1
    graph = graph_of(ring)
    coarse = coarsen(graph, CoarseningConfig(ratio=0.25))
    check(graph, coarse)
    assert coarse.num_super == 10
    assert not set(coarse.membership_V[:20]) & set(coarse.membership_V[20:])
    assert np.bincount(coarse.membership_V).tolist() == [4] * 10


def test_self_loops_weigh_but_do_not_reach_the_partitioner():
    graph = graph_of(np.diag([1.0] * 6) + np.diag([1.0] * 5, 1))
    coarse = coarsen(graph, CoarseningConfig(ratio=0.5))
    check(graph, coarse)
    assert graph.num_edges == len(graph.indices) == graph.indptr[-1] == 16, "the graph is left as it was"
    assert coarse.adjacency().diagonal() == pytest.approx([(2 + 2) / 2] * 3)
    assert float(coarse.attributes["cut_fraction"]) == pytest.approx(2 / 5)


def test_survives_its_file(communities, tmp_path):
    coarse = coarsen(communities, CoarseningConfig())
    save_coarsening(coarse, tmp_path / "c.safetensors")
    again = load_coarsening(tmp_path / "c.safetensors")
    np.testing.assert_array_equal(again.membership_V, coarse.membership_V)
    np.testing.assert_array_equal(again.weights, coarse.weights)
    assert again.attributes == coarse.attributes


def test_partitioner_that_gives_up_is_one_line(communities, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pymetis, "part_graph", fail)
    with pytest.raises(UserError, match=r"coarsening.ratio=0.1: METIS cannot make 150 parts .*out of memory.*lower"):
        coarsen(communities, CoarseningConfig())


def test_empty_graph_is_refused():
    with pytest.raises(UserError, match="no nodes"):
        coarsen(graph_of(np.zeros((0, 0))), CoarseningConfig())


def test_directed_graph_is_refused():
    graph = replace(graph_of(np.eye(3)), undirected=False)
    with pytest.raises(UserError, match=r"toy is directed.*set undirected: true"):
        coarsen(graph, CoarseningConfig())


def test_kaminpar_cuts_as_little_as_metis(communities):
    metis, other = (
        float(coarsen(communities, CoarseningConfig(ratio=6 / 1500, kaminpar_above=above)).attributes["cut_fraction"])
        for above in (20_000_000, 0)
    )
    assert other < 1.3 * metis < 5 / 6


def test_kaminpar_that_gives_up_is_one_line(communities, monkeypatch):
    def fail(*args):
        raise RuntimeError("cannot read")

    monkeypatch.setattr(kaminpar, "load_graph", fail)
    with pytest.raises(UserError, match=r"coarsening.ratio=0.1: KaMinPar cannot make 150 parts .*cannot read.*lower"):
        coarsen(communities, CoarseningConfig(kaminpar_above=0))


def test_blocks_do_not_show(communities, monkeypatch):
    whole = coarsen(communities, CoarseningConfig())
    monkeypatch.setattr(coarsen_module, "BLOCK_EDGES", 100)
    blocks = coarsen(communities, CoarseningConfig())
    for name in ("indptr", "indices", "weights", "features_SF"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(blocks, name))
