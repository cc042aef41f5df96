"""Scores and rewards of adaptive sampling: the definition, and the same numbers in every layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megagraph.config import CoarseningConfig, ModelConfig, ParallelPlan, PlantedConfig, SamplingConfig
from megagraph.graph.coarsen import coarsen
from megagraph.graph.planted import planted

pytestmark = pytest.mark.distributed

NODES = np.arange(11)
SHARES = np.array([0.7, 0.3])
PLANS = [
    ParallelPlan(layers=(2,), microbatches=3),
    ParallelPlan(cp=2, layers=(2,)),
    ParallelPlan(pp=2, layers=(1, 1), microbatches=2),
    ParallelPlan(dp=2, layers=(2,)),
]


def on_ranks(plan, what):
    """`what(engine)` on this rank of a plan, over a small planted graph with large weights."""
    from megagraph.parallel.mesh import make_mesh, process_group
    from megagraph.train.engine import Data, Engine, EngineConfig

    graph = planted("small", PlantedConfig(source="planted", nodes=80, communities=3, features=8))
    data = Data(graph, coarsen(graph, CoarseningConfig(ratio=0.1)))
    model = ModelConfig(layers=2, heads=2, hidden=8, ffn=8, bias_channels=2)
    sampling = SamplingConfig(num_sampled=5, eval_samples=2)
    with process_group(plan.world_size, "cpu", 60.0):
        engine = Engine(EngineConfig(model, sampling, "tiled", "float64", 0), data, make_mesh(plan, "cpu", 60.0))
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(30.0)
        engine.builder.adapt(SHARES, 1)
        return what(engine)


def rewards_of(engine):
    from megagraph.train.adaptive import heuristic_rewards

    return heuristic_rewards(engine, NODES, SHARES, 4)


@pytest.mark.parametrize("plan", PLANS, ids=[plan.label.replace(" ", "_") for plan in PLANS])
def test_every_layout_earns_the_same(run_ranks, plan):
    (truth,) = run_ranks(1, on_ranks, ParallelPlan(layers=(2,)), rewards_of)
    assert (truth > 0).all() and truth[0] != truth[1]
    for earned in run_ranks(plan.world_size, on_ranks, plan, rewards_of):
        np.testing.assert_allclose(earned, truth, rtol=1e-10)


def scores_and_definition(engine):
    """What the probe notes, and the definition from the queries, keys and values of the last layer."""
    from megagraph.train.adaptive import _scores

    batch = engine.builder.build(NODES, stream=0, samples=1)
    microbatch = engine.shard.microbatch(batch, None)
    calls = []

    def spy(q, k, v, weight, dropout):
        assert dropout is None
        calls.append((q, k, v, weight))
        return microbatch.scope.attend(q, k, v, weight, dropout)

    got = _scores(engine, [replace(microbatch, scope=replace(microbatch.scope, attend=spy))])
    q, k, v, weight = calls[-1]
    scores = torch.einsum("bhd,bhnd->bhn", q[:, :, 0], k) / q.shape[-1] ** 0.5
    scores += torch.einsum("hm,bmn->bhn", weight[:, :2], batch.bias_BMSN[:, :, 0])
    scores[:, :, -1] += weight[:, 2]
    expected = (scores.softmax(-1) * v.norm(dim=-1)).mean(1)
    return len(calls), got, expected.detach().numpy()


def test_scores_are_attention_times_value_norm_in_the_last_layer(run_ranks):
    ((calls, got, expected),) = run_ranks(1, on_ranks, ParallelPlan(layers=(2,)), scores_and_definition)
    assert calls == 2 and got.shape == (11, 8)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert got.std() > 1e-3
