"""A rank's part of every sequence: its regular tokens, all super nodes, and the attention that joins the parts.

Shapes: B sequences, T local tokens without global ones, S local tokens, N tokens, R read-out tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from megagraph.attention.bias import BiasStore, DenseBias
from megagraph.attention.kernel import TILED, Kernel
from megagraph.attention.scope import DistinctRows, Scope
from megagraph.attention.slot import Attend, local_attention
from megagraph.config import UserError
from megagraph.graph.batch import SequenceBatch
from megagraph.parallel.heads import all_to_all_attention
from megagraph.parallel.mesh import Mesh
from megagraph.parallel.ring import Ring, ring_attention
from megagraph.parallel.shard import shard_sizes, shard_slice
from megagraph.parallel.stage import Microbatch

DISTINCT_PAYS = 0.75
"""Distinct rows per token up to which projecting each once saves more than gathering the results costs (measured for
8 to 1433 features)."""


@dataclass(frozen=True)
class SequenceLayout:
    """Token counts of one sequence: N' regular, N_s super (global tokens included), R read out (a prefix)."""

    num_regular: int
    num_super: int
    num_global: int
    num_readout: int

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.num_regular + self.num_super


class ContextShard:
    """This rank's rows of a sequence layout under the mesh's cp degree."""

    def __init__(
        self,
        mesh: Mesh,
        layout: SequenceLayout,
        attention: str,
        exchange: Literal["ring", "allgather"] = "ring",
        kernel: Kernel = TILED,
        num_nodes: int = 0,
    ) -> None:
        """`num_nodes` real nodes have learned rows: then the distinct ones of a micro-batch are listed in any case."""
        cp = mesh.plan.cp
        if cp > 1 and attention == "dense":
            raise UserError(f"attention={attention} cannot be sharded over cp={cp}: use attention: tiled")
        self.layout = layout
        self._exchange: Literal["ring", "allgather"] = exchange
        self._kernel = kernel
        self._mesh = mesh
        self._num_nodes = num_nodes
        self._sizes = shard_sizes(layout.num_regular, cp)
        self._attention = attention
        self.regular = shard_slice(layout.num_regular, cp, mesh.index("cp"))

    @property
    def attention_path(self) -> str:
        """How attention is computed, for reports: `dense`, `tiled`, or the exchange over cp ranks."""
        sharded = self._mesh.plan.cp > 1 and self._attention == "tiled"
        return self._exchange if sharded else self._attention

    @property
    def num_local(self) -> int:
        """S: own regular tokens and all super nodes."""
        return self.regular.stop - self.regular.start + self.layout.num_super

    @property
    def num_readout(self) -> int:
        """Local read-out tokens; zero on ranks that hold none."""
        return max(0, min(self.layout.num_readout, self.regular.stop) - self.regular.start)

    @cached_property
    def rows_S(self) -> Tensor:
        """Global positions of the local tokens."""
        layout = self.layout
        own = torch.arange(self.regular.start, self.regular.stop)
        return torch.cat([own, torch.arange(layout.num_regular, layout.num_tokens)]).to(self._mesh.device)

    @cached_property
    def _fill(self) -> Callable[[BiasStore], Attend]:
        sizes, num_tokens = self._sizes, self.layout.num_tokens
        if self._mesh.plan.cp == 1:
            return local_attention(self._attention, self._kernel)
        group = self._mesh.group("cp")
        if self._attention == "all_to_all":
            return lambda bias: all_to_all_attention(bias, sizes, num_tokens, group, self._kernel)
        ring = Ring(group)
        return lambda bias: ring_attention(bias, sizes, num_tokens, ring, self._exchange, self._kernel)

    def microbatch(self, batch: SequenceBatch, key: int | None, bias: BiasStore | None = None) -> Microbatch:
        """Bind a batch that was built for this rank's rows (`regular`) to its attention.

        `key` folds seed and step for dropout; None evaluates without dropout. `bias` is a store on this rank's device
        that says more briefly what the batch's dense channels would.
        """
        device = self._mesh.device
        if bias is None:
            bias = DenseBias.full(batch.bias_BMSN.to(device), self.layout.num_global)
        distinct, ids_BT = self._distinct(batch.ids_BT)
        scope = Scope(
            attend=self._fill(bias),
            sequence_B=batch.sequence_B.to(device),
            rows_S=self.rows_S,
            columns_N=torch.arange(self.layout.num_tokens, device=device),
            num_readout=self.num_readout,
            key=key,
            only_readout=self._attention != "all_to_all",  # its exchange takes the queries of all local tokens
            distinct=distinct,
        )
        start = self.regular.start
        mine = slice(start, start + self.num_readout)
        labels, weight = batch.labels_BR[:, mine].to(device), batch.weight_BR[:, mine].to(device)
        return Microbatch(ids_BT.to(device), scope, labels, weight, bias)

    def _distinct(self, ids_BT: Tensor) -> tuple[DistinctRows | None, Tensor]:
        """The rows that the first stage projects once each, and the places of the tokens in them, where that pays or a
        table of learned rows is read."""
        if not self._mesh.is_first_stage:
            return None, ids_BT
        distinct, places_BT = DistinctRows.of(ids_BT, self._num_nodes)
        if not self._num_nodes and len(distinct.rows_U) > DISTINCT_PAYS * ids_BT.numel():
            return None, ids_BT
        return distinct.to(self._mesh.device), places_BT
