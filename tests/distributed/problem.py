"""A small random problem in float64 and its single-process truth, written without the package's kernels."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from megagraph.attention.dropout import fold
from megagraph.config import ModelConfig, ParallelPlan
from megagraph.graph.batch import SequenceBatch
from megagraph.model.hierarchical import STAGE_SHARED, HierarchicalGT
from megagraph.model.initialise import initialise
from megagraph.model.nodes import AllRows, NodeTable
from megagraph.parallel.context import ContextShard, SequenceLayout
from megagraph.parallel.mesh import make_mesh, process_group
from megagraph.parallel.reduce import clip_gradients, reduce_gradients
from megagraph.parallel.shard import stage_layers, stage_recompute
from megagraph.parallel.stage import Pipeline, StageShape
from megagraph.parallel.table import RowShards, parameter_groups, sharded_tables

NUM_CLASSES, NUM_FEATURES, NUM_ROWS = 5, 7, 40
NUM_NODES = 31
"""Rows of real nodes; those after them are super nodes. It divides over no number of ranks."""
SEED, BATCH = 3, 8


@dataclass(frozen=True)
class Problem:
    """Shape of the problem; `super_nodes` excludes the global tokens, `nodes` have learned rows."""

    regular: int = 7
    super_nodes: int = 2
    global_tokens: int = 1
    readout: int = 1
    dropout: float = 0.3
    layers: int = 4
    clip_norm: float = 0.0
    nodes: int = 0

    @property
    def layout(self):
        supers = self.super_nodes + self.global_tokens
        return SequenceLayout(self.regular, supers, self.global_tokens, self.readout)

    @property
    def model(self):
        return ModelConfig(
            layers=self.layers,
            heads=4,
            hidden=16,
            ffn=24,
            bias_channels=3,
            global_tokens=self.global_tokens,
            input_dropout=self.dropout,
            residual_dropout=self.dropout,
            attention_dropout=self.dropout,
            node_embedding=self.nodes > 0,
        )

    def batch(self, step):
        """The whole step's batch: all rows, all sequences; structure is zero at global tokens."""
        generator = torch.Generator().manual_seed(100 + step)
        n, g = self.layout.num_tokens, self.global_tokens
        bias = torch.rand(BATCH, 3, n, n, generator=generator, dtype=torch.float64)
        bias[..., n - g :, :] = 0
        bias[..., :, n - g :] = 0
        weight = torch.ones(BATCH, self.readout, dtype=torch.float64)
        weight[-1] = 0
        return SequenceBatch(
            ids_BT=torch.randint(0, NUM_ROWS, (BATCH, n - g), generator=generator),
            bias_BMSN=bias,
            sequence_B=torch.arange(BATCH),
            labels_BR=torch.randint(0, NUM_CLASSES, (BATCH, self.readout), generator=generator),
            weight_BR=weight,
            nodes_B=torch.arange(BATCH),
        )

    def build(self, layers=None, recompute=0, store=None):
        features = torch.randn(NUM_ROWS, NUM_FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        table = NodeTable(16, store or AllRows(self.nodes)) if self.nodes else None
        model = HierarchicalGT(self.model, features, NUM_CLASSES, layers, recompute, table).double()
        initialise(model, SEED, 1)
        with torch.no_grad():  # large enough weights that every path matters
            for parameter in model.parameters():
                parameter.mul_(20.0 if parameter.ndim > 1 else 1.0)
        return model


def optimizer_of(model):
    return torch.optim.AdamW(parameter_groups(model), lr=1e-2, eps=1e-6, weight_decay=0.01)


def step_key(step):
    return fold(SEED, step)


def reference(problem, steps):
    """Loss, gradients and weights after each step, by a plain materialised attention with explicit masks."""
    from megagraph.attention.scope import Scope

    model = problem.build()
    optimizer = optimizer_of(model)
    history = []
    for step in range(steps):
        batch = problem.batch(step)

        def attend(q, k, v, weight, dropout, batch=batch):
            structural = torch.einsum("hm,bmij->bhij", weight[:, :3], batch.bias_BMSN)
            n, g = structural.shape[-1], problem.global_tokens
            learned = torch.zeros_like(structural)
            for token in range(g):  # row first, then column, as ans-gt 2.1 fills them
                learned[:, :, n - g + token, : n - g] = weight[:, 3 + token, None]
            for token in range(g):
                learned[:, :, :, n - g + token] = weight[:, 3 + token, None]
            scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + structural + learned
            p = scores.softmax(-1)
            if dropout is not None:
                p = p * dropout.keep(p.shape[1], slice(0, p.shape[0]), slice(0, n)) / (1 - dropout.rate)
            return p @ v

        n = problem.layout.num_tokens
        rows = torch.arange(n)
        scope = Scope(attend, batch.sequence_B, rows, rows, problem.readout, step_key(step), only_readout=False)
        optimizer.zero_grad()
        logits = model(batch.ids_BT, scope)
        loss_N = functional.cross_entropy(logits.flatten(0, 1), batch.labels_BR.flatten(), reduction="none")
        loss = (loss_N * batch.weight_BR.flatten()).sum() / batch.weight_BR.sum()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if problem.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), problem.clip_norm)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        history.append((loss.item(), gradients, weights))
    return history


def local_part(problem, plan, mesh, shard, step):
    """The micro-batches of this rank: its replica's sequences, its rows."""
    batch = problem.batch(step)
    g = problem.global_tokens
    regular = torch.arange(shard.regular.start, shard.regular.stop)
    rows = torch.cat([regular, torch.arange(problem.regular, problem.layout.num_tokens)])
    per_replica = BATCH // plan.dp
    per_microbatch = per_replica // plan.microbatches
    parts = []
    for k in range(plan.microbatches):
        start = mesh.index("dp") * per_replica + k * per_microbatch
        mine = slice(start, start + per_microbatch)
        local = SequenceBatch(
            ids_BT=batch.ids_BT[mine][:, rows[: len(rows) - g]],
            bias_BMSN=batch.bias_BMSN[mine][:, :, rows].contiguous(),
            sequence_B=batch.sequence_B[mine],
            labels_BR=batch.labels_BR[mine],
            weight_BR=batch.weight_BR[mine],
            nodes_B=batch.nodes_B[mine],
        )
        parts.append(shard.microbatch(local, step_key(step)))
    return parts, batch.weight_BR.sum().item()


def whole(model, tensors):
    """Copies as arrays, sharded tables put together."""
    stores = sharded_tables(model)
    parts = {name: stores[name].part(t).full_tensor() if name in stores else t for name, t in tensors.items()}
    return {name: tensor.clone().numpy() for name, tensor in parts.items()}


def parallel_run(problem, plan: ParallelPlan, steps, attention="tiled", exchange="ring", sharded=False):
    """The same steps under a plan, on this rank: [(loss, gradients, weights)]."""
    import torch.distributed as dist

    with process_group(plan.world_size, "cpu", 60.0):
        mesh = make_mesh(plan, "cpu", 60.0)
        shard = ContextShard(mesh, problem.layout, attention, exchange, num_nodes=problem.nodes)
        stage = mesh.index("pp")
        store = RowShards.over_replicas(mesh, problem.nodes) if sharded else None
        model = problem.build(stage_layers(plan, stage), stage_recompute(plan, stage), store)
        optimizer = optimizer_of(model)
        shape = StageShape(
            shard.num_local - problem.global_tokens, shard.num_local, shard.num_readout, 16, NUM_CLASSES, torch.float64
        )
        pipeline = Pipeline(model, mesh, shape)
        history = []
        for step in range(steps):
            optimizer.zero_grad()
            parts, normaliser = local_part(problem, plan, mesh, shard, step)
            loss = pipeline.train_step(parts, normaliser)
            reduce_gradients(model, mesh, STAGE_SHARED)
            if problem.clip_norm:
                clip_gradients(model, mesh, STAGE_SHARED, problem.clip_norm)
            dist.all_reduce(loss)
            gradients = whole(model, {name: p.grad for name, p in model.named_parameters()})
            optimizer.step()
            weights = whole(model, {name: p.detach() for name, p in model.named_parameters()})
            history.append((loss.item(), gradients, weights))
        return history
