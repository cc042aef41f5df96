"""Who holds what: pure arithmetic of ragged shards, replicas and padded micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megagraph.config import ParallelPlan


def shard_sizes(count: int, parts: int) -> list[int]:
    """Sizes of `parts` contiguous shards of `count` items; the first take one more where it does not divide."""
    return [count // parts + (index < count % parts) for index in range(parts)]


def shard_slice(count: int, parts: int, index: int) -> slice:
    """The items of shard `index`."""
    sizes = shard_sizes(count, parts)
    start = sum(sizes[:index])
    return slice(start, start + sizes[index])


def stage_layers(plan: ParallelPlan, stage: int) -> range:
    """Global numbers of the layers on a pipeline stage."""
    start = sum(plan.layers[:stage])
    return range(start, start + plan.layers[stage])


def stage_recompute(plan: ParallelPlan, stage: int) -> int:
    """Layers of a pipeline stage whose activations are not kept."""
    return plan.recompute[stage] if plan.recompute else 0


@dataclass(frozen=True)
class Share:
    """One replica's part of a step: centres per micro-batch (-1 pads), and the number of its first sequence."""

    nodes_KB: NDArray[np.int64]
    first_sequence: int


def replica_share(
    nodes: NDArray[np.int64], capacity: int, plan: ParallelPlan, dp_rank: int, samples: int, seeds: int = 1
) -> Share:
    """Cut a step's centres over replicas and micro-batches.

    Args:
        nodes: centres of the whole step, at most `capacity` of them.
        capacity: centres of a full step; shapes depend on it alone, so that short steps are padded, not reshaped.
        plan: gives dp and the number of micro-batches.
        dp_rank: which replica.
        samples: sequences per centre, for numbering sequences over the whole step.
        seeds: centres of one sequence; consecutive ones stay together, so that no layout changes a sequence.
    """
    num_sequences = -(-capacity // seeds)
    per_replica = -(-num_sequences // plan.dp)
    per_microbatch = -(-per_replica // plan.microbatches)
    padded = np.full(plan.microbatches * per_microbatch * seeds, -1, np.int64)
    mine = nodes[dp_rank * per_replica * seeds : (dp_rank + 1) * per_replica * seeds]
    padded[: len(mine)] = mine
    return Share(padded.reshape(plan.microbatches, -1), dp_rank * per_replica * samples)


@dataclass(frozen=True)
class Pass:
    """A part of a step that goes through the pipeline at once: its centres, and the number of its first sequence."""

    nodes: NDArray[np.int64]
    first_sequence: int


def pass_capacity(capacity: int, accumulate: int, seeds: int = 1) -> int:
    """Centres of one of `accumulate` equal passes over `capacity` centres, `seeds` to a sequence: whole sequences."""
    num_sequences = -(-capacity // seeds)
    return -(-num_sequences // accumulate) * seeds


def step_passes(nodes: NDArray[np.int64], capacity: int, accumulate: int, samples: int, seeds: int = 1) -> list[Pass]:
    """Cut a step's centres over passes, in order, sequences numbered over the whole step; empty passes are left out.

    Arguments as of `replica_share`, which cuts each pass again.
    """
    size = pass_capacity(capacity, accumulate, seeds)
    return [Pass(nodes[start : start + size], start // seeds * samples) for start in range(0, len(nodes), size)]
