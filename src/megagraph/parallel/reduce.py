"""The one rule for gradients: SUM over everything that holds the same weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph.parallel.mesh import Mesh
from megagraph.parallel.table import sharded_tables, table_stores


def reduce_gradients(model: nn.Module, mesh: Mesh, stage_shared: Iterable[str]) -> None:
    """Sum gradients over cp and dp in one flat bucket; parameters that every stage keeps are summed over pp too.

    The loss is normalised by the global count of read-out tokens, so the sum is the gradient of the whole step.
    A parameter without gradient (it touched nothing on this rank) counts as zero. A table is too large to be copied
    into the bucket: it is summed in place; the rows of a sharded one are summed already.
    """
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    tables, sharded = table_stores(model), sharded_tables(model)
    _sum([p.grad for name, p in parameters.items() if p.grad is not None and name not in tables], mesh.replicas)
    if dist.get_world_size(mesh.replicas) > 1:
        for name in tables.keys() - sharded.keys():
            dist.all_reduce(parameters[name].grad, group=mesh.replicas)
    shared = [parameters[name].grad for name in stage_shared]
    _sum([grad for grad in shared if grad is not None], mesh.group("pp"))


def clip_gradients(model: nn.Module, mesh: Mesh, stage_shared: Iterable[str], max_norm: float) -> Tensor:
    """Scale reduced gradients so that the norm over ALL stages is at most `max_norm`; returns the norm before.

    Parameters kept by every stage count once, and so does every row of a sharded table.
    """
    shared, sharded = set(stage_shared), sharded_tables(model)
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    squares = {name: grad.square().sum() for name, grad in named.items()}
    for name, store in sharded.items():
        dist.all_reduce(squares[name], group=store.group)
    total = torch.stack([square for name, square in squares.items() if name not in shared]).sum()
    if mesh.plan.pp > 1:
        dist.all_reduce(total, group=mesh.group("pp"))
    norm = torch.stack([total, *(square for name, square in squares.items() if name in shared)]).sum().sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _sum(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
