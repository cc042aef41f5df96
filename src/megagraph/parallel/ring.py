"""Graph-aware context parallelism (paper III-A1): ring attention that keeps structure and rows together.

A rank owns the queries of its regular tokens and of all super nodes. Its bias rows hold every column; when the
keys of rank j visit, columns of shard j are sliced, and the bias enters before the online softmax. Keys and values of
super nodes never travel: every rank holds them, and counts them once (a plain ring would count them cp times).

Gradients follow the partial-sum convention: each rank differentiates its own share of the loss, and anything
replicated (weights, super nodes) has the SUM over ranks as its gradient. Softmax backward is linear in the upstream
gradient, so no factor appears in here; the loss has to count each node once.

Shapes: B sequences, H heads, n own regular tokens, N_s super nodes, S = n + N_s local tokens, D features per head.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagraph.attention.bias import BiasStore
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import block_backward, block_forward, merge
from megagraph.attention.slot import Attend

Block = tuple[Tensor, Tensor]


class Ring:
    """Non-blocking exchange with the ring neighbours of a group, one flat buffer per hop."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def shift(self, send: Tensor, receive: Tensor) -> list[dist.Work]:
        """Start sending to the next rank and receiving from the previous one."""
        operations = [
            dist.P2POp(dist.isend, send, self._next, self.group),
            dist.P2POp(dist.irecv, receive, self._previous, self.group),
        ]
        return dist.batch_isend_irecv(operations)


def wait(works: list[dist.Work]) -> None:
    """Wait for all."""
    for work in works:
        work.wait()


def ring_attention(bias: BiasStore, sizes: list[int], num_tokens: int, ring: Ring) -> Attend:
    """Fill the attention slot for one rank of a context-parallel group.

    Args:
        bias: store of the local rows against all columns.
        sizes: regular tokens of each rank (ragged and empty shards allowed).
        num_tokens: N, columns in all; those after the regular ones are the super nodes.
        ring: the group.
    """
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    spans = [*pairwise(starts), (starts[-1], num_tokens)]
    stores = [bias.columns(*span) for span in spans]

    def attend(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor, dropout: AttentionDropout | None) -> Tensor:
        drops = [None if dropout is None else dropout.columns(*span) for span in spans]
        blocks = list(zip(stores, drops, strict=True))
        return _RingAttention.apply(q, k, v, weight_HM, blocks, sizes, ring)

    return attend


def _travelling(k: Tensor, v: Tensor, own: int, capacity: int) -> Tensor:
    """K and V of the own regular tokens in one buffer [2, B, H, capacity, D], padded to the largest shard."""
    B, H, _, D = k.shape
    buffer = k.new_zeros(2, B, H, capacity, D)
    buffer[0, :, :, :own], buffer[1, :, :, :own] = k[:, :, :own], v[:, :, :own]
    return buffer


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight_HM: Tensor,
        blocks: list[tuple[BiasStore, AttentionDropout | None]],
        sizes: list[int],
        ring: Ring,
    ) -> Tensor:
        own = sizes[ring.rank]
        current = _travelling(k, v, own, max(sizes))
        arriving = torch.empty_like(current)
        state: Block | None = None

        def absorb(keys: Tensor, values: Tensor, block: int) -> None:
            nonlocal state
            bias, dropout = blocks[block]
            part = block_forward(q, keys, values, weight_HM, bias, dropout)
            state = part if state is None else merge(*state, *part)

        for hop in range(ring.size):
            visitor = (ring.rank - hop) % ring.size
            works = ring.shift(current, arriving) if hop < ring.size - 1 else []
            if count := sizes[visitor]:
                absorb(current[0, :, :, :count], current[1, :, :, :count], visitor)
            if hop == 0 and k.shape[2] > own:
                absorb(k[:, :, own:], v[:, :, own:], len(sizes))
            wait(works)
            current, arriving = arriving, current
        assert state is not None, "a sequence has at least one token"
        out, lse = state
        ctx.save_for_backward(q, k, v, weight_HM, out, lse)
        ctx.rest = blocks, sizes, ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight_HM, out, lse = ctx.saved_tensors
        blocks, sizes, ring = ctx.rest
        own = sizes[ring.rank]
        dout = grads[0].contiguous()
        delta = (dout * out).sum(-1)
        dweight, dq = torch.zeros_like(weight_HM), torch.zeros_like(q)

        def share(keys: Tensor, values: Tensor, block: int) -> Block:
            bias, dropout = blocks[block]
            part, dk, dv = block_backward(dout, q, keys, values, weight_HM, bias, lse, delta, dweight, dropout)
            dq.add_(part)
            return dk, dv

        dk_full, dv_full = torch.zeros_like(k), torch.zeros_like(v)
        if k.shape[2] > own:
            dk_full[:, :, own:], dv_full[:, :, own:] = share(k[:, :, own:], v[:, :, own:], len(sizes))
        home = _ring_backward(_travelling(k, v, own, max(sizes)), share, sizes, ring)
        dk_full[:, :, :own], dv_full[:, :, :own] = home[0, :, :, :own], home[1, :, :, :own]
        return dq, dk_full, dv_full, dweight, None, None, None


def _ring_backward(current: Tensor, share: Any, sizes: list[int], ring: Ring) -> Tensor:
    """Keys and values visit every rank; their gradients follow one hop behind and arrive home after the last."""
    arriving = torch.empty_like(current)
    gathered = torch.empty_like(current)
    pending: list[dist.Work] = []
    outgoing = current
    for hop in range(ring.size):
        visitor = (ring.rank - hop) % ring.size
        works = ring.shift(current, arriving) if hop < ring.size - 1 else []
        local = torch.zeros_like(current)
        if count := sizes[visitor]:
            local[0, :, :, :count], local[1, :, :, :count] = share(
                current[0, :, :, :count], current[1, :, :, :count], visitor
            )
        wait(pending)
        if hop:
            local += gathered
        outgoing, gathered = local, torch.empty_like(current)
        pending = ring.shift(outgoing, gathered) if ring.size > 1 else []
        wait(works)
        current, arriving = arriving, current
    wait(pending)
    return gathered if ring.size > 1 else outgoing
