"""The attention slot of the model and its single-process fillings, `dense` and `tiled`.

A model calls `attend(q, k, v, weight, dropout)`, where the queries may be those of the first local rows only, and knows
nothing else: the bias of the micro-batch, the kernel and any exchange between ranks are bound in the callable. It is
called with autocast off: q, k and v may be bfloat16, scores and softmax are float32 in every filling.

Shapes: B sequences, H heads, S local query rows, N keys, D features per head, M bias channels and global columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megagraph.attention.bias import BiasStore
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import TILED, Kernel, compute_dtype, row_delta

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, AttentionDropout | None], Tensor]
"""The slot: q, k, v [B, H, S, D] of the local tokens and the bias projection [H, M] to out [B, H, S, D]."""


def dense_attention(bias: BiasStore) -> Attend:
    """Materialised attention, scores and probabilities kept for backward: the cost of the baselines."""

    def attend(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor, dropout: AttentionDropout | None) -> Tensor:
        given, dtype = q.dtype, compute_dtype(q.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        scores_BHSN = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        scores_BHSN = scores_BHSN + _MaterialisedBias.apply(weight_HM, bias, scores_BHSN.shape, scores_BHSN.dtype)
        p_BHSN = scores_BHSN.softmax(-1)
        if dropout is not None:
            everything = slice(0, p_BHSN.shape[0]), slice(0, p_BHSN.shape[2])
            p_BHSN = p_BHSN * dropout.keep(q.shape[1], *everything) * dropout.scale
        return torch.matmul(p_BHSN, v).to(given)

    return attend


class _MaterialisedBias(torch.autograd.Function):
    """The per-head bias [B, H, S, N] of a store, differentiable in the projection."""

    @staticmethod
    def forward(ctx: Any, weight_HM: Tensor, bias: BiasStore, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(weight_HM)
        ctx.bias = bias
        scores = torch.empty(shape, dtype=dtype, device=weight_HM.device)
        bias.write(scores, weight_HM, slice(0, shape[0]), slice(0, shape[2]))
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (weight_HM,) = ctx.saved_tensors
        (dscores,) = grads
        dweight = torch.zeros_like(weight_HM)
        ctx.bias.collect(dweight, dscores.contiguous(), slice(0, dscores.shape[0]), slice(0, dscores.shape[2]))
        return dweight, None, None, None


def tiled_attention(bias: BiasStore, kernel: Kernel = TILED) -> Attend:
    """Exact attention with O(N D) saved memory: scores recomputed in backward, by the tiles or another backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor, dropout: AttentionDropout | None) -> Tensor:
        return _BlockAttention.apply(q, k, v, weight_HM, bias, dropout, kernel)

    return attend


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight_HM: Tensor,
        bias: BiasStore,
        dropout: AttentionDropout | None,
        kernel: Kernel,
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, weight_HM, bias, dropout)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, weight_HM, out, lse)
        ctx.rest = bias, dropout, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight_HM, out, lse = ctx.saved_tensors
        bias, dropout, kernel = ctx.rest
        (dout,) = grads
        dweight = torch.zeros_like(weight_HM, dtype=lse.dtype)
        delta = row_delta(dout, out, lse.dtype)
        dq, dk, dv = kernel.backward(dout, q, k, v, weight_HM, bias, lse, delta, dweight, dropout)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dweight.to(weight_HM.dtype), None, None, None


def local_attention(attention: str, kernel: Kernel = TILED) -> Callable[[BiasStore], Attend]:
    """What fills the slot on a rank that holds whole sequences: `dense`, or the kernel (`tiled`, `all_to_all`)."""
    if attention == "dense":
        return dense_attention
    return lambda bias: tiled_attention(bias, kernel)
