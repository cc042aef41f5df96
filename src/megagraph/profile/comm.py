"""Seconds of messages between ranks: point to point, and all-reduce per group size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megagraph.artifacts import CommRow
from megagraph.config import ParallelPlan, WorkloadConfig
from megagraph.parallel.mesh import make_mesh
from megagraph.profile.bench import now
from megagraph.profile.compute import slowest


def comm_rows(config: WorkloadConfig, world_size: int) -> list[CommRow]:
    """Rows for every message size; an all-reduce for each divisor of the world size as group."""
    rows = []
    for ranks in range(2, world_size + 1):
        if world_size % ranks:
            continue
        layers = (1,) * (world_size // ranks)
        mesh = make_mesh(
            ParallelPlan(pp=len(layers), dp=ranks, layers=layers), config.device, config.parallel.timeout_seconds
        )
        group = mesh.group("dp")
        for size in config.profile.message_bytes:
            message = torch.zeros(max(1, size // 4), device=mesh.device)
            seconds = _repeat(_all_reduce, message, group, config)
            rows.append(CommRow(operation="all_reduce", ranks=ranks, bytes=size, seconds=slowest(seconds)))
            if ranks == world_size:
                seconds = _repeat(_one_way, message, group, config)
                rows.append(CommRow(operation="p2p", ranks=2, bytes=size, seconds=slowest(seconds)))
    return rows


def _repeat(
    measure: Callable[[torch.Tensor, dist.ProcessGroup], float],
    message: torch.Tensor,
    group: dist.ProcessGroup,
    config: WorkloadConfig,
) -> list[float]:
    profile = config.profile
    return [measure(message, group) for _ in range(profile.warmup + profile.repeats)][profile.warmup :]


def _all_reduce(message: torch.Tensor, group: dist.ProcessGroup) -> float:
    dist.barrier()
    begin = now(message.device)
    dist.all_reduce(message, group=group)
    return now(message.device) - begin


def _one_way(message: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Half of a round trip between the first two ranks; the others report nothing (zero)."""
    dist.barrier()
    rank = dist.get_rank(group)
    if rank > 1:
        return 0.0
    peer = dist.get_global_rank(group, 1 - rank)
    begin = now(message.device)
    if rank == 0:
        dist.send(message, peer, group=group)
        dist.recv(message, peer, group=group)
    else:
        dist.recv(message, peer, group=group)
        dist.send(message, peer, group=group)
    return (now(message.device) - begin) / 2
