"""Shards, shares and micro-batches cover everything once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagraph.config import ParallelPlan
from megagraph.parallel.shard import (
    pass_capacity,
    replica_share,
    shard_sizes,
    shard_slice,
    stage_layers,
    step_passes,
)


@given(st.integers(0, 200), st.integers(1, 9))
def test_shards_partition(count, parts):
    sizes = shard_sizes(count, parts)
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    covered = [i for index in range(parts) for i in range(count)[shard_slice(count, parts, index)]]
    assert covered == list(range(count))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_replicas_share_every_centre_once(count, extra, dp, microbatches, samples):
    nodes, capacity = np.arange(count) + 5, count + extra
    plan = ParallelPlan(dp=dp, layers=(1,), microbatches=microbatches)
    shares = [replica_share(nodes, capacity, plan, rank, samples) for rank in range(dp)]
    assert len({share.nodes_KB.shape for share in shares}) == 1
    seen = {}
    for share in shares:
        flat = share.nodes_KB.reshape(-1)
        for position in np.flatnonzero(flat >= 0):
            seen[int(flat[position])] = share.first_sequence + position * samples
    assert sorted(seen) == list(nodes)
    assert [seen[node] for node in nodes] == [index * samples for index in range(count)]


@pytest.mark.parametrize(("stage", "expected"), [(0, range(0, 3)), (1, range(3, 4)), (2, range(4, 9))])
def test_stage_layers(stage, expected):
    assert stage_layers(ParallelPlan(pp=3, layers=(3, 1, 5)), stage) == expected


@given(count=st.integers(1, 40), extra=st.integers(0, 9), accumulate=st.integers(1, 7), seeds=st.integers(1, 5))
def test_passes_hold_every_centre_once_in_whole_sequences(count, extra, accumulate, seeds):
    nodes, capacity = np.arange(count), count + extra
    size = pass_capacity(capacity, accumulate, seeds)
    passes = step_passes(nodes, capacity, accumulate, 2, seeds)
    assert np.concatenate([part.nodes for part in passes]).tolist() == nodes.tolist()
    assert 1 <= len(passes) <= accumulate
    assert size % seeds == 0
    for part in passes:
        assert 0 < len(part.nodes) <= size
        assert part.first_sequence == part.nodes[0] // seeds * 2, "numbered as in a step of one pass"
