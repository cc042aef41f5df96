"""Adaptive sampling: rewards and weights against their formulas, and each shipped behaviour of ANS-GT beside ours."""

import numpy as np
import pytest
import scipy.sparse as sp

from megagraph.config import AdaptiveConfig, RunConfig, SamplingConfig
from megagraph.graph.adaptive import Bandit, rewards
from megagraph.graph.batch import EgoBuilder
from megagraph.graph.candidates import HeuristicSource
from megagraph.graph.heuristics import PageRank

ALL = {"ppr": 1.0, "one_hop": 1.0, "two_hop": 1.0, "knn": 1.0}


def builder_of(graph, coarsening, **sampling):
    return EgoBuilder(graph, coarsening, SamplingConfig(**sampling), bias_channels=1, global_tokens=0, seed=0)


def test_rewards_are_importance_weighted_scores(make):
    graph = make.graph(40, seed=2)
    source = HeuristicSource.from_config(graph, SamplingConfig(heuristics=ALL))
    tokens_BN = np.stack([np.random.default_rng(b).permutation(38)[:6] for b in range(7)])
    scores_BN = np.random.default_rng(9).random((7, 6))
    shares_H = np.array([0.4, 0.3, 0.2, 0.1])
    expected = np.zeros((7, 4))
    for b, tokens in enumerate(tokens_BN):
        pool = source.of(tokens[:1])
        values = dict(zip(pool.indices, pool.values_HE.T.astype(np.float64), strict=True))
        for token, score in list(zip(tokens, scores_BN[b], strict=True))[1:]:
            q_H = values.get(token, np.zeros(4))
            expected[b] += score * q_H / (shares_H @ q_H + 1e-5)
    got = rewards(source, shares_H, tokens_BN, scores_BN)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert (expected > 0).any(axis=1).sum() > 3


def test_constant_scores_reward_every_heuristic_alike_under_any_shares(make):
    """Off-policy correction: with phi the drawing chance, sampling more from a heuristic does not raise its reward."""
    graph = make.graph(60, average_degree=12.0, seed=2, isolated=0)
    coarsening = make.coarsening(graph, 6)
    builder = builder_of(graph, coarsening, heuristics={"one_hop": 1.0, "two_hop": 1.0}, num_sampled=1)
    for shares_H in (np.array([0.5, 0.5]), np.array([0.9, 0.1])):
        builder.adapt(shares_H, 1)
        tokens_BN = builder.regular_nodes(np.arange(60), stream=0, samples=400)
        mean_H = rewards(builder.source, shares_H, tokens_BN, np.ones(tokens_BN.shape)).mean(0)
        np.testing.assert_allclose(mean_H, 1.0, atol=0.05)


def test_update_is_the_published_rule():
    config = AdaptiveConfig(p_min=0.05, rate=2.0, confidence=0.01)
    bandit = Bandit.start(config, np.array([1.0, 1.0, 1.0, 1.0]))
    np.testing.assert_allclose(bandit.shares_H, 0.25)
    earned_H = np.array([0.532, 0.157, 0.290, 0.167])
    bandit.update(earned_H)
    w_H = np.exp(2.0 * (earned_H + 0.01 / 0.25))
    np.testing.assert_allclose(bandit.shares_H, 0.8 * w_H / w_H.sum() + 0.05)
    np.testing.assert_allclose(bandit.shares_H, [0.361, 0.197, 0.242, 0.200], atol=2e-3)  # ans-gt 3, as run there
    again = Bandit.start(config, np.ones(4))
    again.load(bandit.dump())
    bandit.update(earned_H)
    again.update(earned_H)
    np.testing.assert_array_equal(again.weights_H, bandit.weights_H)
    assert again.updates == 2


def test_weights_neither_overflow_nor_starve_a_heuristic():
    bandit = Bandit.start(AdaptiveConfig(p_min=0.1), np.ones(2))
    for _ in range(1000):
        bandit.update(np.array([50.0, 0.0]))
    np.testing.assert_allclose(bandit.shares_H, [0.9, 0.1])


def test_last_bits_of_a_reward_do_not_matter():
    bandits = [Bandit.start(AdaptiveConfig(), np.ones(2)) for _ in range(2)]
    bandits[0].update(np.array([0.123, 0.456]))
    bandits[1].update(np.array([0.123 + 1e-12, 0.456 - 1e-12]))
    assert bandits[0].dump() == bandits[1].dump()


def test_shares_decide_the_draws(make):
    graph = make.graph(60, seed=2)
    builder = builder_of(graph, make.coarsening(graph, 6), num_sampled=6)
    before = builder.regular_nodes(np.arange(60), stream=0, samples=1)
    builder.adapt(np.array([0.05, 0.95]), 1)
    assert not np.array_equal(before, builder.regular_nodes(np.arange(60), stream=0, samples=1))
    whole = builder.build(np.arange(60), stream=0, samples=2)
    np.testing.assert_array_equal(whole.ids_BT[:, :7], builder.regular_nodes(np.arange(60), stream=0, samples=2))


def test_ansgt_period_is_beyond_any_run_and_ours_is_not():
    assert SamplingConfig(compat="ansgt").adaptive_period == 10_000
    assert SamplingConfig().adaptive_period <= RunConfig(id="a", dataset="a").train.epochs // 2
    assert SamplingConfig().adapts and not SamplingConfig(heuristics={"ppr": 1.0}).adapts
    assert not SamplingConfig(builder="union").adapts


def test_ansgt_draws_from_pagerank_alone_until_the_first_update(make):
    graph = make.graph(60, seed=2)
    coarsening = make.coarsening(graph, 6)
    ours, theirs = (builder_of(graph, coarsening, heuristics=ALL, compat=name) for name in ("none", "ansgt"))
    shares_H = np.full(4, 0.25)
    for builder in (ours, theirs):
        builder.adapt(shares_H, 0)
    assert ours.weights_H.tolist() == shares_H.tolist() and theirs.weights_H.tolist() == [1, 0, 0, 0]
    theirs.adapt(shares_H, 1)
    assert theirs.weights_H.tolist() == shares_H.tolist()


def test_ansgt_has_two_pagerank_definitions(make):
    graph = make.graph(60, seed=2)
    adjacency_VV = graph.adjacency().toarray().astype(np.float64)
    degrees_V = adjacency_VV.sum(1)
    by_column_VV = adjacency_VV / np.where(degrees_V > 0, degrees_V, 1.0)
    exact = 0.15 * np.linalg.inv(np.eye(60) - 0.85 * by_column_VV)
    rule = {"restart": 0.15, "epsilon": 1e-9, "top_k": 60}
    starts, columns, values = PageRank(graph, **rule, by_column=True).rows(np.arange(60))
    got = sp.csr_array((values, columns, starts), shape=(60, 60)).toarray()
    for matrix in (exact, got):
        np.fill_diagonal(matrix, 0)
        matrix /= np.where(matrix.sum(1) > 0, matrix.sum(1), 1.0)[:, None]
    np.testing.assert_allclose(got, exact, atol=1e-5)
    coarsening = make.coarsening(graph, 6)
    theirs, ours = (builder_of(graph, coarsening, compat=name) for name in ("ansgt", "none"))
    assert theirs.source is not theirs._sampler.source and ours.source is ours._sampler.source
    theirs.adapt(np.array([0.5, 0.5]), 1)
    assert theirs.source is theirs._sampler.source


def test_ansgt_fills_short_sequences_with_unrelated_nodes_and_ours_with_related_ones(make):
    adjacency_VV = np.zeros((40, 40), np.float32)
    adjacency_VV[3, 4] = adjacency_VV[4, 3] = 1
    graph = make.graph_of(adjacency_VV)
    coarsening = make.coarsening(graph, 8)
    rule = {"heuristics": {"ppr": 1.0}, "num_sampled": 5}
    theirs = builder_of(graph, coarsening, compat="ansgt", **rule).regular_nodes(np.array([3]), stream=0, samples=2)
    assert theirs.tolist() == [[3, 4, 36, 37, 38, 39]] * 2
    ours = builder_of(graph, coarsening, **rule).regular_nodes(np.array([3]), stream=0, samples=1)[0]
    members = set(np.flatnonzero(coarsening.membership_V == coarsening.membership_V[3])) - {3, 4}
    assert ours[:2].tolist() == [3, 4] and members <= set(ours[2:])


@pytest.mark.parametrize("p_min", [0.25, -0.1])
def test_floors_that_leave_nothing_to_learn_are_refused(p_min):
    with pytest.raises(ValueError, match="p_min"):
        AdaptiveConfig(p_min=p_min)
