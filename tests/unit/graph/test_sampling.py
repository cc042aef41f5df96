"""Weighted draws without replacement: their law, their purity, and what fills a sequence when candidates run out."""

import numpy as np
import pytest

from megagraph.config import SamplingConfig
from megagraph.graph.candidates import Candidates, HeuristicSource
from megagraph.graph.sampling import Sampler, sequence_keys, splitmix64

HALF = np.array([0.5, 0.5])


def sampler_of(make, graph, coarsening, seed=0):
    return Sampler.of(HeuristicSource.from_config(graph, SamplingConfig(num_sampled=2)), coarsening, seed)


class OnePool:
    """The same candidates and weights whatever the centre."""

    names = ("given",)

    def __init__(self, weights_V):
        self._nodes = np.flatnonzero(weights_V).astype(np.int32)
        self._values = np.asarray(weights_V, np.float32)[self._nodes]

    def of(self, centres_T):
        count = len(centres_T)
        indptr = np.arange(count + 1) * len(self._nodes)
        return Candidates(indptr, np.tile(self._nodes, count), np.tile(self._values, count)[None])


@pytest.fixture(scope="module")
def sampler(make):
    graph = make.graph(60, seed=1)
    return sampler_of(make, graph, make.coarsening(graph, 8))


def test_splitmix64_matches_its_published_outputs():
    states = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert splitmix64(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_keys_differ_by_every_part():
    zero, one = np.array([0]), np.array([1])
    keys = [
        int(sequence_keys(*parts)[0])
        for parts in [
            (0, 0, 0, zero, zero),
            (1, 0, 0, zero, zero),
            (0, -1, 0, zero, zero),
            (0, 1, 0, zero, zero),
            (0, 0, 1, zero, zero),
            (0, 0, 0, one, zero),
            (0, 0, 0, zero, one),
        ]
    ]
    assert len(set(keys)) == len(keys)


def test_draws_follow_the_weights(make):
    weights_V = np.array([0.0, 0.4, 0.3, 0.2, 0.1, 0.0])
    graph = make.graph_of(np.zeros((6, 6)))
    sampler = Sampler.of(OnePool(weights_V), make.coarsening(graph, 2), seed=3)
    num_draws = 40_000
    pure = {"weights_H": np.ones(1), "stream": 0, "num_sampled": 2}
    tokens_BN = sampler.nodes(np.zeros(num_draws, np.int64), np.arange(num_draws), **pure)
    first_V = np.bincount(tokens_BN[:, 1], minlength=6) / num_draws
    np.testing.assert_allclose(first_V, weights_V, atol=0.01)
    second_V = np.bincount(tokens_BN[:, 2], minlength=6) / num_draws
    expected_V = [sum(weights_V[i] * weights_V[j] / (1 - weights_V[i]) for i in range(6) if i != j) for j in range(6)]
    np.testing.assert_allclose(second_V, expected_V, atol=0.01)


def test_sequences_are_distinct_start_with_the_centre_and_use_candidates_first(make, sampler):
    centres_B = np.arange(60)
    tokens_BN = sampler.nodes(centres_B, np.zeros(60, np.int64), weights_H=HALF, stream=0, num_sampled=10)
    np.testing.assert_array_equal(tokens_BN[:, 0], centres_B)
    pool = sampler.source.of(centres_B)
    for centre, tokens_N in enumerate(tokens_BN):
        assert len(set(tokens_N)) == 11
        own = set(pool.indices[pool.indptr[centre] : pool.indptr[centre + 1]])
        assert len(own & set(tokens_N)) == min(10, len(own))


def test_a_sequence_does_not_depend_on_its_batch(sampler):
    centres_B, samples_B = np.array([5, 7, 5, 59, 0]), np.array([0, 0, 1, 2, 0])
    whole = sampler.nodes(centres_B, samples_B, weights_H=HALF, stream=4, num_sampled=12)
    whole_super = sampler.super_nodes(centres_B, samples_B, stream=4, num_super=3)
    order = np.array([3, 1, 4, 2, 0])
    np.testing.assert_array_equal(
        sampler.nodes(centres_B[order], samples_B[order], weights_H=HALF, stream=4, num_sampled=12), whole[order]
    )
    for b in range(5):
        one = (centres_B[b : b + 1], samples_B[b : b + 1])
        np.testing.assert_array_equal(sampler.nodes(*one, weights_H=HALF, stream=4, num_sampled=12)[0], whole[b])
        np.testing.assert_array_equal(sampler.super_nodes(*one, stream=4, num_super=3)[0], whole_super[b])


def test_samples_streams_and_seeds_give_other_draws(make, sampler):
    centres_B, none_B = np.zeros(1, np.int64), np.zeros(1, np.int64)
    base = sampler.nodes(centres_B, none_B, weights_H=HALF, stream=0, num_sampled=10)
    other = sampler_of(make, make.graph(60, seed=1), make.coarsening(make.graph(60, seed=1), 8), seed=1)
    assert not np.array_equal(base, sampler.nodes(centres_B, none_B + 1, weights_H=HALF, stream=0, num_sampled=10))
    assert not np.array_equal(base, sampler.nodes(centres_B, none_B, weights_H=HALF, stream=-1, num_sampled=10))
    assert not np.array_equal(base, other.nodes(centres_B, none_B, weights_H=HALF, stream=0, num_sampled=10))


def test_short_of_candidates_the_super_node_fills_first(make):
    graph = make.graph_of(np.zeros((40, 40)))
    coarsening = make.coarsening(graph, 8)
    sampler = sampler_of(make, graph, coarsening)
    tokens_BN = sampler.nodes(np.arange(40), np.zeros(40, np.int64), weights_H=HALF, stream=0, num_sampled=9)
    for centre, tokens_N in enumerate(tokens_BN):
        members = set(np.flatnonzero(coarsening.membership_V == coarsening.membership_V[centre]))
        assert set(tokens_N[:5]) == members
        assert len(set(tokens_N)) == 10
    orders = {
        tuple(row[1:5])
        for row in sampler.nodes(np.zeros(20, int), np.arange(20), weights_H=HALF, stream=0, num_sampled=4)
    }
    assert len(orders) > 5


def test_whole_graph_in_one_sequence_and_more(make):
    graph = make.graph(12)
    sampler = sampler_of(make, graph, make.coarsening(graph, 3))
    tokens_BN = sampler.nodes(np.arange(12), np.zeros(12, np.int64), weights_H=HALF, stream=0, num_sampled=11)
    np.testing.assert_array_equal(np.sort(tokens_BN, axis=1), np.tile(np.arange(12), (12, 1)))
    longer_BN = sampler.nodes(np.arange(12), np.zeros(12, np.int64), weights_H=HALF, stream=0, num_sampled=15)
    assert all(set(row) == set(range(12)) for row in longer_BN)


def test_super_nodes_are_neighbours_of_the_centres_own(make, sampler):
    coarse = sampler.coarse.toarray()
    tokens_BN = sampler.super_nodes(np.arange(60), np.zeros(60, np.int64), stream=0, num_super=3)
    for centre, tokens_N in enumerate(tokens_BN):
        assert tokens_N[0] == sampler.membership_V[centre]
        assert len(set(tokens_N)) == 4
        neighbours = set(np.flatnonzero(coarse[tokens_N[0]])) - {tokens_N[0]}
        assert len(neighbours & set(tokens_N[1:])) == min(3, len(neighbours))


def test_super_nodes_follow_the_coarse_weights(make):
    graph = make.graph(60, average_degree=8.0, seed=2, isolated=0)
    coarsening = make.coarsening(graph, 6)
    sampler = sampler_of(make, graph, coarsening)
    num_draws = 20_000
    centres_B = np.full(num_draws, 7)
    drawn_B = sampler.super_nodes(centres_B, np.arange(num_draws), stream=0, num_super=1)[:, 1]
    own = coarsening.membership_V[7]
    weights_S = coarsening.adjacency().toarray()[own]
    weights_S[own] = 0
    np.testing.assert_allclose(np.bincount(drawn_B, minlength=6) / num_draws, weights_S / weights_S.sum(), atol=0.015)


def test_padding_stays_padding_and_zero_counts_work(sampler):
    tokens_BN = sampler.nodes(np.array([-1, 3]), np.zeros(2, np.int64), weights_H=HALF, stream=0, num_sampled=4)
    assert (tokens_BN[0] == -1).all() and (tokens_BN[1] >= 0).all()
    assert sampler.super_nodes(np.array([-1]), np.zeros(1, np.int64), stream=0, num_super=2).tolist() == [[-1] * 3]
    assert sampler.nodes(np.array([3]), np.zeros(1, np.int64), weights_H=HALF, stream=0, num_sampled=0).tolist() == [
        [3]
    ]
