"""Every backend equals the tiled kernel and float64, and refuses in one line where it cannot run."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from megagraph.attention.backends import choose_kernel
from megagraph.attention.bias import DenseBias
from megagraph.attention.kernel import TILED, block_forward
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


def test_auto_is_tiled():
    assert choose_kernel("auto", "cpu", 8) is choose_kernel("tiled", "cuda", 8) is TILED


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
