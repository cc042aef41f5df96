"""Union batches: seeds and their draws once each, the chosen super nodes, dense bias, purity in every layout."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megagraph.config import ParallelPlan, SamplingConfig, UserError
from megagraph.graph.union import UnionBuilder
from megagraph.parallel.shard import replica_share

SEEDS = np.array([3, 0, 17, 39, 21, 8, 30, -1, -1, -1, -1, -1])


@pytest.fixture(scope="module")
def graph(make):
    return make.graph(60, seed=5)


@pytest.fixture(scope="module")
def coarsening(make, graph):
    return make.coarsening(graph, 9)


def sampling_of(**options):
    kept = {"builder": "union", "seeds_per_sequence": 4, "num_sampled": 3, "num_super": 3}
    return SamplingConfig(**(kept | options))


@pytest.fixture(scope="module")
def build_with(graph, coarsening):
    def build_with(*, bias_channels=3, dtype=np.float64, seed=0, **options):
        rule = {"bias_channels": bias_channels, "global_tokens": 1, "seed": seed, "dtype": dtype}
        return UnionBuilder(graph, coarsening, sampling_of(**options), **rule)

    return build_with


@pytest.mark.parametrize("super_set", ["members", "all", "top"])
@pytest.mark.parametrize("powers", ["global", "induced"])
@pytest.mark.parametrize("bias_channels", [1, 2, 5])
def test_bias_is_the_dense_definition(make, graph, coarsening, build_with, super_set, powers, bias_channels):
    builder = build_with(powers=powers, super_set=super_set, bias_channels=bias_channels)
    batch = builder.build(SEEDS, stream=0, samples=2)
    assert batch.bias_BMSN.shape == (6, bias_channels, *[builder.num_regular + builder.num_super] * 2)
    want = make.dense_bias(graph, coarsening, batch, builder, bias_channels, powers)
    np.testing.assert_allclose(batch.bias_BMSN.numpy(), want, rtol=0, atol=1e-12)


def test_seeds_come_first_and_every_token_once(graph, build_with):
    builder = build_with()
    batch = builder.build(SEEDS, stream=0, samples=1)
    assert (builder.num_regular, builder.num_readout) == (16, 4)
    ids_BN = batch.ids_BT[:, :16].numpy()
    assert ids_BN[0, :4].tolist() == [3, 0, 17, 39] and ids_BN[1, :3].tolist() == [21, 8, 30]
    assert all(len(set(row)) == 16 and row.max() < 60 for row in ids_BN[:2])
    assert (ids_BN[2] == 0).all() and (batch.bias_BMSN[2] == 0).all()
    assert batch.weight_BR.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert batch.labels_BR[0].tolist() == graph.labels_V[[3, 0, 17, 39]].tolist()
    assert batch.nodes_B.tolist() == [3, 21, -1]


def test_draws_are_those_of_the_seeds(build_with):
    builder = build_with()
    tokens = builder.build(SEEDS[:4], stream=0, samples=1).ids_BT[0, :16].tolist()
    rule = {"weights_H": builder.weights_H, "stream": 0, "num_sampled": 3}
    drawn = builder._sampler.nodes(SEEDS[:4], np.zeros(4, np.int64), **rule)[:, 1:].reshape(-1)
    expected = list(dict.fromkeys([*SEEDS[:4].tolist(), *drawn.tolist()]))
    assert tokens[: len(expected)] == expected


def test_super_sets(graph, coarsening, build_with):
    fine = build_with().build(SEEDS[:4], stream=0, samples=1).ids_BT[0, :16].numpy()
    sigma = coarsening.membership_V[fine]
    chosen = {}
    for name in ("members", "all", "top"):
        builder = build_with(super_set=name)
        supers = builder.build(SEEDS[:4], stream=0, samples=1).ids_BT[0, 16:].numpy() - graph.num_nodes
        assert len(supers) + 1 == builder.num_super and len(set(supers)) == len(supers)
        chosen[name] = supers
    assert set(sigma) <= set(chosen["members"]) and list(chosen["all"]) == list(range(9))
    counts = np.bincount(sigma, minlength=9)
    assert sorted(counts[chosen["top"]]) == sorted(counts)[-3:]


@pytest.mark.parametrize("powers", ["global", "induced"])
@pytest.mark.parametrize(("low", "high"), [(0, 5), (5, 16), (7, 7)])
def test_rows_of_one_rank_are_a_slice_of_all_rows(build_with, powers, low, high):
    builder = build_with(powers=powers)
    whole = builder.build(SEEDS, stream=2, samples=2, first_sequence=6)
    part = builder.build(SEEDS, stream=2, samples=2, first_sequence=6, regular=slice(low, high))
    rows = [*range(low, high), *range(16, 16 + builder.num_super)]
    torch.testing.assert_close(part.bias_BMSN, whole.bias_BMSN[:, :, rows], rtol=0, atol=1e-15)
    assert torch.equal(part.ids_BT, whole.ids_BT[:, rows[:-1]])
    for name in ("sequence_B", "labels_BR", "weight_BR", "nodes_B"):
        assert torch.equal(getattr(part, name), getattr(whole, name))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)])
def test_every_layout_builds_the_same_sequences(build_with, shape):
    builder = build_with()
    nodes = np.random.default_rng(0).permutation(60)[:27]
    whole = builder.build(np.concatenate([nodes, [-1]]), stream=1, samples=2)
    plan = ParallelPlan(dp=shape[0], layers=(1,), microbatches=shape[1])
    seen = {}
    for rank in range(plan.dp):
        share = replica_share(nodes, 30, plan, rank, 2, seeds=4)
        for number, seeds in enumerate(share.nodes_KB):
            first = share.first_sequence + number * len(seeds) // 4 * 2
            batch = builder.build(seeds, stream=1, samples=2, first_sequence=first)
            for place in np.flatnonzero(batch.nodes_B.numpy() >= 0):
                seen[int(batch.sequence_B[place])] = batch.ids_BT[place], batch.bias_BMSN[place]
    assert sorted(seen) == list(range(14))
    for number, (ids, bias) in seen.items():
        assert torch.equal(ids, whole.ids_BT[number]) and torch.equal(bias, whole.bias_BMSN[number])


def test_streams_samples_and_seeds_vary_the_sequence(build_with):
    first, second = build_with().build(SEEDS[:4], stream=0, samples=2).ids_BT
    assert not torch.equal(first, second)
    for other in (
        build_with().build(SEEDS[:4], stream=1, samples=1),
        build_with(seed=1).build(SEEDS[:4], stream=0, samples=1),
    ):
        assert not torch.equal(first, other.ids_BT[0])


def test_without_draws_the_seeds_are_the_sequence(build_with):
    builder = build_with(num_sampled=0)
    assert builder.build(SEEDS[:4], stream=0, samples=1).ids_BT[0, :4].tolist() == SEEDS[:4].tolist()


def test_too_many_seeds_and_no_top_are_refused(build_with):
    with pytest.raises(UserError, match=r"seeds_per_sequence=40 with num_sampled=3 needs 160 distinct nodes .* has 60"):
        build_with(seeds_per_sequence=40)
    with pytest.raises(ValidationError, match="super_set=top with num_super=0"):
        sampling_of(super_set="top", num_super=0)


@pytest.mark.mirror
@pytest.mark.parametrize("powers", ["global", "induced"])
@pytest.mark.parametrize("bias_channels", [1, 2, 3, 4])
def test_union_bias_of_cora_is_the_dense_definition(make, cora, cora_coarsening, cora_powers, powers, bias_channels):
    sampling = sampling_of(powers=powers, seeds_per_sequence=32, num_sampled=2)
    builder = UnionBuilder(cora, cora_coarsening, sampling, bias_channels=bias_channels, global_tokens=1, seed=0)
    batch = builder.build(np.random.default_rng(0).permutation(2708)[:64], stream=0, samples=1)
    want = make.dense_bias(cora, cora_coarsening, batch, builder, bias_channels, powers, cora_powers)
    np.testing.assert_allclose(batch.bias_BMSN.numpy(), want, rtol=0, atol=1e-6)
