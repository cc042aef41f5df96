"""An engine set up for measuring: random centres of the workload's graph, whole steps, module timers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph.artifacts import Workload
from megagraph.attention.dropout import fold
from megagraph.config import ModelConfig, ParallelPlan, WorkloadConfig
from megagraph.parallel.mesh import Mesh, make_mesh
from megagraph.parallel.stage import Microbatch
from megagraph.train.engine import Data, Engine, EngineConfig
from megagraph.train.meters import PeakMemory

SEED = 0


def now(device: torch.device) -> float:
    """Seconds, after the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Bench:
    """One plan of a workload, ready to step on this rank."""

    engine: Engine
    microbatches: list[Microbatch]
    normaliser: float

    @classmethod
    def build(
        cls, config: WorkloadConfig, data: Data, plan: ParallelPlan, centres: int, model: ModelConfig | None = None
    ) -> Bench:
        """An engine under `plan` with a pass of `centres` centres (`union`: as many sequences), chosen at random."""
        return cls.on(make_mesh(plan, config.device, config.parallel.timeout_seconds), config, data, centres, model)

    @classmethod
    def on(
        cls, mesh: Mesh, config: WorkloadConfig, data: Data, centres: int, model: ModelConfig | None = None
    ) -> Bench:
        """The same on a mesh that is there."""
        settings = EngineConfig.of(config, SEED)
        engine = Engine(replace(settings, model=model or config.model), data, mesh)
        samples, centres = config.sampling.samples, centres * config.sampling.seeds
        nodes = np.random.default_rng(SEED).integers(0, data.graph.num_nodes, centres)
        microbatches = engine.microbatches(nodes, centres, 0, samples, fold(SEED))
        return cls(engine, microbatches, float(centres * samples))

    @property
    def mesh(self) -> Mesh:
        """This rank's mesh."""
        return self.engine.mesh

    def step(self, num_passes: int = 1) -> float:
        """Seconds of one optimiser step of `num_passes` passes, started by all ranks together."""
        dist.barrier()
        begin = now(self.mesh.device)
        self.engine.train_step([self.microbatches] * num_passes, self.normaliser)
        return now(self.mesh.device) - begin

    def steps(self, warmup: int, repeats: int) -> list[float]:
        """Seconds of `repeats` steps after `warmup`."""
        for _ in range(warmup):
            self.step()
        return [self.step() for _ in range(repeats)]

    def passes(self, warmup: int, repeats: int) -> tuple[list[float], list[float]]:
        """Seconds of forward, and of backward with the loss, without the weight update: one rank, one micro-batch."""
        timer = ModuleTimer(self.mesh.device)
        totals = []
        with timer.watching("whole", self.engine.pipeline.module, backward=False):
            for _ in range(warmup + repeats):
                begin = now(self.mesh.device)
                self.engine.pipeline.train_step(self.microbatches, self.normaliser)
                totals.append(now(self.mesh.device) - begin)
        forward = timer.seconds["whole.forward"]
        backward = [total - part for total, part in zip(totals, forward, strict=True)]
        return forward[warmup:], backward[warmup:]

    def peak(self) -> tuple[int, str]:
        """Peak bytes of a step (the optimiser state is there from the first of two), and how they were counted."""
        self.step()
        memory = PeakMemory(self.mesh.device, [*self.engine.tensors(), *self.inputs()])
        self.step_under(memory)
        return memory.bytes, memory.source

    def inputs(self) -> list[Tensor]:
        """What the micro-batches hold: ids, bias rows, labels."""
        return [tensor for microbatch in self.microbatches for tensor in microbatch.tensors()]

    def step_under(self, meter: AbstractContextManager[Any]) -> None:
        """One step while a meter is active, without gradients of the step before.

        Of several passes all after the first are alike, gradients being there from their beginning: two are run.
        """
        self.engine.optimizer.zero_grad(set_to_none=True)
        with meter:
            self.step(min(self.engine.config.accumulate, 2))


def workload_of(config: WorkloadConfig, data: Data, engine: Engine) -> Workload:
    """The sizes that the cost model sees."""
    model, layout = config.model, engine.layout
    return Workload(
        batch=config.batch,
        num_regular=layout.num_regular,
        num_super=layout.num_super,
        num_readout=layout.num_readout,
        layers=model.layers,
        heads=model.heads,
        hidden=model.hidden,
        ffn=model.ffn,
        bias_channels=model.bias_channels,
        global_tokens=model.global_tokens,
        num_features=data.graph.num_features,
        num_classes=data.graph.num_classes,
        num_rows=len(engine.builder.features),
        num_nodes=data.graph.num_nodes,
        node_table=config.parallel.node_table if model.node_embedding else "none",
        element_bytes=8 if config.dtype == "float64" else 4,
        autocast=config.autocast,
        accumulate=config.accumulate,
        attention=config.parallel.attention,
    )


@dataclass
class ModuleTimer:
    """Forward and backward seconds of modules, by hooks (paper III-B1)."""

    device: torch.device
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _begin: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def watching(self, name: str, module: nn.Module, backward: bool = True) -> Iterator[None]:
        """Record `NAME.forward`, and `NAME.backward` if the module's input is differentiable, while active."""
        handles = [
            module.register_forward_pre_hook(self._start(f"{name}.forward")),
            module.register_forward_hook(self._stop(f"{name}.forward")),
        ]
        if backward:
            handles += [
                module.register_full_backward_pre_hook(self._start(f"{name}.backward")),
                module.register_full_backward_hook(self._stop(f"{name}.backward")),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _start(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            self._begin[name] = now(self.device)

        return hook

    def _stop(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            self.seconds[name].append(now(self.device) - self._begin[name])

        return hook
