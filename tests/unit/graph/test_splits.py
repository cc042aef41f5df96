"""Splits are deterministic, disjoint and complete."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megagraph.config import SplitConfig, UserError
from megagraph.graph.splits import split
from megagraph.graph.store import Graph


def graph_with(labels, public=None):
    labels = np.asarray(labels, np.int64)
    return Graph(
        name="toy",
        indptr=np.zeros(len(labels) + 1, np.int64),
        indices=np.zeros(0, np.int32),
        features_VF=np.zeros((len(labels), 1), np.float32),
        labels_V=labels,
        num_classes=2,
        public_split=public,
    )


@settings(max_examples=50, deadline=None)
@given(labels=st.lists(st.integers(-1, 1), min_size=3, max_size=60), seed=st.integers(0, 2**31 - 1))
def test_random_split_deals_every_labelled_node_once(labels, seed):
    graph = graph_with(labels)
    labelled = np.flatnonzero(graph.labels_V >= 0)
    if len(labelled) < 3:
        with pytest.raises(UserError, match=f"{len(labelled)} labelled nodes"):
            split(graph, SplitConfig(seed=seed))
        return
    parts = split(graph, SplitConfig(seed=seed))
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), labelled)
    assert all(len(part) > 0 and part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)


def test_random_split_sizes_and_seeds():
    graph = graph_with(np.zeros(1000))
    first, again, other = (split(graph, SplitConfig(seed=seed)) for seed in (0, 0, 1))
    assert [len(part) for part in first] == [600, 200, 200]
    for part in range(3):
        np.testing.assert_array_equal(first[part], again[part])
        assert not np.array_equal(first[part], other[part])
    assert not np.array_equal(first[0], np.arange(600)), "nodes are shuffled"


def test_random_split_is_the_same_on_every_machine():
    train, val, test = split(graph_with(np.zeros(10)), SplitConfig(seed=0))
    assert (train.tolist(), val.tolist(), test.tolist()) == ([2, 3, 4, 5, 6, 7], [0, 9], [1, 8])


@pytest.mark.parametrize("rule", ["public", "official"])
def test_public_split(rule):
    public = (np.array([2, 0]), np.array([3]), np.array([5]))
    train, val, test = split(graph_with(np.zeros(6), public), SplitConfig(rule=rule))
    assert (train.tolist(), val.tolist(), test.tolist()) == ([0, 2], [3], [5])
    assert train.dtype == np.int64


def test_public_split_of_a_data_set_without_one():
    with pytest.raises(UserError, match=r"rule=official: data set toy publishes no split: use split.rule=random"):
        split(graph_with(np.zeros(6)), SplitConfig(rule="official"))


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_seeds_that_no_generator_takes_are_refused(seed):
    with pytest.raises(ValidationError, match="seed"):
        SplitConfig(seed=seed)
