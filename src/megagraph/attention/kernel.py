"""Exact attention with structural bias in O(N) memory: row tiles over all keys of a block, recomputed backward.

    scores = Q K^T / sqrt(d) + bias,   out = dropout(softmax(scores)) V

Scores exist for one tile at a time and the bias is never stored per head. A block returns its log-sum-exp, so that
blocks over disjoint key sets merge exactly (ring attention). K^T, V^T and their gradients are kept head-dim-major:
with 8 to 16 features per head these thin products are several times faster that way (`parallel-runtime.md` 3.3).

Shapes: B sequences, H heads, S query rows, N key columns, D features per head, M bias channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megagraph.attention.bias import BiasStore
from megagraph.attention.dropout import AttentionDropout

TILE_BYTES = 1 << 21
MIN_TILE_ROWS = 16
Tile = tuple[slice, slice]


def tile_shape(q_BHSD: Tensor, num_keys: int, tile_bytes: int) -> tuple[int, int]:
    """(sequences, rows) of a tile: several whole sequences if they fit, else at least 16 rows of one."""
    B, H, S, _ = q_BHSD.shape
    row_bytes = max(1, H * num_keys * q_BHSD.element_size())
    if row_bytes * S <= tile_bytes:
        return max(1, min(B, tile_bytes // max(1, row_bytes * S))), max(1, S)
    return 1, max(1, min(S, max(MIN_TILE_ROWS, tile_bytes // row_bytes)))


def _tiles(B: int, S: int, shape: tuple[int, int]) -> Iterator[Tile]:
    for b in range(0, B, shape[0]):
        for s in range(0, S, shape[1]):
            yield slice(b, min(b + shape[0], B)), slice(s, min(s + shape[1], S))


def _scores(buffer: Tensor, q_bHsD: Tensor, kT_bHDN: Tensor, weight: Tensor, bias: BiasStore, tile: Tile) -> Tensor:
    """The scores of a tile, written into `buffer`: bias by one product, then QK^T added in place."""
    b, h, s, d = q_bHsD.shape
    n = kT_bHDN.shape[-1]
    scores = buffer[: b * h * s * n].view(b, h, s, n)
    bias.write(scores, weight, *tile)
    scores.view(b * h, s, n).baddbmm_(q_bHsD.reshape(b * h, s, d), kT_bHDN.reshape(b * h, d, n), alpha=d**-0.5)
    return scores


def block_forward(
    q_BHSD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    weight_HM: Tensor,
    bias: BiasStore,
    dropout: AttentionDropout | None = None,
    tile_bytes: int = TILE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Attention of the rows over one block of keys: (out [B,H,S,D], log-sum-exp [B,H,S] before dropout)."""
    B, H, S, D = q_BHSD.shape
    N = k_BHND.shape[2]
    shape = tile_shape(q_BHSD, N, tile_bytes)
    kT_BHDN, vT_BHDN = k_BHND.transpose(2, 3).contiguous(), v_BHND.transpose(2, 3).contiguous()
    out_BHSD, lse_BHS = q_BHSD.new_empty(B, H, S, D), q_BHSD.new_empty(B, H, S)
    buffer = q_BHSD.new_empty(shape[0] * H * shape[1] * N)
    for batch, rows in _tiles(B, S, shape):
        p = _scores(buffer, q_BHSD[batch, :, rows], kT_BHDN[batch], weight_HM, bias, (batch, rows))
        largest = p.amax(-1, keepdim=True)
        p.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)
        if dropout is not None:
            p.mul_(dropout.keep(H, batch, rows)).mul_(dropout.scale)
        vT = vT_BHDN[batch].reshape(-1, D, N)
        product = torch.bmm(p.view(-1, p.shape[2], N), vT.transpose(1, 2)).view(p.shape[0], H, p.shape[2], D)
        out_BHSD[batch, :, rows] = product.div_(total)
        lse_BHS[batch, :, rows] = largest.add_(total.log_()).squeeze(-1)
    return out_BHSD, lse_BHS


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
    tile_bytes: int = TILE_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one block; dweight is added to in place.

    `lse` and `delta` = rowsum(dout * out) are those of the softmax over ALL keys; the block's share is then exact by
    itself, which is what lets a ring rank work on one visiting block at a time.
    """
    B, H, S, D = q_BHSD.shape
    N = k_BHND.shape[2]
    shape = tile_shape(q_BHSD, N, tile_bytes)
    kT_BHDN, vT_BHDN = k_BHND.transpose(2, 3).contiguous(), v_BHND.transpose(2, 3).contiguous()
    dq_BHSD, dkT_BHDN, dvT_BHDN = q_BHSD.new_empty(B, H, S, D), torch.zeros_like(kT_BHDN), torch.zeros_like(vT_BHDN)
    p_buffer = q_BHSD.new_empty(shape[0] * H * shape[1] * N)
    dp_buffer = torch.empty_like(p_buffer)
    for batch, rows in _tiles(B, S, shape):
        q, dout = q_BHSD[batch, :, rows], dout_BHSD[batch, :, rows]
        p = _scores(p_buffer, q, kT_BHDN[batch], weight_HM, bias, (batch, rows))
        p.sub_(lse_BHS[batch, :, rows, None]).exp_()
        b, _, s, _ = p.shape
        flat = p.view(b * H, s, N)
        q3, dout3 = q.reshape(b * H, s, D), dout.reshape(b * H, s, D)
        dp = torch.bmm(dout3, vT_BHDN[batch].reshape(b * H, D, N), out=dp_buffer[: p.numel()].view(b * H, s, N))
        dropped = flat
        if dropout is not None:
            keep = dropout.keep(H, batch, rows).view_as(flat)
            dp.mul_(keep).mul_(dropout.scale)
            dropped = (flat * keep).mul_(dropout.scale)
        dvT_BHDN[batch].view(b * H, D, N).baddbmm_(dout3.transpose(1, 2), dropped)
        ds = dp.sub_(delta_BHS[batch, :, rows].reshape(b * H, s, 1)).mul_(flat)
        bias.collect(dweight_HM, ds.view(b, H, s, N), batch, rows)
        k3 = kT_BHDN[batch].reshape(b * H, D, N).transpose(1, 2)
        dq_BHSD[batch, :, rows] = torch.bmm(ds, k3).mul_(D**-0.5).view(b, H, s, D)
        dkT_BHDN[batch].view(b * H, D, N).baddbmm_(q3.transpose(1, 2), ds, alpha=D**-0.5)
    return dq_BHSD, dkT_BHDN.transpose(2, 3), dvT_BHDN.transpose(2, 3)


def merge(out_BHSD: Tensor, lse_BHS: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial softmaxes over disjoint key sets (paper III-A1, mechanism 3); the first is overwritten."""
    lse = torch.logaddexp(lse_BHS, other_lse)
    out_BHSD.mul_((lse_BHS - lse).exp_().unsqueeze(-1))
    out_BHSD.add_(other_out.mul_((other_lse - lse).exp_().unsqueeze(-1)))
    return out_BHSD, lse
