"""Accuracy of a distributed model, by the same engine that trains it.

Shapes: B sequences, R read-out tokens, C classes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megagraph.train.engine import Engine

EVALUATION_STREAM = -1
"""Evaluation draws the same sequences at every call, apart from every training epoch."""


def even_capacity(count: int, most: int) -> int:
    """Size of equal steps over `count` items, at most `most` each: no short step at the end."""
    steps = max(1, -(-count // most))
    return -(-count // steps)


def accuracies(engine: Engine, parts: list[NDArray[np.int64]], labels_V: NDArray[np.int64], most: int) -> list[float]:
    """Accuracy on each of several node sets, the same on every rank.

    The class probabilities of a node's `eval_samples` sequences are averaged (Monte Carlo over sampling).

    Args:
        engine: this rank.
        parts: node sets, for example validation and test.
        labels_V: labels of all nodes.
        most: centres per step, as many as memory allows; all micro-batches have the size of this step.
    """
    nodes = np.concatenate(parts)
    correct = torch.zeros(len(nodes), dtype=torch.int32)
    plan, samples = engine.mesh.plan, engine.config.sampling.eval_samples
    capacity = even_capacity(len(nodes), max(most, plan.dp * plan.microbatches))
    for start in range(0, len(nodes), capacity):
        chunk = nodes[start : start + capacity]
        microbatches = engine.microbatches(chunk, capacity, EVALUATION_STREAM, samples, None)
        logits_BRC = engine.pipeline.predict(microbatches)
        if logits_BRC is None or engine.shard.num_readout == 0:
            continue
        # Sequences of this replica by read-out nodes; this rank holds the columns `mine` of them.
        seeds = engine.layout.num_readout
        share = engine.share(chunk, capacity, samples)
        nodes_BR = share.nodes_KB.reshape(-1, seeds)
        mine = slice(engine.shard.regular.start, engine.shard.regular.start + engine.shard.num_readout)
        probabilities_BRC = logits_BRC.softmax(-1).view(len(nodes_BR), samples, *logits_BRC.shape[1:]).mean(1)
        offset = start + share.first_sequence // samples * seeds
        place_BR = offset + np.arange(nodes_BR.size).reshape(nodes_BR.shape)
        own_BR, place_BR = nodes_BR[:, mine], place_BR[:, mine]
        hit_BR = probabilities_BRC.argmax(-1).cpu().numpy() == labels_V[own_BR]
        correct[place_BR[own_BR >= 0]] = torch.from_numpy(hit_BR[own_BR >= 0]).int()
    correct = correct.to(engine.mesh.device)
    dist.all_reduce(correct)
    ends = np.cumsum([len(part) for part in parts])
    return [correct[end - len(part) : end].float().mean().item() for end, part in zip(ends, parts, strict=True)]
