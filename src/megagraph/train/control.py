"""The loop of the control models: full batch on one rank, the same split, schedule and selection rule."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from megagraph.config import RunConfig, UserError
from megagraph.graph.splits import split
from megagraph.graph.store import Graph
from megagraph.model.controls import GCN
from megagraph.train.meters import PeakMemory
from megagraph.train.progress import MEMORY_EPOCHS, Epoch, Progress, Reporter
from megagraph.train.schedule import learning_rate


def fit_control(run: RunConfig, graph: Graph) -> tuple[Progress, dict[str, Any]]:
    """Train a GCN on the whole graph; returns finished epochs and the facts of the summary."""
    torch.manual_seed(run.train.seed)
    device = torch.device(run.device)
    adjacency = graph.adjacency().tocoo()
    edges_2E = torch.from_numpy(np.stack(adjacency.coords).astype(np.int64)).to(device)
    x_VF, y_V = torch.from_numpy(graph.features_VF).to(device), torch.from_numpy(graph.labels_V).to(device)
    parts = [torch.from_numpy(part).to(device) for part in split(graph, run.split)]
    model = GCN(run.model, graph.num_features, graph.num_classes).to(device)
    settings = run.train
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.peak_lr, weight_decay=settings.weight_decay)
    memory = PeakMemory(device, [*model.parameters(), x_VF, y_V, edges_2E])
    progress = Progress()
    reporter = Reporter(run.id, settings.epochs, 0, active=True)
    for epoch in range(1, settings.epochs + 1):
        begin, rate = time.perf_counter(), learning_rate(settings, epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with memory if epoch <= MEMORY_EPOCHS else nullcontext():
            loss = _step(model, optimizer, x_VF, y_V, edges_2E, parts[0], settings.clip_norm)
        if not math.isfinite(loss):
            raise UserError(f"loss is {loss} at epoch {epoch}: lower train.peak_lr={settings.peak_lr}")
        row = Epoch(epoch, loss, time.perf_counter() - begin, rate)
        if epoch % settings.eval_every == 0 or epoch == settings.epochs:
            row.val_accuracy, row.test_accuracy = _accuracies(model, x_VF, y_V, edges_2E, parts[1:])
        progress.epochs.append(row)
        reporter.tell(row)
    reporter.close()
    facts = {
        "sequences_per_step": 1,
        "num_tokens": graph.num_nodes,
        "samples_per_node": 1,
        "attention": "none",
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "peak_bytes": (memory.bytes,),
        "memory_source": memory.source,
    }
    return progress, facts


def _step(
    model: GCN,
    optimizer: torch.optim.Optimizer,
    x_VF: Tensor,
    y_V: Tensor,
    edges_2E: Tensor,
    nodes: Tensor,
    clip_norm: float | None,
) -> float:
    model.train()
    optimizer.zero_grad(set_to_none=True)
    loss = functional.cross_entropy(model(x_VF, edges_2E)[nodes], y_V[nodes])
    loss.backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _accuracies(model: GCN, x_VF: Tensor, y_V: Tensor, edges_2E: Tensor, parts: list[Tensor]) -> tuple[float, float]:
    model.eval()
    hit_V = model(x_VF, edges_2E).argmax(-1) == y_V
    val, test = (hit_V[nodes].float().mean().item() for nodes in parts)
    return val, test
