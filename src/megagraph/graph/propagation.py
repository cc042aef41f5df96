"""Parts of bounded size by label propagation, in a few passes over the edges: for graphs where partitioners take long.

Random nodes are the seeds of the parts. In every pass each node joins the part that most of its neighbours belong to
and that still has room (Meyerhenke, Sanders and Schulz 2014: size-constrained label propagation), so that parts grow
along edges first and are mended after. A pass reads every edge once; nothing is contracted or sorted.

Shapes: V nodes, S parts, E stored directed edges.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from megagraph.config import CoarseningConfig
from megagraph.graph.jit import kernel

MAX_PASSES = 12
STALLED = 0.002
"""A pass that moves less than this share of the nodes is the last one."""
IMBALANCE = 0.25


def propagate(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], num_parts: int, config: CoarseningConfig
) -> NDArray[np.int64]:
    """Part of every node [V]: exactly `num_parts` parts of 1 to ceil(1.25 V / num_parts) nodes.

    Nodes that no part reaches along edges (a component without a seed, or neighbours that are all full) fill parts
    with room in order of their numbers. Repeatable by `config.seed`.
    """
    num_nodes = len(indptr) - 1
    most = math.ceil((1 + IMBALANCE) * num_nodes / num_parts)
    part_V = np.full(num_nodes, -1, np.int32)
    part_V[Generator(PCG64(config.seed)).choice(num_nodes, num_parts, replace=False)] = np.arange(num_parts)
    size_S = np.ones(num_parts, np.int64)
    votes_S = np.zeros(num_parts, np.int32)
    seen_S = np.empty(num_parts, np.int32)
    indices = indices.astype(np.int32, copy=False)
    for number in range(MAX_PASSES):
        moved = _pass(indptr, indices, part_V, size_S, most, votes_S, seen_S, number % 2 == 1)
        if moved < STALLED * num_nodes:
            break
    left = np.flatnonzero(part_V < 0)
    part_V[left] = np.repeat(np.arange(num_parts), most - size_S)[: len(left)]
    return part_V.astype(np.int64)


@kernel
def _pass(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    part_V: NDArray[np.int32],
    size_S: NDArray[np.int64],
    most: int,
    votes_S: NDArray[np.int32],
    seen_S: NDArray[np.int32],
    backward: bool,
) -> np.int64:
    """Let every node choose once, in order of numbers or against it; returns how many moved."""
    num_nodes = len(part_V)
    moved = np.int64(0)
    for step in range(num_nodes):
        node = num_nodes - 1 - step if backward else step
        old = part_V[node]
        num_seen = np.int64(0)
        for edge in range(indptr[node], indptr[node + 1]):
            part = part_V[indices[edge]]
            if part >= 0:
                if votes_S[part] == 0:
                    seen_S[num_seen] = part
                    num_seen += 1
                votes_S[part] += 1
        best, most_votes = old, votes_S[old] if old >= 0 else 0
        for place in range(num_seen):
            part = seen_S[place]
            if votes_S[part] > most_votes and size_S[part] < most:
                best, most_votes = part, votes_S[part]
        for place in range(num_seen):
            votes_S[seen_S[place]] = 0
        if best != old and (old < 0 or size_S[old] > 1):
            part_V[node] = best
            size_S[best] += 1
            if old >= 0:
                size_S[old] -= 1
            moved += 1
    return moved
