"""Codes and non-zeros say what dense channels say: output, every gradient, blocks of columns, prefixes of rows."""

import pytest
import torch

from megagraph.attention.bias import DenseBias
from megagraph.attention.codes import CodeBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import block_backward, block_forward
from megagraph.attention.slot import local_attention
from megagraph.attention.sparse import SparseBias
from megagraph.config import UserError

M = 3
STORES = {
    "code": CodeBias.from_dense,
    "sparse": SparseBias.from_dense,
    "code-sparse": lambda channels, num_global: CodeBias.from_dense(channels, num_global).sparse(),
}


def channels(B, S, N, num_global, common=0.0):
    """A few channel vectors in random places; `common` is the most frequent value."""
    generator = torch.Generator().manual_seed(4)
    vectors = torch.rand(5, M, generator=generator, dtype=torch.float64)
    vectors[0] = common
    code = (torch.rand(B, S, N, generator=generator) * 12).long().sub_(7).clamp_(min=0)
    result = vectors[code].permute(0, 3, 1, 2).contiguous()
    if num_global:
        result[:, :, S - num_global :] = 0
        result[..., N - num_global :] = 0
    return result


def inputs(B, S, N, num_global, D=8, H=2):
    generator = torch.Generator().manual_seed(5)
    shapes = (B, H, S, D), (B, H, N, D), (B, H, N, D), (H, M + num_global), (B, H, S, D)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def close(got, want):
    return (got - want).abs().max() <= 1e-12 * (1 + want.abs().max())


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("kind", ["dense", "tiled"])
@pytest.mark.parametrize("num_global", [0, 1, 2])
@pytest.mark.parametrize(("common", "rate"), [(0.0, 0.3), (0.6, 0.0)])
def test_store_equals_dense_channels(name, kind, num_global, common, rate):
    B, N = 3, 19
    dense = channels(B, N, N, num_global, common)
    *leaves, dout = inputs(B, N, N, num_global)
    for leaf in leaves:
        leaf.requires_grad_()
    dropout = AttentionDropout(rate, 3, torch.arange(B), torch.arange(N), torch.arange(N)) if rate else None
    results = []
    for store in (DenseBias.full(dense, num_global), STORES[name](dense, num_global)):
        out = local_attention(kind)(store)(*leaves, dropout)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(close(got, want) for got, want in zip(results[1], results[0], strict=True))


@pytest.mark.parametrize("name", ["dense", *STORES])
@pytest.mark.parametrize("tile_bytes", [1, 1 << 13, 1 << 21])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_first_rows_against_a_block_of_columns(name, tile_bytes, num_rows):
    """What a ring rank without, or with few, read-out rows asks for; tiles of one and of several sequences."""
    B, S, N, num_global = 4, 37, 23, 1
    dense = channels(B, S, N, num_global)
    q, k, v, weight, dout = inputs(B, S, N, num_global)
    q, dout, columns = q[:, :, :num_rows], dout[:, :, :num_rows], (9, 23)
    k, v = k[:, :, slice(*columns)], v[:, :, slice(*columns)]
    results = []
    for make in (DenseBias.full, STORES.get(name, DenseBias.full)):
        store = make(dense, num_global).columns(*columns)
        size = tile_bytes if results else 1 << 21
        out, lse = block_forward(q, k, v, weight, store, None, size)
        dweight = torch.zeros_like(weight)
        grads = block_backward(dout, q, k, v, weight, store, lse, (dout * out).sum(-1), dweight, None, size)
        results.append((out, *grads, dweight) if num_rows else (*grads[1:], dweight))
    assert all(close(got, want) for got, want in zip(results[1], results[0], strict=True))
    if num_rows == 0:
        assert all(part.abs().max() == 0 for part in results[1])


def test_compressed_rows_of_a_graph():
    dense = channels(2, 6, 6, 1)
    made = SparseBias.from_dense(dense, 1)
    again = SparseBias.from_csr(made.starts, made.column_Z, made.values_MZ, (2, 6, 6), 1)
    assert torch.equal(again.row_Z, made.row_Z)
    assert again.tokens == made.tokens


def test_sizes_follow_the_encoding():
    dense = channels(1, 64, 64, 0)
    size = {name: sum(t.nbytes for t in make(dense, 0).tensors()) for name, make in STORES.items()}
    assert size["code"] < 64 * 64 + 1000
    assert size["sparse"] < dense.nbytes / 1.2


def test_the_most_frequent_code_becomes_zero():
    store = CodeBias.from_dense(channels(1, 32, 32, 0, common=0.6), 0)
    counts = torch.bincount(store.codes_BSN.flatten().int())
    assert store.table_KM[counts.argmax()].abs().max() == 0
    assert store.sparse().values_MZ.shape[1] == 32 * 32 - counts.max()


def test_too_many_codes_are_refused():
    with pytest.raises(UserError, match="at most 256"):
        CodeBias.from_dense(torch.rand(1, M, 20, 20, dtype=torch.float64), 0)


def test_largest_bounds_every_store():
    dense = -3 * channels(1, 8, 8, 0)
    assert DenseBias.full(dense, 0).largest == SparseBias.from_dense(dense, 0).largest == dense.abs().max()


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_large_scores_do_not_overflow(size):
    q, k, v, weight, _ = (t.float() for t in inputs(1, 16, 16, 0))
    store = DenseBias.full(channels(1, 16, 16, 0).float(), 0)
    out, lse = block_forward(size * q, k, v, weight, store)
    scores = (size * q).double() @ k.double().transpose(2, 3) / 8**0.5
    scores += torch.einsum("hm,bmij->bhij", weight.double(), store.channels_BMSN.double())
    assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.allclose(out.double(), scores.softmax(-1) @ v.double(), atol=1e-3)
