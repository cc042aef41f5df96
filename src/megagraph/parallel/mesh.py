"""Ranks and groups: the only room that talks to launchers.

Axes: pp outermost, then dp, cp innermost, so that ring neighbours are neighbouring ranks (usually one node).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megagraph.config import ParallelPlan, UserError

AXES = ("pp", "dp", "cp")


@dataclass(frozen=True)
class Mesh:
    """This rank's place (pp, dp, cp) in a plan, and its groups."""

    plan: ParallelPlan
    device_mesh: DeviceMesh
    replica_mesh: DeviceMesh
    device: torch.device

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The cp x dp ranks of this rank's stage."""
        return self.replica_mesh.get_group()

    def index(self, axis: str) -> int:
        """Coordinate on an axis."""
        return self.device_mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of ranks that differ on this axis only."""
        return self.device_mesh.get_group(axis)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds."""
        return self.index("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank classifies."""
        return self.index("pp") == self.plan.pp - 1


@contextmanager
def process_group(world_size: int, device: str, timeout_seconds: float) -> Iterator[None]:
    """Join the job started by the launcher (`RANK`, `WORLD_SIZE`, `MASTER_*`), or be the only rank.

    Raises `UserError` if the launcher started another number of ranks than the plan needs.
    """
    timeout = timedelta(seconds=timeout_seconds)
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        started = int(os.environ["WORLD_SIZE"])
        if started != world_size:
            raise UserError(
                f"{started} ranks were started but the plan needs {world_size}: "
                f"use megagraph launch --tasks {world_size}"
            )
        dist.init_process_group(backend, timeout=timeout)
    elif world_size > 1:
        raise UserError(f"the plan needs {world_size} ranks: use megagraph launch --tasks {world_size} -- ...")
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def started_rank() -> int:
    """The rank that the launcher gave, known before the job is joined; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a job without the others: sends and collectives do nothing. For predictions, not for numbers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import makes the backend known

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _group_options(backend: str, timeout: timedelta) -> Any:
    """Options carrying the timeout: sub-groups of a mesh do not inherit it (torch 2.13)."""
    if backend == "fake":
        return backend
    gloo = backend == "gloo"
    options: Any = dist.ProcessGroupGloo._Options() if gloo else dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    return backend, options


def make_mesh(plan: ParallelPlan, device: str, timeout_seconds: float) -> Mesh:
    """The mesh of a plan over all ranks of the running process group; every group carries the timeout."""
    timeout = timedelta(seconds=timeout_seconds)
    backend = dist.get_backend()
    override: dict[Any, Any] = {axis: _group_options(backend, timeout) for axis in AXES}
    shape = (plan.pp, plan.dp, plan.cp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=AXES, backend_override=override)
    both = mesh["dp", "cp"]._flatten("replicas", backend_override=_group_options(backend, timeout))
    local = torch.device(device, int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device(device)
    return Mesh(plan, mesh, both, local)
