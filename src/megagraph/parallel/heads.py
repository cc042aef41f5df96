"""All-to-all attention (TorchGT, DeepSpeed-Ulysses): from a part of the tokens and all heads to all tokens and a part
of the heads, full attention, and back. The baseline that GA-CP is measured against.

Every rank needs the bias rows of all tokens, whatever the number of ranks: they are gathered once per micro-batch.
Super nodes are replicated: a rank takes its heads of its own copies and sends the result of these heads to all.

Shapes: B sequences, H heads, P ranks, n own regular tokens, N_s super nodes, S = n + N_s local tokens, N tokens,
D features per head, M bias channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagraph.attention.bias import BiasStore, DenseBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import TILED, Kernel
from megagraph.attention.slot import Attend, tiled_attention
from megagraph.config import UserError


def check_heads(num_heads: int, cp: int) -> None:
    """`UserError` unless the ranks divide the heads."""
    if num_heads % cp:
        raise UserError(f"heads={num_heads} do not divide over cp={cp} ranks: choose cp among the divisors of heads")


def all_to_all_attention(
    bias: BiasStore, sizes: list[int], num_tokens: int, group: dist.ProcessGroup, kernel: Kernel = TILED
) -> Attend:
    """Fill the attention slot for one rank; queries are those of all local tokens.

    Args:
        bias: dense store of the local rows against all columns; `UserError` for another store.
        sizes: regular tokens of each rank (ragged and empty shards allowed).
        num_tokens: N; those after the regular ones are the super nodes.
        group: the ranks.
        kernel: computes the attention of the rank's heads.
    """
    if not isinstance(bias, DenseBias):
        raise UserError(f"attention=all_to_all gathers dense bias rows, not {type(bias).__name__}: use a dense store")
    full, size, rank = _gather_rows(bias, sizes, group), dist.get_world_size(group), dist.get_rank(group)

    def attend(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor, dropout: AttentionDropout | None) -> Tensor:
        heads = q.shape[1] // size
        mine = slice(rank * heads, (rank + 1) * heads)
        if dropout is not None:
            rows_N = torch.arange(num_tokens, device=q.device)
            dropout = replace(dropout, rows_S=rows_N, first_head=mine.start)
        every_q, every_k, every_v = _ToHeads.apply(torch.stack([q, k, v]), sizes, group).unbind(0)
        out = tiled_attention(full, kernel)(every_q, every_k, every_v, weight_HM[mine], dropout)
        return _ToTokens.apply(out.unsqueeze(0), sizes, group).squeeze(0)

    return attend


def _gather_rows(bias: DenseBias, sizes: list[int], group: dist.ProcessGroup) -> DenseBias:
    """The store of all N rows, from the regular rows of each rank and the own copy of the super rows."""
    own = sizes[dist.get_rank(group)]
    channels = bias.channels_BMSN
    padded = channels.new_zeros(*channels.shape[:2], max(sizes), channels.shape[3])
    padded[:, :, :own] = channels[:, :, :own]
    everyone = padded.new_empty(len(sizes), *padded.shape)
    dist.all_gather_into_tensor(everyone.flatten(0, 1), padded, group)
    rows = [everyone[rank, :, :, :count] for rank, count in enumerate(sizes)]
    return DenseBias.full(torch.cat([*rows, channels[:, :, own:]], 2), bias.tokens.count)


def _exchange(parts: list[Tensor], shapes: list[tuple[int, ...]], group: dist.ProcessGroup) -> list[Tensor]:
    """Send part i to rank i; receive from rank i a tensor of shape i."""
    send = torch.cat([part.flatten() for part in parts])
    counts = [torch.Size(shape).numel() for shape in shapes]
    receive = send.new_empty(sum(counts))
    dist.all_to_all_single(receive, send, counts, [part.numel() for part in parts], group)
    return [flat.view(shape) for flat, shape in zip(receive.split(counts), shapes, strict=True)]


def _to_heads(x_XBHSD: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Regular tokens of all ranks, own super nodes, for this rank's heads: [X, B, H/P, N, D]."""
    X, B, H, _, D = x_XBHSD.shape
    rank, heads = dist.get_rank(group), H // len(sizes)
    groups = x_XBHSD.split(heads, 2)
    own = sizes[rank]
    arrived = _exchange([g[..., :own, :] for g in groups], [(X, B, heads, n, D) for n in sizes], group)
    return torch.cat([*arrived, groups[rank][..., own:, :]], 3)


def _regular_to_tokens(x_XBGND: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Own regular tokens for all heads [X, B, H, n, D]; the inverse of the exchange in `_to_heads`."""
    X, B, heads, _, D = x_XBGND.shape
    own = sizes[dist.get_rank(group)]
    regular = x_XBGND[..., : sum(sizes), :].split(sizes, 3)
    return torch.cat(_exchange(list(regular), [(X, B, heads, own, D)] * len(sizes), group), 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_XBHSD: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rest = sizes, group
        return _to_heads(x_XBHSD, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """A super node's gradient is a sum over ranks: this rank contributes its heads, others theirs."""
        (dx,) = grads
        sizes, group = ctx.rest
        regular = _regular_to_tokens(dx, sizes, group)
        supers = dx[..., sum(sizes) :, :]
        X, B, H, _, D = regular.shape
        result = regular.new_zeros(X, B, H, regular.shape[3] + supers.shape[3], D)
        result[..., : regular.shape[3], :] = regular
        first = dist.get_rank(group) * supers.shape[2]
        result[:, :, first : first + supers.shape[2], regular.shape[3] :] = supers
        return result, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_XBGND: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rest = sizes, group
        regular = _regular_to_tokens(x_XBGND, sizes, group)
        supers = x_XBGND[..., sum(sizes) :, :].contiguous()
        everyone = supers.new_empty(len(sizes), *supers.shape)
        dist.all_gather_into_tensor(everyone.flatten(0, 1), supers, group)
        return torch.cat([regular, torch.cat(list(everyone), 2)], 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Every rank holds a share of a super node's upstream gradient: the shares of this rank's heads are summed."""
        (dout,) = grads
        sizes, group = ctx.rest
        result = _to_heads(dout, sizes, group)
        own, num_regular = sizes[dist.get_rank(group)], sum(sizes)
        shares = torch.stack(dout[..., own:, :].split(result.shape[2], 2))
        summed = torch.empty_like(shares[0])
        dist.reduce_scatter_tensor(summed, shares.flatten(0, 1), group=group)
        result[..., num_regular:, :] = summed
        return result, None, None
