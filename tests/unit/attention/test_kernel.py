"""Tiled and dense attention against a written-out float64 truth; several tile sizes, dropout, ragged blocks."""

import pytest
import torch

from megagraph.attention.bias import DenseBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import block_backward, block_forward, merge, tile_shape
from megagraph.attention.slot import local_attention

M = 4


def problem(B, H, S, N, D, num_global, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    q, k, v = random(B, H, S, D), random(B, H, N, D), random(B, H, N, D)
    channels = torch.rand(B, M, S, N, generator=generator, dtype=torch.float64).to(dtype)
    if num_global:
        channels[:, :, S - num_global :] = 0
        channels[..., N - num_global :] = 0
    return q, k, v, random(H, M + num_global), channels, torch.randn(B, H, S, D, generator=generator).to(dtype)


def full_bias(weight, channels, num_global):
    bias = torch.einsum("hm,bmij->bhij", weight[:, :M], channels)
    S, N = bias.shape[2:]
    learned = torch.zeros_like(bias)
    for token in range(num_global):
        learned[:, :, S - num_global + token, : N - num_global] = weight[:, M + token, None]
    for token in range(num_global):
        learned[:, :, :, N - num_global + token] = weight[:, M + token, None]
    return bias + learned


def truth(q, k, v, weight, channels, num_global, dropout):
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + full_bias(weight, channels, num_global)
    p = scores.softmax(-1)
    if dropout is not None:
        p = p * dropout.keep(p.shape[1], slice(0, p.shape[0]), slice(0, p.shape[2])) / (1 - dropout.rate)
    return p @ v


def make_dropout(rate, B, S, N):
    return AttentionDropout(rate, 11, torch.arange(B), torch.arange(S), torch.arange(N)) if rate else None


@pytest.mark.parametrize("kind", ["dense", "tiled"])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("num_global", [0, 1, 2])
def test_attention_equals_truth(kind, rate, num_global):
    q, k, v, weight, channels, dout = problem(3, 2, 17, 17, 8, num_global)
    dropout = make_dropout(rate, 3, 17, 17)
    expected = truth(q, k, v, weight, channels, num_global, dropout)
    expected_grads = torch.autograd.grad(expected, (q, k, v, weight), dout)
    out = local_attention(kind)(DenseBias.full(channels, num_global))(q, k, v, weight, dropout)
    grads = torch.autograd.grad(out, (q, k, v, weight), dout)
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (got - want).abs().max() <= 1e-12 * (1 + want.abs().max())


@pytest.mark.parametrize("tile_bytes", [1, 3000, 1 << 14, 1 << 21])
def test_tile_size_changes_nothing(tile_bytes):
    q, k, v, weight, channels, dout = problem(2, 2, 41, 33, 8, 0)
    bias, dropout = DenseBias.full(channels, 0), make_dropout(0.4, 2, 41, 33)
    with torch.no_grad():
        reference_out, reference_lse = block_forward(q, k, v, weight, bias, dropout)
        out, lse = block_forward(q, k, v, weight, bias, dropout, tile_bytes)
        assert torch.allclose(out, reference_out, atol=1e-13)
        assert torch.allclose(lse, reference_lse, atol=1e-13)
        delta, results = (dout * out).sum(-1), []
        for size in (tile_bytes, 1 << 21):
            dweight = torch.zeros_like(weight)
            parts = block_backward(dout, q, k, v, weight, bias, lse, delta, dweight, dropout, size)
            results.append((*parts, dweight))
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, atol=1e-12)


def test_a_tile_is_never_thinner_than_sixteen_rows_and_takes_whole_short_sequences():
    q = torch.empty(64, 8, 4096, 8)
    assert tile_shape(q, 4096, 1 << 10) == (1, 16)
    short = torch.empty(64, 8, 16, 8)
    assert tile_shape(short, 16, 1 << 21) == (64, 16)


def test_blocks_over_disjoint_keys_merge_to_the_whole():
    q, k, v, weight, channels, _ = problem(2, 3, 9, 20, 8, 0)
    bias = DenseBias.full(channels, 0)
    with torch.no_grad():
        whole, lse = block_forward(q, k, v, weight, bias)
        parts = [
            block_forward(q, k[:, :, a:b], v[:, :, a:b], weight, bias.columns(a, b))
            for a, b in ((0, 3), (3, 19), (19, 20))
        ]
        out, merged = parts[0]
        for part in parts[1:]:
            out, merged = merge(out, merged, *part)
    assert torch.allclose(out, whole, atol=1e-13)
    assert torch.allclose(merged, lse, atol=1e-13)


def test_float32_stays_close_to_float64():
    q, k, v, weight, channels, dout = problem(2, 8, 65, 65, 8, 1)
    single = [t.detach().float().requires_grad_() for t in (q, k, v, weight)]
    want = truth(q, k, v, weight, channels, 1, None)
    wanted = torch.autograd.grad(want, (q, k, v, weight), dout)
    got = local_attention("tiled")(DenseBias.full(channels.float(), 1))(*single, None)
    grads = torch.autograd.grad(got, single, dout.float())
    for one, other in zip((got, *grads), (want, *wanted), strict=True):
        assert (one.double() - other).abs().max() <= 1e-5 * (1 + other.abs().max())


def test_tiled_saves_no_scores():
    """What autograd keeps grows with N, not with N^2."""

    def saved(N):
        q, k, v, weight, channels, _ = problem(1, 2, N, N, 8, 1)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            local_attention("tiled")(DenseBias.full(channels, 1))(q, k, v, weight, None)
        return sum(sizes)

    assert saved(128) < 2.1 * saved(64)
