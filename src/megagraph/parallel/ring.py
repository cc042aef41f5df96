"""Graph-aware context parallelism (paper III-A1): ring attention that keeps structure and rows together.

A rank owns the queries of its regular tokens and of all super nodes. Its bias rows hold every column; when the
keys of rank j visit, columns of shard j are sliced, and the bias enters before the online softmax. Keys and values of
super nodes never travel: every rank holds them, and counts them once (a plain ring would count them cp times).

Gradients follow the partial-sum convention: each rank differentiates its own share of the loss, and anything
replicated (weights, super nodes) has the SUM over ranks as its gradient. Softmax backward is linear in the upstream
gradient, so no factor appears in here; the loss has to count each node once.

What travels is of the type of k and v, also their gradients; in bfloat16 each hop rounds the sum that it carries, which
every rank adds up in float32.

Shapes: B sequences, H heads, n own regular tokens, N_s super nodes, S = n + N_s local tokens, D features per head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megagraph.attention.bias import BiasStore
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import TILED, Kernel, merge, row_delta
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


def ring_attention(
    bias: BiasStore,
    sizes: list[int],
    num_tokens: int,
    ring: Ring,
    exchange: Literal["ring", "allgather"] = "ring",
    kernel: Kernel = TILED,
) -> Attend:
    """Fill the attention slot for one rank of a context-parallel group.

    Args:
        bias: store of the local rows against all columns.
        sizes: regular tokens of each rank (ragged and empty shards allowed).
        num_tokens: N, columns in all; those after the regular ones are the super nodes.
        ring: the group.
        exchange: `ring` passes blocks on while computing; `allgather` fetches all at once: fewer messages, more memory.
        kernel: computes one block.
    """
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    spans = [*pairwise(starts), (starts[-1], num_tokens)]
    stores = [bias.columns(*span) for span in spans]

    def attend(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor, dropout: AttentionDropout | None) -> Tensor:
        drops = [None if dropout is None else dropout.columns(*span) for span in spans]
        setting = _Setting(list(zip(stores, drops, strict=True)), sizes, ring, exchange, kernel)
        return _RingAttention.apply(q, k, v, weight_HM, setting)

    return attend


@dataclass(frozen=True)
class _Setting:
    """Bias and dropout of each rank's block and, last, of the super nodes; shard sizes; how blocks travel."""

    blocks: list[tuple[BiasStore, AttentionDropout | None]]
    sizes: list[int]
    ring: Ring
    exchange: str
    kernel: Kernel

    @property
    def own(self) -> int:
        return self.sizes[self.ring.rank]

    def travelling(self, k: Tensor, v: Tensor) -> Tensor:
        """K and V of the own regular tokens in one buffer [2, B, H, n_max, D], padded to the largest shard."""
        B, H, _, D = k.shape
        buffer = k.new_zeros(2, B, H, max(self.sizes), D)
        buffer[0, :, :, : self.own], buffer[1, :, :, : self.own] = k[:, :, : self.own], v[:, :, : self.own]
        return buffer

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start fetching the buffers of all ranks [P, 2, B, H, n_max, D]; the second says when to wait for them."""
        mine = self.travelling(k, v)
        everyone = mine.new_empty(self.ring.size, *mine.shape)
        work = dist.all_gather_into_tensor(everyone.flatten(0, 1), mine, self.ring.group, async_op=True)
        pending: list[Any] = [mine, work]  # what is sent lives until then, whatever the backend's references do

        def wait_for_all() -> None:
            pending.pop().wait()
            pending.clear()

        return everyone, wait_for_all


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor, setting: _Setting) -> Tensor:
        state: Block | None = None

        def absorb(keys: Tensor, values: Tensor, block: int) -> None:
            nonlocal state
            bias, dropout = setting.blocks[block]
            if keys.shape[2]:
                part = setting.kernel.forward(q, keys, values, weight_HM, bias, dropout)
                state = part if state is None else merge(*state, *part)

        def absorb_super() -> None:
            absorb(k[:, :, setting.own :], v[:, :, setting.own :], len(setting.sizes))

        if setting.exchange == "ring":
            _ring_forward(setting.travelling(k, v), absorb, absorb_super, setting)
        else:
            everyone, wait_for_all = setting.gather(k, v)
            absorb_super()
            wait_for_all()
            for rank, count in enumerate(setting.sizes):
                absorb(everyone[rank, 0, :, :, :count], everyone[rank, 1, :, :, :count], rank)
        assert state is not None, "a sequence has at least one token"
        out, lse = state
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, weight_HM, out, lse)
        ctx.setting = setting
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight_HM, out, lse = ctx.saved_tensors
        setting: _Setting = ctx.setting
        own, (dout,) = setting.own, grads
        delta = row_delta(dout, out, lse.dtype)
        dweight, dq = torch.zeros_like(weight_HM, dtype=lse.dtype), torch.zeros_like(q, dtype=lse.dtype)

        def share(keys: Tensor, values: Tensor, block: int) -> Block:
            bias, dropout = setting.blocks[block]
            part, dk, dv = setting.kernel.backward(dout, q, keys, values, weight_HM, bias, lse, delta, dweight, dropout)
            dq.add_(part)
            return dk, dv

        dk_full, dv_full = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))

        def share_super() -> None:
            if k.shape[2] > own:
                supers = k[:, :, own:], v[:, :, own:]
                dk_full[:, :, own:], dv_full[:, :, own:] = share(*supers, len(setting.sizes))

        if setting.exchange == "ring":
            share_super()
            home = _ring_backward(setting.travelling(k, v), share, setting, lse.dtype)
        else:
            home = _gathered_backward(*setting.gather(k, v), share, share_super, setting)
        dk_full[:, :, :own], dv_full[:, :, :own] = home[0, :, :, :own], home[1, :, :, :own]
        return dq.to(q.dtype), dk_full.to(k.dtype), dv_full.to(v.dtype), dweight.to(weight_HM.dtype), None


def _ring_forward(current: Tensor, absorb: Any, absorb_super: Callable[[], None], setting: _Setting) -> None:
    """Compute on the block that is here while it travels on and the next arrives."""
    ring, arriving = setting.ring, torch.empty_like(current)
    for hop in range(ring.size):
        visitor = (ring.rank - hop) % ring.size
        works = ring.shift(current, arriving) if hop < ring.size - 1 else []
        count = setting.sizes[visitor]
        absorb(current[0, :, :, :count], current[1, :, :, :count], visitor)
        if hop == 0:
            absorb_super()
        wait(works)
        current, arriving = arriving, current


def _ring_backward(current: Tensor, share: Any, setting: _Setting, dtype: torch.dtype) -> Tensor:
    """Keys and values visit every rank; their gradients follow one hop behind and arrive home after the last.

    Each rank adds its part in `dtype`.
    """
    ring, arriving = setting.ring, torch.empty_like(current)
    gathered = outgoing = torch.empty_like(current)
    pending: list[dist.Work] = []
    for hop in range(ring.size):
        visitor = (ring.rank - hop) % ring.size
        works = ring.shift(current, arriving) if hop < ring.size - 1 else []
        local = torch.zeros_like(current, dtype=dtype)
        if count := setting.sizes[visitor]:
            local[0, :, :, :count], local[1, :, :, :count] = share(
                current[0, :, :, :count], current[1, :, :, :count], visitor
            )
        wait(pending)
        if hop:
            local += gathered
        outgoing, gathered = local.to(current.dtype), torch.empty_like(current)
        pending = ring.shift(outgoing, gathered) if ring.size > 1 else []
        wait(works)
        current, arriving = arriving, current
    wait(pending)
    return gathered if ring.size > 1 else outgoing


def _gathered_backward(
    everyone: Tensor,
    wait_for_all: Callable[[], None],
    share: Any,
    share_super: Callable[[], None],
    setting: _Setting,
) -> Tensor:
    """Gradients of all blocks, then one reduction that leaves each rank the sum of its own."""
    share_super()
    wait_for_all()
    parts = torch.zeros_like(everyone)
    for rank, count in enumerate(setting.sizes):
        if count:
            blocks = everyone[rank, 0, :, :, :count], everyone[rank, 1, :, :, :count]
            parts[rank, 0, :, :, :count], parts[rank, 1, :, :, :count] = share(*blocks, rank)
    home = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(home, parts.flatten(0, 1), group=setting.ring.group)
    return home
