"""Every backend equals the tiled kernel and float64, and refuses in one line where it cannot run."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megagraph.attention.backends import choose_kernel
from megagraph.attention.bias import DenseBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import TILED, block_forward, row_delta
from megagraph.attention.short import SHORT, serves
from megagraph.attention.sparse import SparseBias
from megagraph.attention.vectors import LANES
from megagraph.config import UserError

FUSED_CHECK = """
import torch
from megagraph.attention.bias import DenseBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.fused import fused_forward
from megagraph.attention.kernel import block_forward
generator = torch.Generator().manual_seed(0)
for B, H, S, N, D, g, rate in [(2, 2, 70, 70, 8, 1, 0.3), (1, 2, 33, 33, 16, 2, 0.0), (2, 1, 9, 70, 24, 0, 0.4)]:
    q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (S, N, N))
    channels, weight = torch.rand(B, 3, S, N, generator=generator), torch.randn(H, 3 + g, generator=generator)
    drop = AttentionDropout(rate, 99, torch.arange(B), torch.arange(S), torch.arange(N), 1) if rate else None
    for first in (0, 5):
        span = slice(first, N)
        store, part = DenseBias.full(channels, g).columns(first, N), None if drop is None else drop.columns(first, N)
        truth_store = DenseBias.full(channels.double(), g).columns(first, N)
        got = fused_forward(q, k[:, :, span], v[:, :, span], weight, store, part)
        wide = [t.double() for t in (q, k[:, :, span], v[:, :, span], weight)]
        want = block_forward(*wide, truth_store, part)
        for one, other in zip(got, want):
            error = ((one - other).abs().max() / (1 + other.abs().max())).item()
            assert error <= 1e-5, (S, N, D, g, rate, first, error)
print("checked")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_fused_forward_equals_float64_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", FUSED_CHECK],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "checked", done.stderr[-2000:]


@pytest.mark.parametrize("num_global", [0, 1, 2])
def test_flex_forward_equals_the_tiles(num_global):
    from megagraph.attention.flex import flex_forward

    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2, 24, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    channels = torch.rand(2, 3, 24, 24, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, 3 + num_global, generator=generator, dtype=torch.float64)
    store = DenseBias.full(channels, num_global)
    for one, other in zip(flex_forward(q, k, v, weight, store), block_forward(q, k, v, weight, store), strict=True):
        assert (one - other).abs().max() <= 1e-5


def test_auto_is_tiled_but_for_short_sequences_on_a_cpu():
    assert choose_kernel("auto", "cuda", 8) is choose_kernel("tiled", "cpu", 8) is TILED
    assert choose_kernel("auto", "cpu", 8) is SHORT


def both_passes(kernel, arguments, dout):
    weight, dropout = arguments[3], arguments[5]
    out, lse = kernel.forward(*arguments)
    dweight = torch.zeros_like(weight)
    delta = row_delta(dout, out, out.dtype)
    grads = kernel.backward(dout, *arguments[:5], lse, delta, dweight, dropout)
    return out, lse, *grads, dweight


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(
    ("B", "H", "S", "N", "D", "num_global"),
    [(37, 2, 17, 17, 8, 1), (LANES, 3, 9, 9, 5, 2), (3, 2, 1, 9, 4, 1), (5, 1, 12, 12, 16, 0)],
)
def test_short_passes_equal_the_tiles(B, H, S, N, D, num_global, rate, dtype, tolerance):
    """Whole blocks of lanes, blocks with lanes to spare, a prefix of the rows; a block of columns as in a ring."""
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(B, N, 3, H, D, generator=generator, dtype=torch.float64)
    q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
    weight = torch.randn(H, 4 + num_global, generator=generator, dtype=torch.float64)
    channels = torch.rand(B, 4, N, N, generator=generator, dtype=torch.float64)
    dout = torch.randn(B, H, S, D, generator=generator, dtype=torch.float64)
    numbers = torch.arange(B), torch.arange(S), torch.arange(N)
    dropout = AttentionDropout(rate, 11, *numbers, first_head=1) if rate else None
    for start in (0, 3):
        results = []
        for kernel, kind in ((SHORT, dtype), (TILED, torch.float64)):
            store = DenseBias.full(channels.to(kind), num_global).columns(start, N)
            block = [x.to(kind) for x in (q[:, :, :S], k[:, :, start:], v[:, :, start:], weight)]
            part = None if dropout is None else dropout.columns(start, N)
            results.append(both_passes(kernel, (*block, store, part), dout.to(kind)))
        for got, want in zip(*results, strict=True):
            assert got.dtype == dtype
            assert (got - want).abs().max() <= tolerance * (1 + want.abs().max())


def test_short_passes_leave_to_the_tiles_what_they_do_not_serve():
    q = torch.randn(2, 1, 80, 4)
    dense = DenseBias.full(torch.rand(2, 1, 80, 80), 0)
    assert not serves(q, q, dense)
    assert serves(q[:, :, :64], q[:, :, :64], dense.columns(0, 64))
    assert not serves(q[:, :, :64], q[:, :, :64], SparseBias.from_dense(dense.channels_BMSN, 0))
    weight = torch.randn(1, 1)
    for got, want in zip(SHORT.forward(q, q, q, weight, dense), TILED.forward(q, q, q, weight, dense), strict=True):
        assert torch.equal(got, want)


def test_short_passes_give_shapes_for_fake_tensors():
    with FakeTensorMode():
        q = torch.empty(4, 9, 3, 2, 5).permute(2, 0, 3, 1, 4)[0]
        weight, bias = torch.empty(2, 4), DenseBias.full(torch.empty(4, 3, 9, 9), 1)
        out, lse = SHORT.forward(q, q, q, weight, bias)
        grads = SHORT.backward(out, q, q, q, weight, bias, lse, lse, torch.zeros_like(weight))
    assert (out.shape, lse.shape) == (q.shape, (4, 2, 9))
    assert [grad.shape for grad in grads] == [q.shape] * 3


@pytest.mark.parametrize(
    ("backend", "device", "head_dim", "message"),
    [
        ("flex", "cpu", 16, "backend=flex needs device=cuda, not cpu"),
        ("triton", "cpu", 16, "backend=triton needs device=cuda, not cpu"),
        ("flex", "cuda", 8, "backend=flex needs 16 features per head, not 8"),
    ],
)
def test_what_cannot_run_is_refused(backend, device, head_dim, message):
    with pytest.raises(UserError, match=message) as caught:
        choose_kernel(backend, device, head_dim)
    assert "\n" not in str(caught.value)
