"""Fused forward pass in Triton: dense channels, global distances and hash dropout in one kernel; backward is tiled.

Head dimensions below 16 are padded, statistics are float32. Needs triton (an optional extra); runs on the CPU under
its interpreter, which is how it is tested. Stores other than dense channels are served by the tiled forward.

Shapes: B sequences, H heads, S query rows, N key columns, D features per head, M bias channels, G global tokens.
"""

# Triton resolves annotations inside kernels: theirs are left out.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megagraph.attention.bias import BiasStore, DenseBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import Kernel, block_backward, block_forward, compute_dtype

BLOCK_ROWS, BLOCK_COLUMNS, MIN_DOT = 64, 64, 16


@triton.jit
def _keep(x, threshold):
    """The hash of `dropout`: xor-shift-multiply rounds on int32, then a threshold."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    x = x ^ ((x >> 16) & 0xFFFF)
    return x >= threshold


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, weight_ptr, channel_ptr, out_ptr, lse_ptr, batch_ptr, head_ptr, row_ptr, column_ptr,
    S, N, batch_stride, channel_stride, row_stride, first_row, first_column, scale, threshold, inverse_keep,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, G: tl.constexpr, GC: tl.constexpr,
    DROP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one sequence and head: all key blocks, with a running maximum."""
    rows, features = tl.program_id(0) * BS + tl.arange(0, BS), tl.arange(0, DP)
    place = tl.program_id(1)
    batch, head = place // H, place % H
    in_rows, in_features = rows[:, None] < S, features[None, :] < D
    q = tl.load(q_ptr + (place * S + rows[:, None]) * D + features[None, :], mask=in_rows & in_features, other=0.0)
    largest, total = tl.full((BS,), -1e30, tl.float32), tl.zeros((BS,), tl.float32)
    acc = tl.zeros((BS, DP), tl.float32)
    for start in range(0, N, BN):
        columns = start + tl.arange(0, BN)
        in_columns = columns[:, None] < N
        kv = (place * N + columns[:, None]) * D + features[None, :]
        k = tl.load(k_ptr + kv, mask=in_columns & in_features, other=0.0)
        v = tl.load(v_ptr + kv, mask=in_columns & in_features, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        inside = in_rows & (columns[None, :] < N)
        for m in tl.static_range(M):
            pair = batch * batch_stride + m * channel_stride + rows[:, None] * row_stride + columns[None, :]
            e = tl.load(channel_ptr + pair, mask=inside, other=0.0)
            s += tl.load(weight_ptr + head * (M + G) + m) * e
        for g in tl.static_range(G):
            distance = tl.load(weight_ptr + head * (M + G) + M + g)
            here = (columns[None, :] == first_column + g) & (g < GC)
            if G == 1:
                here = here & (rows[:, None] < first_row)
            else:
                here = here | ((rows[:, None] == first_row + g) & (columns[None, :] < first_column))
            s += tl.where(here, distance, 0.0)
        s = tl.where(columns[None, :] < N, s, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        p, shrink = tl.exp(s - new[:, None]), tl.exp(largest - new)
        total = total * shrink + tl.sum(p, 1)
        if DROP:
            code = tl.load(batch_ptr + batch) + tl.load(head_ptr + head)
            x = code + tl.load(row_ptr + rows, mask=rows < S, other=0)[:, None]
            x = x + tl.load(column_ptr + columns, mask=columns < N, other=0)[None, :]
            p = tl.where(_keep(x, threshold), p * inverse_keep, 0.0)
        acc = acc * shrink[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")
        largest = new
    out = (place * S + rows[:, None]) * D + features[None, :]
    tl.store(out_ptr + out, acc / total[:, None], mask=in_rows & in_features)
    tl.store(lse_ptr + place * S + rows, largest + tl.log(total), mask=rows < S)


def fused_forward(
    q_BHSD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    weight_HM: Tensor,
    bias: BiasStore,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `block_forward`: (out, log-sum-exp), float32; float64 and other stores go to the tiled forward."""
    dtype = compute_dtype(q_BHSD.dtype)
    B, H, S, D = q_BHSD.shape
    if dtype == torch.float64 or not isinstance(bias, DenseBias) or S == 0:
        return block_forward(q_BHSD, k_BHND, v_BHND, weight_HM, bias, dropout)
    N, tokens, channels = k_BHND.shape[2], bias.tokens, bias.channels_BMSN
    if channels.stride(3) != 1:
        channels = channels.contiguous()
    out, lse = (torch.empty(size, dtype=dtype, device=q_BHSD.device) for size in ((B, H, S, D), (B, H, S)))
    codes = [q_BHSD.new_zeros(1, dtype=torch.int32)] * 4 if dropout is None else dropout.codes(H)
    threshold, inverse_keep = (0, 1.0) if dropout is None else (dropout.threshold, dropout.scale)
    _forward[triton.cdiv(S, BLOCK_ROWS), B * H](
        q_BHSD.contiguous(), k_BHND.contiguous(), v_BHND.contiguous(), weight_HM.to(dtype).contiguous(), channels,
        out, lse, *codes, S, N, *channels.stride()[:3], tokens.num_rows - tokens.count, N - tokens.columns,
        D**-0.5, threshold, inverse_keep,
        H=H, D=D, DP=max(MIN_DOT, triton.next_power_of_2(D)), M=channels.shape[1], G=tokens.count, GC=tokens.columns,
        DROP=dropout is not None, BS=BLOCK_ROWS, BN=BLOCK_COLUMNS,
    )  # fmt: skip
    return out, lse


FUSED = Kernel(fused_forward, block_backward)
