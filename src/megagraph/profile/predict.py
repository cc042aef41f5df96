"""Peak memory of every rank of any plan, without hardware, peers or data.

The program itself runs: the engine of each rank is built and stepped under `FakeTensorMode`, where tensors have shapes
and no memory, in a process group whose messages go nowhere, and the meter of measured runs counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode

from megagraph.artifacts import Provenance
from megagraph.artifacts_memory import MemoryPrediction, PlanMemory, RankMemory
from megagraph.config import ParallelPlan, UserError, WorkloadConfig
from megagraph.graph.sizes import GraphSizes
from megagraph.parallel.mesh import fake_group, make_mesh
from megagraph.profile.bench import Bench
from megagraph.profile.shapes import ShapeData
from megagraph.train.meters import LiveBytes

log = logging.getLogger("megagraph.profile")

GRANULE = {"cpu": 1, "cuda": 512}
"""Bytes that the counter of a device rounds each tensor up to."""


class _Forgetful(FakeTensorConverter):
    """Keeps no weak references to fake tensors: `Module.to` refuses to swap a parameter that has one."""

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        """Nothing is converted twice here."""


class StandIn(FakeTensorMode):
    """Fake tensors that are on the CPU and are treated as those of another device type (`device_type`).

    A torch built without CUDA ends the process in the backward pass of a fake CUDA tensor. A number that the program
    reads from a tensor is 1: stages agree on static shapes, and scores are small, as those of a fresh model are.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.fake_tensor_converter = _Forgetful(copy_data=False, export=False)
        self.stands_for = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            return 1
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class _Handle:
    """A message to or from nobody. Like gloo's handle it keeps its tensors, like NCCL's until it is waited for."""

    def __init__(self, tensors: list[Tensor], until_waited: bool) -> None:
        self._tensors = tensors
        self._until_waited = until_waited

    def wait(self) -> bool:
        """It is there."""
        if self._until_waited:
            self._tensors = []
        return True


@contextmanager
def _handles(device: str) -> Iterator[None]:
    """Handles that keep what those of the device's backend keep; those of the fake group keep nothing."""

    def message(_: dist.ProcessGroup, tensors: list[Tensor], *rest: int) -> _Handle:
        return _Handle(tensors, until_waited=device == "cuda")

    def reduce_scatter(_: dist.ProcessGroup, output: Tensor, given: Tensor, *rest: Any) -> _Handle:
        """Gloo reduces a copy of all that it is given."""
        return _Handle([output, given.clone()] if device == "cpu" else [output, given], until_waited=device == "cuda")

    with patch.multiple(dist.ProcessGroup, send=message, recv=message, reduce_scatter_single=reduce_scatter):
        yield


def predict(config: WorkloadConfig, data: Path, plans: Sequence[ParallelPlan]) -> MemoryPrediction:
    """Predicted memory of plans for the graph in a folder, of which headers are read; a line of each is logged."""
    sizes = GraphSizes.read(data, config.coarsening)
    done = []
    for plan in plans:
        done.append(predict_plan(config, sizes, plan))
        log.info("%s: %.4g GB of %g GB", plan.label, done[-1].peak_bytes / 1e9, config.parallel.memory_limit_gb)
    provenance = Provenance.collect(torch.__version__, config.device)
    return MemoryPrediction(workload=config.id, device=config.device, plans=tuple(done), provenance=provenance)


def predict_plan(config: WorkloadConfig, sizes: GraphSizes, plan: ParallelPlan) -> PlanMemory:
    """Predicted peak bytes of a training step on every rank of `plan`, in rank order.

    Replicas have the same shapes, so one of them is run for all. `UserError` where the plan cannot run the workload.
    """
    plan.check(config.model.layers)
    if config.model.node_embedding:
        raise UserError(
            "model.node_embedding=true reads rows that only a run knows: see stage_bytes of a search, or measure"
        )
    first = {(pp, cp): (pp * plan.dp) * plan.cp + cp for pp in range(plan.pp) for cp in range(plan.cp)}
    known = {place: predict_rank(config, sizes, plan, rank) for place, rank in first.items()}
    ranks = [known[pp, cp] for pp in range(plan.pp) for _ in range(plan.dp) for cp in range(plan.cp)]
    return PlanMemory(plan=plan, ranks=tuple(ranks))


def predict_rank(config: WorkloadConfig, sizes: GraphSizes, plan: ParallelPlan, rank: int) -> RankMemory:
    """Predicted peak bytes of one rank in the second of two steps, as `Bench.peak` measures them.

    Must not be called in a process that is in a process group. Kernels `flex` and `triton` are counted as `tiled`,
    which is their backward pass. Every token counts as a row of its own: only a run knows how many are distinct, so
    the first stage may take less than predicted.
    """
    # A CPU's own kernel can be asked here; those of CUDA cannot.
    backend = "auto" if (config.device, config.parallel.backend) == ("cpu", "auto") else "tiled"
    parallel = config.parallel.model_copy(update={"backend": backend})
    here = config.model_copy(update={"device": "cpu", "parallel": parallel})
    centres = max(1, config.batch // config.sampling.samples)
    with fake_group(rank, plan.world_size):
        mesh = make_mesh(plan, "cpu", parallel.timeout_seconds)
        with StandIn(config.device), _handles(config.device):
            bench = Bench.on(mesh, here, ShapeData.of(sizes), centres)
            return _peak(bench, config.device)


def _peak(bench: Bench, device: str) -> RankMemory:
    engine = bench.engine
    if device == "cuda":  # what the optimiser chooses by itself for CUDA tensors
        for group in engine.optimizer.param_groups:
            group["foreach"] = True
    bench.step()
    parameters: list[Tensor] = list(engine.model.parameters())
    values = (value for state in engine.optimizer.state.values() for value in state.values())
    standing = {
        "weights": parameters,
        "optimiser": [value for value in values if isinstance(value, Tensor)],
        "features": list(engine.model.buffers()),
        "inputs": bench.inputs(),
    }
    parts: dict[str, int] = {}

    def note() -> None:
        parts["gradients"] = meter.bytes_of(p.grad for p in parameters if p.grad is not None)

    meter = LiveBytes(GRANULE[device], at_peak=note)
    meter.track(tensor for tensors in standing.values() for tensor in tensors)
    bench.step_under(meter)
    parts |= {name: meter.bytes_of(tensors) for name, tensors in standing.items()}
    parts["activations"] = meter.peak - sum(parts.values())
    return RankMemory(peak_bytes=meter.peak, parts=parts)
