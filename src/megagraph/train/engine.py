"""One rank of a run, put together: sequences, stage model, attention, schedule, optimiser.

This is the only place that puts a ring into an attention slot or a stage into a pipeline; training and profiling
both run what is built here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megagraph.attention.backends import choose_kernel
from megagraph.attention.precision import low_precision
from megagraph.config import ModelConfig, SamplingConfig, WorkloadConfig
from megagraph.graph.batch import EgoBuilder, SequenceBuilder
from megagraph.graph.store import Coarsening, Graph, load_coarsening, load_graph
from megagraph.graph.union import UnionBuilder
from megagraph.model.hierarchical import STAGE_SHARED, HierarchicalGT
from megagraph.model.initialise import initialise
from megagraph.model.nodes import AllRows, NodeTable
from megagraph.parallel.context import ContextShard, SequenceLayout
from megagraph.parallel.heads import check_heads
from megagraph.parallel.mesh import Mesh
from megagraph.parallel.reduce import clip_gradients, reduce_gradients
from megagraph.parallel.shard import Share, pass_capacity, replica_share, stage_layers, stage_recompute, step_passes
from megagraph.parallel.stage import Microbatch, Pipeline, StageShape
from megagraph.parallel.table import RowShards, num_parameters, parameter_groups

DTYPES = {"float32": torch.float32, "float64": torch.float64}
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from, beside data and mesh."""

    model: ModelConfig
    sampling: SamplingConfig
    attention: str
    dtype: str
    seed: int
    peak_lr: float = 1e-3
    weight_decay: float = 0.01
    clip_norm: float | None = None
    exchange: Literal["ring", "allgather"] = "ring"
    backend: str = "auto"
    node_table: Literal["replicated", "sharded"] = "sharded"
    autocast: Literal["none", "bfloat16"] = "none"
    accumulate: int = 1

    @classmethod
    def of(cls, workload: WorkloadConfig, seed: int) -> EngineConfig:
        """The engine of a workload; how its optimiser is set is no part of one."""
        parallel = workload.parallel
        return cls(
            model=workload.model,
            sampling=workload.sampling,
            attention=parallel.attention,
            dtype=workload.dtype,
            seed=seed,
            exchange=parallel.exchange,
            backend=parallel.backend,
            node_table=parallel.node_table,
            autocast=workload.autocast,
            accumulate=workload.accumulate,
        )


@dataclass(frozen=True)
class Data:
    """The graph of a run and its coarsening; sequence builders are prepared once and shared by engines."""

    graph: Graph
    coarsening: Coarsening
    _builders: dict[str, SequenceBuilder] = field(default_factory=dict, repr=False, compare=False)

    def builder(self, config: EngineConfig) -> SequenceBuilder:
        """The sequence builder of a configuration."""
        model = config.model
        key = repr((config.sampling, model.bias_channels, model.global_tokens, config.seed, config.dtype))
        if key not in self._builders:
            kind = UnionBuilder if config.sampling.builder == "union" else EgoBuilder
            self._builders[key] = kind(
                self.graph,
                self.coarsening,
                config.sampling,
                bias_channels=model.bias_channels,
                global_tokens=model.global_tokens,
                seed=config.seed,
                dtype=np.dtype(config.dtype).type,
            )
        return self._builders[key]


def load_data(folder: Path, coarsening: str) -> Data:
    """Read what `download` and `coarsen` wrote into `folder`."""
    return Data(load_graph(folder / "graph.safetensors"), load_coarsening(folder / f"{coarsening}.safetensors"))


class Engine:
    """Training and prediction steps of one rank."""

    def __init__(self, config: EngineConfig, data: Data, mesh: Mesh) -> None:
        dtype = DTYPES[config.dtype]
        model = config.model
        self.config = config
        self.mesh = mesh
        self.builder = data.builder(config)
        builder = self.builder
        layout = SequenceLayout(builder.num_regular, builder.num_super, model.global_tokens, builder.num_readout)
        kernel = choose_kernel(config.backend, mesh.device.type, model.hidden // model.heads)
        if config.attention == "all_to_all":
            check_heads(model.heads, mesh.plan.cp)
        num_nodes = data.graph.num_nodes if model.node_embedding else 0
        self.shard = ContextShard(mesh, layout, config.attention, config.exchange, kernel, num_nodes)
        features = torch.as_tensor(builder.features, dtype=dtype)
        owned = stage_layers(mesh.plan, mesh.index("pp"))
        recompute = stage_recompute(mesh.plan, mesh.index("pp"))
        nodes = _node_table(config, num_nodes, mesh)
        whole = HierarchicalGT(model, features, data.graph.num_classes, owned, recompute, nodes)
        self.model = whole.to(mesh.device, dtype)
        initialise(self.model, config.seed, model.layers)
        groups = parameter_groups(self.model)
        self.optimizer = torch.optim.AdamW(groups, lr=config.peak_lr, weight_decay=config.weight_decay)
        local = self.shard.num_local
        shape = StageShape(
            num_ids=local - model.global_tokens,
            num_local=local,
            num_readout=self.shard.num_readout,
            hidden=model.hidden,
            num_classes=data.graph.num_classes,
            dtype=dtype,
            autocast=AUTOCAST[config.autocast],
        )
        self.pipeline = Pipeline(self.model, mesh, shape)

    @property
    def layout(self) -> SequenceLayout:
        """Token counts of a sequence."""
        return self.shard.layout

    def microbatches(
        self,
        nodes: NDArray[np.int64],
        capacity: int,
        stream: int,
        samples: int,
        key: int | None,
        first_sequence: int = 0,
    ) -> list[Microbatch]:
        """This rank's part of a pass over centres `nodes` (at most `capacity`), sequences from `first_sequence` on."""
        share = self.share(nodes, capacity, samples)
        parts = []
        for number, seeds in enumerate(share.nodes_KB):
            first = first_sequence + share.first_sequence + number * len(seeds) // self.layout.num_readout * samples
            batch = self.builder.build(
                seeds, stream=stream, samples=samples, first_sequence=first, regular=self.shard.regular
            )
            parts.append(self.shard.microbatch(batch, key))
        return parts

    def step_makers(
        self, nodes: NDArray[np.int64], capacity: int, stream: int, samples: int, key: int | None
    ) -> list[Callable[[], list[Microbatch]]]:
        """What makes each pass of a step over centres `nodes` (at most `capacity`), to be called in order."""
        seeds, accumulate = self.layout.num_readout, self.config.accumulate
        size = pass_capacity(capacity, accumulate, seeds)
        parts = step_passes(nodes, capacity, accumulate, samples, seeds)
        return [
            partial(self.microbatches, part.nodes, size, stream, samples, key, part.first_sequence) for part in parts
        ]

    def share(self, nodes: NDArray[np.int64], capacity: int, samples: int) -> Share:
        """This replica's part of a step: read-out nodes of whole sequences per micro-batch (-1 pads)."""
        plan, seeds = self.mesh.plan, self.layout.num_readout
        return replica_share(nodes, capacity, plan, self.mesh.index("dp"), samples, seeds)

    def train_step(self, passes: Iterable[list[Microbatch]], normaliser: float) -> Tensor:
        """One optimiser step over all passes; returns this rank's share of the loss.

        Args:
            passes: micro-batches of each, asked for when the pass before is over and its own are dropped.
            normaliser: read-out tokens of the whole step over all passes and replicas.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=DTYPES[self.config.dtype], device=self.mesh.device)
        for microbatches in passes:
            loss += self.pipeline.train_step(microbatches, normaliser)
            del microbatches
        reduce_gradients(self.model, self.mesh, STAGE_SHARED)
        if self.config.clip_norm is not None:
            clip_gradients(self.model, self.mesh, STAGE_SHARED, self.config.clip_norm)
        self.optimizer.step()
        return loss

    def precision(self) -> torch.autocast:
        """The context in which a part of the model computes as it does in a step."""
        return low_precision(self.mesh.device.type, AUTOCAST[self.config.autocast])

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def tensors(self) -> list[Tensor]:
        """What is alive before a step: weights, buffers, optimiser state."""
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def num_parameters(self) -> int:
        """Parameters of the whole model, those kept by every stage counted once; the same on every rank."""
        sizes = num_parameters(self.model)
        shared = sum(size for name, size in sizes.items() if name in STAGE_SHARED)
        own = sum(sizes.values()) - shared
        total = torch.tensor(own, device=self.mesh.device)
        dist.all_reduce(total, group=self.mesh.group("pp"))
        return int(total) + shared


def _node_table(config: EngineConfig, num_nodes: int, mesh: Mesh) -> NodeTable | None:
    """The table of learned rows on the first stage, the whole or this rank's rows; None where there is none."""
    if not (config.model.node_embedding and mesh.is_first_stage):
        return None
    sharded = config.node_table == "sharded" and mesh.plan.cp * mesh.plan.dp > 1
    store = RowShards.over_replicas(mesh, num_nodes) if sharded else AllRows(num_nodes)
    return NodeTable(config.model.hidden, store)
