"""Exact attention with structural bias in O(N) memory: row tiles over all keys of a block, recomputed backward.

    scores = Q K^T / sqrt(d) + bias,   out = dropout(softmax(scores)) V

Scores exist for one tile at a time and the bias is never stored per head. A block returns its log-sum-exp, so that
blocks over disjoint key sets merge exactly (ring attention). Products with 8 to 16 features per head are several times
faster head-dim-major (V^T P^T instead of P V), so K^T, V^T and what is made from them are kept that way for the
sequences of a tile (`parallel-runtime.md` 3.3). Half precision is computed in float32: only inputs are stored in it.

Shapes: B sequences, H heads, S query rows, N key columns, D features per head, M bias channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megagraph.attention.bias import BiasStore
from megagraph.attention.dropout import AttentionDropout, device_type

TILE_BYTES = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Scores of a tile: about a core's cache, or enough rows to fill a GPU."""
MIN_TILE_ROWS = 16
DELTA_SEQUENCES = 32
SAFE_SCORE = 40.0
"""Exponentials and sums of scores within +-40 neither overflow nor vanish in float32: no maximum to subtract."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of scores, statistics and partial results: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def tile_shape(q_BHSD: Tensor, num_keys: int, tile_bytes: int | None = None) -> tuple[int, int]:
    """(sequences, rows) of a tile: several whole sequences if they fit, else at least 16 rows of one."""
    B, H, S, _ = q_BHSD.shape
    tile_bytes = tile_bytes or TILE_BYTES.get(device_type(q_BHSD), TILE_BYTES["cpu"])
    row_bytes = max(1, H * num_keys * compute_dtype(q_BHSD.dtype).itemsize)
    if row_bytes * S <= tile_bytes:
        return max(1, min(B, tile_bytes // max(1, row_bytes * S))), max(1, S)
    return 1, max(1, min(S, max(MIN_TILE_ROWS, tile_bytes // row_bytes)))


def _slices(count: int, step: int, like: Tensor) -> Iterator[slice]:
    """0..count in pieces. Where nothing is computed, first, second and last hold as much at once as all: a piece meets
    what is left of the one before, and all but the last are equal."""
    starts = range(0, count, step)
    for start in sorted({*starts[:2], *starts[-1:]}) if isinstance(like, FakeTensor) else starts:
        yield slice(start, min(start + step, count))


def _head_dim_major(x_BHND: Tensor, dtype: torch.dtype) -> Tensor:
    """[B*H, D, N], contiguous."""
    B, H, N, D = x_BHND.shape
    return x_BHND.transpose(2, 3).to(dtype).contiguous().view(B * H, D, N)


def _scores_are_small(q_BHSD: Tensor, kT: Tensor, weight_HM: Tensor, bias: BiasStore) -> bool:
    """Whether |q||k| / sqrt(d) + |bias| proves that every score is within `SAFE_SCORE`; |q| <= sqrt(d) max|q_i|.

    Asked on the CPU only, where it saves two passes over each tile; elsewhere it would make the host wait.
    """
    if device_type(q_BHSD) != "cpu" or q_BHSD.numel() == 0:
        return False
    product = q_BHSD.abs().max() * kT.square().sum(1).max().sqrt()
    return bool(product + weight_HM.abs().sum(1).max() * bias.largest < SAFE_SCORE)


def block_forward(
    q_BHSD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    weight_HM: Tensor,
    bias: BiasStore,
    dropout: AttentionDropout | None = None,
    tile_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the rows over one block of keys: (out [B,H,S,D], log-sum-exp [B,H,S] before dropout).

    Both are of `compute_dtype`, so that blocks merge without losing digits. The rows may be a prefix of the bias rows.
    """
    B, H, S, D = q_BHSD.shape
    N, dtype = k_BHND.shape[2], compute_dtype(q_BHSD.dtype)
    batch_step, row_step = tile_shape(q_BHSD, N, tile_bytes)
    weight_HM = weight_HM.to(dtype)
    outT_BHDS = torch.empty(B, H, D, S, dtype=dtype, device=q_BHSD.device)
    lse_BHS = torch.empty(B, H, S, dtype=dtype, device=q_BHSD.device)
    p_buffer = lse_BHS.new_empty(batch_step * H * row_step * N)
    keep_buffer = None if dropout is None else torch.empty_like(p_buffer)
    for batch in _slices(B, batch_step, q_BHSD):
        kT, vT = _head_dim_major(k_BHND[batch], dtype), _head_dim_major(v_BHND[batch], dtype)
        small = _scores_are_small(q_BHSD[batch], kT, weight_HM, bias)
        for rows in _slices(S, row_step, q_BHSD):
            q = q_BHSD[batch, :, rows]
            b, s = q.shape[0], q.shape[2]
            p = p_buffer[: b * H * s * N].view(b, H, s, N)
            bias.write(p, weight_HM, batch, rows)
            flat = p.view(b * H, s, N).baddbmm_(q.to(dtype).reshape(b * H, s, D), kT, alpha=D**-0.5)
            largest = None if small else flat.amax(-1)
            if largest is not None:
                flat.sub_(largest.unsqueeze(-1))
            total = flat.exp_().sum(-1)
            lse_BHS[batch, :, rows] = (total.log() if largest is None else largest.add_(total.log())).view(b, H, s)
            if dropout is not None and keep_buffer is not None:
                p.mul_(dropout.keep(H, batch, rows, out=keep_buffer[: p.numel()].view_as(p)))
                total.mul_(1 - dropout.rate)
            outT = torch.bmm(vT, flat.transpose(1, 2)).div_(total.unsqueeze(1))
            outT_BHDS[batch, ..., rows] = outT.view(b, H, D, s)
    return outT_BHDS.transpose(2, 3), lse_BHS


def block_backward(
    dout_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    weight_HM: Tensor,
    bias: BiasStore,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    dweight_HM: Tensor,
    dropout: AttentionDropout | None = None,
    tile_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one block, of `compute_dtype`; dweight is added to in place.

    `lse` and `delta` = rowsum(dout * out) are those of the softmax over ALL keys; the block's share is then exact by
    itself, which is what lets a ring rank work on one visiting block at a time.
    """
    B, H, S, D = q_BHSD.shape
    N, dtype = k_BHND.shape[2], compute_dtype(q_BHSD.dtype)
    batch_step, row_step = tile_shape(q_BHSD, N, tile_bytes)
    weight_HM, scale = weight_HM.to(dtype), D**-0.5
    dqT, dkT, dvT = (torch.empty(B, H, D, size, dtype=dtype, device=q_BHSD.device) for size in (S, N, N))
    p_buffer = dqT.new_empty(batch_step * H * row_step * N)
    ds_buffer = torch.empty_like(p_buffer)
    keep_buffer = None if dropout is None else torch.empty_like(p_buffer)
    for batch in _slices(B, batch_step, q_BHSD):
        kT, vT = _head_dim_major(k_BHND[batch], dtype), _head_dim_major(v_BHND[batch], dtype)
        dkT_part, dvT_part = (x[batch].view(-1, D, N) for x in (dkT, dvT))
        if S == 0:
            dkT_part.zero_(), dvT_part.zero_()
        for rows in _slices(S, row_step, q_BHSD):
            q, dout = q_BHSD[batch, :, rows].to(dtype), dout_BHSD[batch, :, rows].to(dtype)
            b, s = q.shape[0], q.shape[2]
            size = b * H * s * N
            p, ds = (buffer[:size].view(b * H, s, N) for buffer in (p_buffer, ds_buffer))
            bias.write(p.view(b, H, s, N), weight_HM, batch, rows)
            q, dout = q.reshape(b * H, s, D), dout.reshape(b * H, s, D)
            p.baddbmm_(q, kT, alpha=scale).sub_(lse_BHS[batch, :, rows].reshape(b * H, s, 1)).exp_()
            torch.bmm(dout, vT, out=ds)
            keep = None
            if dropout is not None and keep_buffer is not None:
                keep = dropout.keep(H, batch, rows, out=keep_buffer[:size].view(b, H, s, N)).view_as(p)
                ds.mul_(keep).mul_(dropout.scale)
            ds.sub_(delta_BHS[batch, :, rows].reshape(b * H, s, 1)).mul_(p)
            if keep is not None:
                p.mul_(keep)
            share = 0.0 if rows.start == 0 else 1.0
            dvT_part.baddbmm_(dout.transpose(1, 2), p, beta=share, alpha=1.0 if dropout is None else dropout.scale)
            bias.collect(dweight_HM, ds.view(b, H, s, N), batch, rows)
            dqT[batch, ..., rows] = torch.bmm(kT, ds.transpose(1, 2)).mul_(scale).view(b, H, D, s)
            dkT_part.baddbmm_(q.transpose(1, 2), ds, beta=share, alpha=scale)
    return dqT.transpose(2, 3), dkT.transpose(2, 3), dvT.transpose(2, 3)


def row_delta(dout_BHSD: Tensor, out_BHSD: Tensor, dtype: torch.dtype) -> Tensor:
    """rowsum(dout * out) [B, H, S] in `dtype`, what the softmax backward subtracts."""
    delta_BHS = torch.empty(dout_BHSD.shape[:3], dtype=dtype, device=dout_BHSD.device)
    for batch in _slices(len(delta_BHS), DELTA_SEQUENCES, dout_BHSD):
        torch.sum(dout_BHSD[batch].to(dtype) * out_BHSD[batch], -1, out=delta_BHS[batch])
    return delta_BHS


def merge(out_BHSD: Tensor, lse_BHS: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial softmaxes over disjoint key sets (paper III-A1, mechanism 3); the first is overwritten."""
    lse = torch.logaddexp(lse_BHS, other_lse)
    out_BHSD.mul_((lse_BHS - lse).exp_().unsqueeze(-1))
    out_BHSD.add_(other_out.mul_((other_lse - lse).exp_().unsqueeze(-1)))
    return out_BHSD, lse


@dataclass(frozen=True)
class Kernel:
    """Forward and backward of one block: what a backend provides, with the signatures of the tiled functions."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


TILED = Kernel(block_forward, block_backward)
