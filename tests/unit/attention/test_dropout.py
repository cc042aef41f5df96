"""The hash behaves like coin flips and knows nothing of how work is split."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megagraph.attention.dropout import AttentionDropout, _mix_, add_dropout, fold, hidden_dropout


def keep(rate=0.3, key=5, sequences=8, rows=64, columns=64, heads=4):
    dropout = AttentionDropout(rate, key, torch.arange(sequences), torch.arange(rows), torch.arange(columns))
    return dropout.keep(heads, slice(0, sequences), slice(0, rows))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_keep_rate(rate):
    assert keep(rate).float().mean().item() == pytest.approx(1 - rate, abs=5e-3)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_neighbours_are_uncorrelated(dim):
    mask = keep(0.5).double() - 0.5
    n = mask.shape[dim]
    correlation = (mask.narrow(dim, 0, n - 1) * mask.narrow(dim, 1, n - 1)).mean() / 0.25
    assert abs(correlation.item()) < 2e-2


def test_keys_give_other_masks():
    assert (keep(key=fold(1, 2)) != keep(key=fold(2, 1))).float().mean() > 0.3


def test_a_shard_sees_its_part_of_the_mask():
    whole = AttentionDropout(0.3, 9, torch.arange(6), torch.arange(10), torch.arange(12))
    shard = AttentionDropout(0.3, 9, torch.arange(2, 4), torch.arange(3, 7), torch.arange(12)).columns(4, 9)
    expected = whole.keep(2, slice(2, 4), slice(3, 7))[..., 4:9]
    assert torch.equal(shard.keep(2, slice(0, 2), slice(0, 4)), expected)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_compiled_pass_has_the_bits_of_the_tensor_operations(dtype, rate):
    """What runs on a CPU and what runs elsewhere are one function; codes wrap around."""
    dropout = AttentionDropout(rate, fold(11), torch.arange(5) + 10**6, torch.arange(7), torch.arange(1000, 1011), 3)
    sequence, head, row, column = dropout.codes(4)
    hashed = _mix_((sequence[1:4, None] + head)[:, :, None, None] + (row[2:6, None] + column))
    expected = hashed >= dropout.threshold
    out = None if dtype is None else torch.full(expected.shape, 7.0, dtype=dtype)
    found = dropout.keep(4, slice(1, 4), slice(2, 6), out=out)
    assert out is None or found is out
    assert torch.equal(found, expected.to(found.dtype))
    assert 0 < expected.float().mean() < 1


def test_nothing_is_computed_for_fake_tensors():
    with FakeTensorMode():
        places = torch.arange(3)
        mask = AttentionDropout(0.5, 1, places, places, places).keep(2, slice(0, 3), slice(0, 2))
        out = hidden_dropout(torch.ones(3, 3, 4), 0.5, 1, places, places)
    assert (mask.shape, mask.dtype, out.shape) == ((3, 2, 2, 3), torch.bool, (3, 3, 4))


def test_hidden_dropout_scales_and_follows_coordinates():
    x = torch.ones(4, 8, 16, dtype=torch.float64)
    whole = hidden_dropout(x, 0.25, 3, torch.arange(4), torch.arange(8))
    part = hidden_dropout(x[1:3, 2:5], 0.25, 3, torch.arange(1, 3), torch.arange(2, 5))
    assert torch.equal(part, whole[1:3, 2:5])
    assert set(whole.unique().tolist()) == {0.0, 1 / 0.75}
    assert hidden_dropout(x, 0.0, 3, torch.arange(4), torch.arange(8)) is x


def test_fold_is_stable():
    """Checkpoints and layouts depend on these very numbers."""
    assert (fold(0), fold(1, 2, 3)) == (2065550767, 4259537587)
    assert len({fold(a, b) for a in range(50) for b in range(50)}) == 2500


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_residual_with_dropout_has_the_bits_of_the_sum(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y, dout = (torch.randn(3, 5, 8, generator=generator, dtype=dtype) for _ in range(3))
    x, y = x.requires_grad_(), y.requires_grad_()
    places = 0.25, fold(3), torch.arange(3) + 7, torch.arange(5)
    got, want = add_dropout(x, y, *places), x + hidden_dropout(y, *places)
    assert torch.equal(got, want)
    for one, other in zip(*(torch.autograd.grad(out, (x, y), dout) for out in (got, want)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(add_dropout(x, y, 0.0, *places[1:]), x + y)


def test_a_residual_with_dropout_keeps_nothing_for_backward():
    kept = []
    x, y = torch.ones(2, 3, 4, requires_grad=True), torch.ones(2, 3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        add_dropout(x, y, 0.5, 1, torch.arange(2), torch.arange(3))
    assert kept == []
    with FakeTensorMode():
        fake = torch.ones(2, 3, 4, requires_grad=True)
        add_dropout(fake, fake, 0.5, 1, torch.arange(2), torch.arange(3)).sum().backward()
    assert fake.grad.shape == (2, 3, 4)
