"""Ego batches: token ids, the bias of ans-gt 1.6 against dense powers, row slices, purity, padding, labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megagraph.config import SamplingConfig, UserError
from megagraph.graph.batch import EgoBuilder

NODES = np.array([3, 0, 17, -1, 39])


@pytest.fixture(scope="module")
def graph(make):
    return make.graph(40, seed=5)


@pytest.fixture(scope="module")
def coarsening(make, graph):
    return make.coarsening(graph, 8)


@pytest.fixture(scope="module")
def build_with(graph, coarsening):
    def build_with(*, powers="global", num_super=2, bias_channels=4, global_tokens=1, dtype=np.float64, seed=0):
        sampling = SamplingConfig(num_sampled=6, num_super=num_super, powers=powers)
        options = {"bias_channels": bias_channels, "global_tokens": global_tokens, "seed": seed, "dtype": dtype}
        return EgoBuilder(graph, coarsening, sampling, **options)

    return build_with


@pytest.mark.parametrize("powers", ["global", "induced"])
@pytest.mark.parametrize("bias_channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-12)])
def test_bias_is_the_dense_definition(make, graph, coarsening, build_with, powers, bias_channels, dtype, tolerance):
    builder = build_with(powers=powers, bias_channels=bias_channels, dtype=dtype, global_tokens=2)
    batch = builder.build(NODES, stream=0, samples=2)
    assert batch.bias_BMSN.shape == (10, bias_channels, 12, 12)
    assert batch.bias_BMSN.numpy().dtype == dtype
    want = make.dense_bias(graph, coarsening, batch, builder, bias_channels, powers)
    np.testing.assert_allclose(batch.bias_BMSN.numpy(), want, rtol=0, atol=tolerance)
    assert (batch.bias_BMSN[:, :, -2:] == 0).all() and (batch.bias_BMSN[..., -2:] == 0).all()


@pytest.mark.parametrize("powers", ["global", "induced"])
@pytest.mark.parametrize(("low", "high"), [(0, 7), (0, 3), (3, 5), (5, 7), (4, 4)])
def test_rows_of_one_rank_are_a_slice_of_all_rows(build_with, powers, low, high):
    builder = build_with(powers=powers)
    whole = builder.build(NODES, stream=2, samples=2, first_sequence=6)
    part = builder.build(NODES, stream=2, samples=2, first_sequence=6, regular=slice(low, high))
    rows = [*range(low, high), *range(7, 11)]
    torch.testing.assert_close(part.bias_BMSN, whole.bias_BMSN[:, :, rows], rtol=0, atol=1e-15)
    assert torch.equal(part.ids_BT, whole.ids_BT[:, rows[:-1]])
    for name in ("sequence_B", "labels_BR", "weight_BR", "nodes_B"):
        assert torch.equal(getattr(part, name), getattr(whole, name))


def test_a_slice_builds_only_its_rows(build_with, monkeypatch):
    builder = build_with()
    asked = []
    fill = builder._fine.fill
    monkeypatch.setattr(builder._fine, "fill", lambda *args: (asked.append(args[0].shape), fill(*args)))
    builder.build(NODES, stream=0, samples=1, regular=slice(2, 4))
    assert asked == [(5, 4, 2 + 4, 11)]


def test_a_sequence_is_the_same_in_any_batch_order_or_builder(build_with):
    whole = build_with().build(NODES, stream=3, samples=3)
    other = build_with()
    for place, node in reversed(list(enumerate(NODES))):
        alone = other.build(np.array([node]), stream=3, samples=3)
        assert torch.equal(alone.ids_BT, whole.ids_BT[3 * place : 3 * place + 3])
        assert torch.equal(alone.bias_BMSN, whole.bias_BMSN[3 * place : 3 * place + 3])
    fewer = other.build(NODES, stream=3, samples=1)
    assert torch.equal(fewer.ids_BT, whole.ids_BT[::3])


def test_streams_samples_and_seeds_vary_the_sequence(build_with):
    ids = build_with().build(np.arange(38), stream=0, samples=2).ids_BT
    assert not torch.equal(ids[::2], ids[1::2])
    assert not torch.equal(ids, build_with().build(np.arange(38), stream=1, samples=2).ids_BT)
    assert not torch.equal(ids, build_with(seed=1).build(np.arange(38), stream=0, samples=2).ids_BT)


def test_ids_name_the_feature_rows(graph, coarsening, build_with):
    builder = build_with()
    batch = builder.build(NODES[:3], stream=0, samples=1)
    features = builder.features
    assert features.shape == (48, 3) and features.dtype == np.float64
    np.testing.assert_array_equal(features[batch.ids_BT[:, 0]], graph.features_VF[NODES[:3]])
    own = coarsening.membership_V[NODES[:3]]
    np.testing.assert_array_equal(features[batch.ids_BT[:, 7]], coarsening.features_SF[own])
    assert (batch.ids_BT[:, :7] < 40).all() and (batch.ids_BT[:, 7:] >= 40).all()


def test_padding_labels_weights_and_numbers(graph, build_with):
    batch = build_with().build(NODES, stream=0, samples=2, first_sequence=20)
    real_B = np.repeat(NODES, 2) >= 0
    assert batch.nodes_B.tolist() == np.repeat(NODES, 2).tolist()
    assert batch.sequence_B.tolist() == list(range(20, 30))
    assert batch.weight_BR.shape == batch.labels_BR.shape == (10, 1)
    assert batch.weight_BR.dtype == torch.float64 and batch.labels_BR.dtype == torch.int64
    assert batch.weight_BR[:, 0].tolist() == real_B.astype(float).tolist()
    assert batch.labels_BR[real_B, 0].tolist() == graph.labels_V[np.repeat(NODES, 2)[real_B]].tolist()
    for tensor in (batch.labels_BR, batch.ids_BT, batch.bias_BMSN):
        assert (tensor[~real_B] == 0).all()


def test_unlabelled_centres_weigh_nothing(graph, coarsening):
    labels_V = graph.labels_V.copy()
    labels_V[3] = -1
    unlabelled = replace(graph, labels_V=labels_V)
    builder = EgoBuilder(unlabelled, coarsening, SamplingConfig(), bias_channels=1, global_tokens=0, seed=0)
    batch = builder.build(NODES, stream=0, samples=1)
    assert batch.weight_BR[:, 0].tolist() == [0, 1, 1, 0, 1]
    assert batch.labels_BR[0, 0] == 0


@pytest.mark.parametrize(("num_super", "global_tokens"), [(0, 0), (0, 1), (3, 2)])
def test_counts(build_with, num_super, global_tokens):
    builder = build_with(num_super=num_super, global_tokens=global_tokens)
    batch = builder.build(NODES, stream=0, samples=1)
    assert (builder.num_regular, builder.num_super, builder.num_readout) == (7, 1 + num_super + global_tokens, 1)
    assert batch.ids_BT.shape == (5, 8 + num_super)
    assert batch.bias_BMSN.shape == (5, 4, 8 + num_super + global_tokens, 8 + num_super + global_tokens)


def test_no_centres_make_an_empty_batch(build_with):
    batch = build_with().build(np.zeros(0, np.int64), stream=0, samples=4)
    assert batch.ids_BT.shape == (0, 10) and batch.bias_BMSN.shape == (0, 4, 11, 11)


def test_coarsening_of_another_graph_is_refused(make, graph):
    other = make.coarsening(make.graph(30), 4)
    with pytest.raises(UserError, match="coarsening of 30 nodes does not belong to graph small of 40 nodes"):
        EgoBuilder(graph, other, SamplingConfig(), bias_channels=1, global_tokens=0, seed=0)


@pytest.mark.mirror
@pytest.mark.parametrize("powers", ["global", "induced"])
@pytest.mark.parametrize("bias_channels", [1, 2, 3, 4])
def test_ego_bias_of_cora_is_the_dense_definition(make, cora, cora_coarsening, cora_powers, powers, bias_channels):
    options = {"bias_channels": bias_channels, "global_tokens": 1, "seed": 0}
    builder = EgoBuilder(cora, cora_coarsening, SamplingConfig(powers=powers, num_super=2), **options)
    batch = builder.build(np.arange(0, 2708, 300), stream=0, samples=2)
    want = make.dense_bias(cora, cora_coarsening, batch, builder, bias_channels, powers, cora_powers)
    np.testing.assert_allclose(batch.bias_BMSN.numpy(), want, rtol=0, atol=1e-6)
