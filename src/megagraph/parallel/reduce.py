"""The one rule for gradients: SUM over everything that holds the same weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph.parallel.mesh import Mesh


def reduce_gradients(model: nn.Module, mesh: Mesh, stage_shared: Iterable[str]) -> None:
    """Sum gradients over cp and dp in one flat bucket; parameters that every stage keeps are summed over pp too.

    The loss is normalised by the global count of read-out tokens, so the sum is the gradient of the whole step.
    A parameter without gradient (it touched nothing on this rank) counts as zero.
    """
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _sum([p.grad for p in parameters.values() if p.grad is not None], mesh.replicas)
    shared = [parameters[name].grad for name in stage_shared]
    _sum([grad for grad in shared if grad is not None], mesh.group("pp"))


def clip_gradients(model: nn.Module, mesh: Mesh, stage_shared: Iterable[str], max_norm: float) -> Tensor:
    """Scale reduced gradients so that the norm over ALL stages is at most `max_norm`; returns the norm before.

    Parameters kept by every stage count once.
    """
    shared = set(stage_shared)
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    own = [grad.square().sum() for name, grad in named.items() if name not in shared]
    total = torch.stack(own).sum()
    if mesh.plan.pp > 1:
        dist.all_reduce(total, group=mesh.group("pp"))
    norm = torch.stack([total, *(grad.square().sum() for name, grad in named.items() if name in shared)]).sum().sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _sum(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
