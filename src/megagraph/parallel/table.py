"""A table of learned rows, sharded by rows over the replicas (cp x dp) of a stage.

Ranks ask the owners for the rows of their micro-batch and send these rows' gradients back: a few rows, where FSDP would
gather the whole table, and make a whole gradient, for every micro-batch. Owners sum what comes back, so the gradient is
the sum over replicas without another reduction, and optimiser states are those of the own rows.

Shapes: V rows, D hidden, n rows that a rank asks for, m rows that it is asked for, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megagraph.parallel.mesh import Mesh


@dataclass(frozen=True)
class _Route:
    """Rows by rank: how many were asked of each, and by each, and which, as places in the own rows."""

    asked_of_P: list[int]
    asked_by_P: list[int]
    places_m: Tensor


@dataclass(frozen=True)
class RowShards:
    """Rows of a table of V over P ranks, as `torch.chunk` cuts them: the last ranks may hold fewer, or none."""

    num_rows: int
    device_mesh: DeviceMesh

    @classmethod
    def over_replicas(cls, mesh: Mesh, num_rows: int) -> RowShards:
        """Shards over the cp x dp ranks of this rank's stage."""
        return cls(num_rows, mesh.replica_mesh)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.device_mesh.get_group()

    @property
    def _chunk(self) -> int:
        return -(-self.num_rows // self.device_mesh.size())

    @property
    def held(self) -> range:
        """Rows of this rank."""
        rank = self.device_mesh.get_local_rank()
        return range(*(min(self.num_rows, place * self._chunk) for place in (rank, rank + 1)))

    def fetch(self, weight: Tensor, rows_n: Tensor) -> tuple[Tensor, _Route]:
        """Values [n, D] of ascending rows of the whole table; all ranks of the group take part."""
        asked_of = torch.bincount(rows_n // self._chunk, minlength=self.device_mesh.size())
        asked_by = torch.empty_like(asked_of)
        dist.all_to_all_single(asked_by, asked_of, group=self.group)
        counts = asked_of.tolist(), asked_by.tolist()
        route = _Route(*counts, self._exchange(rows_n, *counts) - self.held.start)
        return self._exchange(weight[route.places_m], route.asked_by_P, route.asked_of_P), route

    def send_back(self, grad_nD: Tensor, route: _Route) -> Iterator[tuple[Tensor, Tensor]]:
        """Places in the own rows and their gradients, rank by rank, so that sums have one order."""
        grad_mD = self._exchange(grad_nD, route.asked_of_P, route.asked_by_P)
        return zip(route.places_m.split(route.asked_by_P), grad_mD.split(route.asked_by_P), strict=True)

    def _exchange(self, rows: Tensor, sent_P: list[int], received_P: list[int]) -> Tensor:
        """Send consecutive rows to the ranks, receive theirs."""
        received = rows.new_empty(sum(received_P), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), received_P, sent_P, self.group)
        return received

    def part(self, local: Tensor) -> DTensor:
        """The own rows as a part of the whole table, without a copy: what a checkpoint stores under any layout."""
        rows, width = self.num_rows, local.shape[1]
        shape, stride = torch.Size((rows, width)), (width, 1)
        return DTensor.from_local(local, self.device_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def table_stores(model: nn.Module) -> dict[str, Any]:
    """The stores of the model's tables (`RowShards`, or another where all rows are here) by name of their weight."""
    stores = {name: getattr(module, "store", None) for name, module in model.named_modules()}
    return {f"{name}.weight": store for name, store in stores.items() if store is not None}


def sharded_tables(model: nn.Module) -> dict[str, RowShards]:
    """Those of the tables that are sharded."""
    return {name: store for name, store in table_stores(model).items() if isinstance(store, RowShards)}


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups for AdamW: tables are updated by the fused kernel, the other one makes two copies of a whole table."""
    tables = table_stores(model)
    groups: list[dict[str, Any]] = [{"params": [p for name, p in model.named_parameters() if name not in tables]}]
    if tables:
        groups.append({"params": [p for name, p in model.named_parameters() if name in tables], "fused": True})
    return groups


def num_parameters(model: nn.Module) -> dict[str, int]:
    """Elements of every parameter by name, all rows of sharded tables counted."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters())
    return sizes | {name: s.num_rows * parameters[name].shape[1] for name, s in sharded_tables(model).items()}
