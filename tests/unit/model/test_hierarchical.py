"""Parameter counts of the published model, stages as parts of it, initial weights by name."""

import pytest
import torch

from megagraph.attention.bias import DenseBias
from megagraph.attention.scope import DistinctRows, Scope
from megagraph.attention.slot import tiled_attention
from megagraph.config import ModelConfig
from megagraph.model.hierarchical import STAGE_SHARED, HierarchicalGT
from megagraph.model.initialise import initialise


def count(features, classes, **model):
    return sum(p.numel() for p in HierarchicalGT(ModelConfig(**model), torch.empty(1, features), classes).parameters())


@pytest.mark.parametrize(
    ("features", "classes", "model", "expected"),
    [
        (1433, 7, {"layers": 4, "hidden": 128, "ffn": 128, "heads": 8, "bias_channels": 6}, 583_405),
        (1433, 7, {"layers": 16, "hidden": 64, "ffn": 64, "heads": 8, "bias_channels": 4}, 496_523),
        (3703, 6, {"layers": 16, "hidden": 64, "ffn": 64, "heads": 8, "bias_channels": 4}, 641_738),
        (100, 47, {"layers": 16, "hidden": 64, "ffn": 64, "heads": 8, "bias_channels": 4}, 413_811),
    ],
    ids=["cora-l4-d128", "cora-l16-d64", "citeseer-l16-d64", "products-l16-d64"],
)
def test_parameter_count(features, classes, model, expected):
    assert count(features, classes, **model) == expected


def test_stages_hold_the_model_under_global_names():
    config = ModelConfig(layers=4, hidden=16, ffn=16, heads=4)
    features = torch.zeros(3, 5)
    whole = HierarchicalGT(config, features, 2)
    initialise(whole, 7, config.layers)
    names = dict(whole.named_parameters())
    seen = []
    for layers in (range(0, 1), range(1, 3), range(3, 4)):
        stage = HierarchicalGT(config, features, 2, layers)
        initialise(stage, 7, config.layers)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, names[name]), name
            seen.append(name)
    once = [name for name in seen if name not in STAGE_SHARED]
    assert sorted(once) == sorted(set(names) - set(STAGE_SHARED))


def test_initial_scale():
    config = ModelConfig(layers=4, hidden=64, ffn=64)
    model = HierarchicalGT(config, torch.zeros(2, 500), 3)
    initialise(model, 0, config.layers)
    assert model.embed.project.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert model.embed.global_tokens.std().item() == pytest.approx(0.02, rel=0.3)
    assert model.layers["0"].attention_norm.weight.eq(1).all()
    assert model.layers["0"].qkv.bias.eq(0).all()
    assert not torch.equal(model.layers["0"].qkv.weight, model.layers["1"].qkv.weight)


def test_last_layer_computes_only_what_is_read():
    """Same logits from R query rows as from all, dropout on; the last feed-forward block sees R rows."""
    config = ModelConfig(layers=2, hidden=16, ffn=8, heads=4, bias_channels=2)
    model = HierarchicalGT(config, torch.randn(9, 5, dtype=torch.float64), 3).double()
    initialise(model, 1, 1)
    channels = torch.rand(2, 2, 8, 8, dtype=torch.float64)
    channels[:, :, -1] = channels[..., -1] = 0
    ids, tokens = torch.arange(14).view(2, 7) % 9, torch.arange(8)
    rows = []
    model.layers["1"].ffn_in.register_forward_hook(lambda *call: rows.append(call[2].shape[1]))
    attend = tiled_attention(DenseBias.full(channels, 1))
    logits = [
        model(ids, Scope(attend, torch.arange(2), tokens, tokens, 3, key=5, only_readout=only))
        for only in (True, False)
    ]
    assert rows == [3, 8]
    assert torch.allclose(*logits, atol=1e-13)
    assert logits[0].shape == (2, 3, 3)


def test_distinct_rows_projected_once_change_no_number():
    """Tokens, dropout included, and the gradient of the projection are those of every token projected by itself."""
    config = ModelConfig(layers=1, hidden=16, ffn=8, heads=4, input_dropout=0.4)
    model = HierarchicalGT(config, torch.randn(30, 11, dtype=torch.float64), 3).double()
    initialise(model, 1, 1)
    ids = torch.randint(0, 30, (50, 7), generator=torch.Generator().manual_seed(0))
    distinct, places = DistinctRows.of(ids, 20)
    assert torch.equal(distinct.rows_U[places], ids)
    assert (distinct.rows_U[: distinct.num_nodes] < 20).all()
    assert (distinct.rows_U[distinct.num_nodes :] >= 20).all()
    tokens = torch.arange(8)
    upstream = torch.randn(50, 8, 16, dtype=torch.float64)
    seen = []
    for named, rows in ((ids, None), (places, distinct)):
        model.zero_grad()
        x = model.embed(named, Scope(None, torch.arange(50), tokens, tokens, 1, key=5, distinct=rows))
        x.backward(upstream)
        seen.append((x.detach(), *(parameter.grad.clone() for parameter in model.embed.parameters())))
    assert seen[0][0].eq(0).double().mean().item() == pytest.approx(0.4, abs=0.03)
    assert torch.equal(seen[0][0].eq(0), seen[1][0].eq(0))
    for first, second in zip(*seen, strict=True):
        assert (first - second).abs().max() <= 1e-12 * (1 + first.abs().max())
