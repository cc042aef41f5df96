"""Mixed precision: which parts compute in bfloat16, and that statistics do not."""

import pytest
import torch

from megagraph.attention.bias import DenseBias
from megagraph.attention.precision import low_precision
from megagraph.attention.scope import Scope
from megagraph.attention.slot import local_attention
from megagraph.config import ModelConfig
from megagraph.model.hierarchical import HierarchicalGT

N, D = 1024, 8


def attend(kind, q, k, v, bias):
    weight = torch.ones(1, 1)
    with low_precision("cpu", None):
        return local_attention(kind)(DenseBias.full(bias, 0))(q, k, v, weight, None)


def large_logits():
    """Scores near 360 that differ by hundredths: bfloat16 knows multiples of 2 there. All inputs are exact in it."""
    q, k = torch.zeros(1, 1, 1, D), torch.zeros(1, 1, N, D)
    q[..., 0], q[..., 1] = 32.0, 1.0
    k[..., 0], k[..., 1] = 32.0, (torch.arange(N) % 64) / 16
    v = ((torch.arange(N) % 64) / 32).repeat(D, 1).T[None, None].contiguous()
    return tuple(x.bfloat16() for x in (q, k, v)), torch.zeros(1, 1, 1, N)


def many_equal_keys():
    """A sum of 1024 ones: bfloat16 stops at 256. Half of the values are 1."""
    q, k = torch.zeros(1, 1, 1, D), torch.zeros(1, 1, N, D)
    v = (torch.arange(N) >= N // 2).expand(1, 1, D, N).transpose(2, 3)
    return (q.bfloat16(), k.bfloat16(), v.bfloat16()), torch.zeros(1, 1, 1, N)


def large_bias():
    """Structure that bfloat16 rounds away: 256 + i/16."""
    q, k = torch.zeros(1, 1, 1, D), torch.zeros(1, 1, N, D)
    v = ((torch.arange(N) % 64) / 32).repeat(D, 1).T[None, None].contiguous()
    return (q.bfloat16(), k.bfloat16(), v.bfloat16()), 256 + (torch.arange(N) % 64 / 16).expand(1, 1, 1, N)


def softmax_in(dtype, q, k, v, bias):
    """The same attention with scores and sums in `dtype`, key by key as a running sum."""
    scores = (q.to(dtype) @ k.to(dtype).transpose(2, 3)) * torch.tensor(D**-0.5, dtype=dtype) + bias.to(dtype)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    total, out = torch.zeros((), dtype=dtype), torch.zeros(D, dtype=dtype)
    for key in range(N):
        total = total + p[0, 0, 0, key]
        out = out + p[0, 0, 0, key] * v[0, 0, key].to(dtype)
    return out / total


@pytest.mark.parametrize("kind", ["tiled", "dense"])
@pytest.mark.parametrize("case", [large_logits, many_equal_keys, large_bias])
def test_statistics_are_float32(kind, case):
    (q, k, v), bias = case()
    truth = softmax_in(torch.float64, q, k, v, bias)
    out = attend(kind, q, k, v, bias)[0, 0, 0]
    assert out.dtype == torch.bfloat16
    assert (out.double() - truth).abs().max() <= 2**-8 * truth.abs().max(), "one rounding of the output"
    q, k, v = (x.float().requires_grad_() for x in (q, k, v))
    grads = torch.autograd.grad(attend(kind, q, k, v, bias).sum(), (q, k, v))
    half = tuple(x.detach().bfloat16().requires_grad_() for x in (q, k, v))
    half_grads = torch.autograd.grad(attend(kind, *half, bias).sum(), half)
    for got, want in zip(half_grads, grads, strict=True):
        assert got.dtype == torch.bfloat16
        # Feature 0 is common to all keys: backward multiplies it with the rounding of the saved output (`row_delta`).
        got, want = got[..., 1:].float(), want[..., 1:]
        assert (got - want).abs().max() <= 2**-7 * (want.abs().max() + 1e-6)


@pytest.mark.parametrize("case", [large_logits, many_equal_keys, large_bias])
def test_bfloat16_statistics_would_fail_here(case):
    (q, k, v), bias = case()
    truth = softmax_in(torch.float64, q, k, v, bias)
    wrong = softmax_in(torch.bfloat16, q, k, v, bias).double()
    assert (wrong - truth).abs().max() > 0.05 * truth.abs().max()


@pytest.mark.parametrize("global_tokens", [0, 1])
def test_which_parts_compute_in_half_precision(global_tokens):
    """Products in bfloat16; stream, norms, projection of structure, logits and weight gradients in float32."""
    config = ModelConfig(layers=2, heads=2, hidden=8, ffn=8, bias_channels=2, global_tokens=global_tokens)
    model = HierarchicalGT(config, torch.randn(9, 5), 3, recompute=1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    types = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: types.update({name: out.dtype}))
    received = []

    def slot(q, k, v, weight, dropout):
        assert not torch.is_autocast_enabled("cpu")
        received.append((q.dtype, k.dtype, v.dtype, weight.dtype))
        bias = torch.zeros(2, 2, 4 + global_tokens, 4 + global_tokens)
        return local_attention("tiled")(DenseBias.full(bias, global_tokens))(q, k, v, weight, dropout)

    rows = torch.arange(4 + global_tokens)
    with low_precision("cpu", torch.bfloat16):
        logits = model(torch.randint(0, 9, (2, 4)), Scope(slot, torch.arange(2), rows, rows, 1))
    logits.sum().backward()
    half = {"embed.project", *(f"layers.{n}.{p}" for n in (0, 1) for p in ("attention_out", "ffn_in", "ffn_out"))}
    full = {"", "embed", "head", "head.norm", "head.classify", "layers.0", "layers.1"}
    full |= {f"layers.{n}.{part}" for n in (0, 1) for part in ("attention_norm", "ffn_norm")}
    assert {name for name, dtype in types.items() if dtype == torch.bfloat16} - {"layers.0.qkv"} == half
    assert {name for name, dtype in types.items() if dtype == torch.float32} == full
    assert len(received) == 3, "the recomputed layer runs twice"
    assert set(received) == {(torch.bfloat16,) * 3 + (torch.float32,)}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
