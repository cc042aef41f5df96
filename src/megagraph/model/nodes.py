"""A learned row for each real node, added to its projected features: the |V| x D table of the paper's first stage.

Super nodes have none: their features are means of their members already, and the mean of the members' learned rows
would read the whole table for a few sequences.

Shapes: V nodes, D hidden, U distinct rows, n of them real nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megagraph.attention.dropout import fold
from megagraph.attention.scope import DistinctRows

BLOCK = 4096
"""Rows whose initial values are drawn together, wherever they are held."""


class RowStore(Protocol):
    """Which rows of a table are here, and how others are read and written."""

    @property
    def num_rows(self) -> int:
        """Rows of the whole table, V."""

    @property
    def held(self) -> range:
        """Rows of the table that the weight holds here."""

    def fetch(self, weight: Tensor, rows_n: Tensor) -> tuple[Tensor, Any]:
        """Values [n, D] of ascending distinct rows, and the route by which their gradient comes back."""

    def send_back(self, grad_nD: Tensor, route: Any) -> Iterable[tuple[Tensor, Tensor]]:
        """Places in the weight that was read here, each once, and their gradients; one pair for each reader."""


@dataclass(frozen=True)
class AllRows:
    """The whole table is here."""

    num_rows: int

    @property
    def held(self) -> range:
        """All rows."""
        return range(self.num_rows)

    def fetch(self, weight: Tensor, rows_n: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, which are their own route."""
        return weight[rows_n], rows_n

    def send_back(self, grad_nD: Tensor, route: Tensor) -> list[tuple[Tensor, Tensor]]:
        """One reader, this one."""
        return [(route, grad_nD)]


class _LookUp(torch.autograd.Function):
    """Rows of a table. Backward adds to `weight.grad` at these rows alone: a dense gradient of every micro-batch, which
    autograd would make and then add, costs a second table of memory and a pass over it each time."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, rows_n: Tensor, store: RowStore) -> Tensor:
        values_nD, route = store.fetch(weight, rows_n)
        ctx.rest = weight, store, route
        return values_nD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        weight, store, route = ctx.rest
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        for places, grad in store.send_back(grads[0].to(weight.dtype), route):
            weight.grad.index_add_(0, places, grad)
        return None, None, None


class NodeTable(nn.Module):
    """The table, or the rows of it that `store` holds here: parameter `weight` [rows, D]."""

    def __init__(self, hidden: int, store: RowStore) -> None:
        super().__init__()
        self.store = store
        self.weight = nn.Parameter(torch.empty(len(store.held), hidden))

    def forward(self, x_UD: Tensor, distinct: DistinctRows) -> Tensor:
        """`x` with the learned rows of its real nodes added."""
        rows_nD = _LookUp.apply(self.weight, distinct.rows_U[: distinct.num_nodes], self.store)
        return torch.cat([x_UD[: distinct.num_nodes] + rows_nD, x_UD[distinct.num_nodes :]])

    def initialise(self, key: int, std: float) -> None:
        """Fill with N(0, std^2), a function of (key, row) alone; in blocks, as all rows in float64 are too large."""
        held = self.store.held
        for start in range(held.start // BLOCK * BLOCK, held.stop, BLOCK):
            generator = torch.Generator().manual_seed(fold(key, start))
            values = torch.randn((BLOCK, self.weight.shape[1]), generator=generator, dtype=torch.float64) * std
            first, last = max(start, held.start), min(start + BLOCK, held.stop)
            self.weight[first - held.start : last - held.start] = values[first - start : last - start]
