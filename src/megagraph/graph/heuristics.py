"""Where the nodes of a sequence come from: rows of four heuristics, made for the centres of a batch.

Nothing is prepared for the whole graph and no V x V matrix exists: PageRank and k-NN rows are computed when a centre
is first asked for and kept in a bounded cache, one-hop and two-hop rows are read from the adjacency.

Shapes: V nodes, T centres, E entries of their rows, C cached rows, K kept entries per centre.
"""

from __future__ import annotations

from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megagraph.graph.jit import kernel
from megagraph.graph.nearest import nearest_rows, unit_rows
from megagraph.graph.pagerank import find, pagerank_rows
from megagraph.graph.store import Graph

CACHE_BYTES = 1 << 28
"""Bound on the memory of one heuristic's cached rows."""

Rows = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]
"""Non-negative rows of several centres in CSR form: pointers [T+1], columns [E] in any order, values [E]."""


class Heuristic(Protocol):
    """One source of nodes."""

    def rows(self, centres_T: NDArray[np.int64]) -> Rows:
        """The rows of centres; a row is a pure function of its centre."""


class OneHop:
    """A_hat without its diagonal (ans-gt 1.4): the neighbours, those of low degree first."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def rows(self, centres_T: NDArray[np.int64]) -> Rows:
        """See `Heuristic.rows`."""
        return _one_hop(centres_T, self._graph.indptr, self._graph.indices)


class TwoHop:
    """A_hat^2 without its diagonal (ans-gt 1.4): neighbours and their neighbours, exact, whatever their number."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def rows(self, centres_T: NDArray[np.int64]) -> Rows:
        """See `Heuristic.rows`."""
        return _two_hop(centres_T, self._graph.indptr, self._graph.indices)


class PageRank:
    """The `top_k` largest entries of a personalised PageRank row (`personalised_pagerank`), the centre not counted.

    `by_column` walks on A D^-1 instead of A_hat, up to a factor of the row: ANS-GT's second definition (ans-gt 1.4).
    """

    def __init__(self, graph: Graph, *, restart: float, epsilon: float, top_k: int, by_column: bool = False) -> None:
        self._graph = graph
        self._restart, self._epsilon, self._by_column = restart, epsilon, by_column
        self._cache = _RowCache(graph.num_nodes, min(top_k + 1, graph.num_nodes))

    def rows(self, centres_T: NDArray[np.int64]) -> Rows:
        """See `Heuristic.rows`."""
        return self._cache.rows(centres_T, self._push)

    def _push(self, centres_T: NDArray[np.int64], nodes_TK: NDArray, values_TK: NDArray, counts_T: NDArray) -> None:
        matrix = (self._graph.indptr, self._graph.indices, self._restart, self._epsilon)
        pagerank_rows(centres_T, *matrix, self._by_column, nodes_TK, values_TK, counts_T)


class Nearest:
    """Cosine similarity of features (ans-gt 1.4), the `top_k` largest positive ones, by blocks of nodes.

    A row costs V F multiplications once; fit for graphs of up to some hundred thousand nodes.
    """

    def __init__(self, graph: Graph, top_k: int) -> None:
        self._graph = graph
        self._unit_VF: NDArray[np.float32] | None = None
        self._lock = Lock()
        self._cache = _RowCache(graph.num_nodes, min(top_k, graph.num_nodes))

    def rows(self, centres_T: NDArray[np.int64]) -> Rows:
        """See `Heuristic.rows`."""
        return self._cache.rows(centres_T, self._search)

    def _search(self, centres_T: NDArray[np.int64], nodes_TK: NDArray, values_TK: NDArray, counts_T: NDArray) -> None:
        with self._lock:
            if self._unit_VF is None:
                self._unit_VF = unit_rows(self._graph.features_VF)
        nearest_rows(self._unit_VF, centres_T, nodes_TK, values_TK, counts_T)


class _RowCache:
    """Rows of at most K entries of the centres asked for last, within `CACHE_BYTES`; the oldest make room.

    Safe to use from several threads: rows are computed outside the lock, and computing one twice gives the same.
    """

    def __init__(self, num_nodes: int, top_k: int) -> None:
        capacity = max(1, min(num_nodes, CACHE_BYTES // (8 * max(1, top_k) + 12)))
        self._top_k = top_k
        self._place_V = np.full(num_nodes, -1, np.int32)
        self._owner = np.full(capacity, -1, np.int64)
        self._nodes_CK = np.empty((capacity, top_k), np.int32)
        self._values_CK = np.empty((capacity, top_k), np.float32)
        self._counts_C = np.zeros(capacity, np.int32)
        self._next = 0
        self._lock = Lock()

    def rows(self, centres_T: NDArray[np.int64], compute: _Compute) -> Rows:
        """Cached rows, and computed ones where there are none."""
        nodes_TK = np.empty((len(centres_T), self._top_k), np.int32)
        values_TK = np.zeros((len(centres_T), self._top_k), np.float64)
        counts_T = np.zeros(len(centres_T), np.int64)
        with self._lock:
            place_T = self._place_V[centres_T]
            known = np.flatnonzero(place_T >= 0)
            place = place_T[known]
            nodes_TK[known], values_TK[known] = self._nodes_CK[place], self._values_CK[place]
            counts_T[known] = self._counts_C[place]
        missing = np.flatnonzero(place_T < 0)
        if len(missing):
            part = (nodes_TK[missing], values_TK[missing], counts_T[missing])
            compute(centres_T[missing], *part)
            # What is used is what will be remembered, so that a row never depends on whether it was cached.
            part = (part[0], part[1].astype(np.float32), part[2])
            nodes_TK[missing], values_TK[missing], counts_T[missing] = part
            with self._lock:
                self._remember(centres_T[missing], *part)
        kept_TK = np.arange(self._top_k) < counts_T[:, None]
        return np.concatenate([[0], np.cumsum(counts_T)]), nodes_TK[kept_TK], values_TK[kept_TK]

    def _remember(self, centres_T: NDArray, nodes_TK: NDArray, values_TK: NDArray, counts_T: NDArray) -> None:
        capacity = len(self._owner)
        fresh = np.flatnonzero(self._place_V[centres_T] < 0)[-capacity:]
        place = (self._next + np.arange(len(fresh))) % capacity
        evicted = self._owner[place]
        self._place_V[evicted[evicted >= 0]] = -1
        self._nodes_CK[place], self._values_CK[place] = nodes_TK[fresh], values_TK[fresh]
        self._counts_C[place], self._owner[place] = counts_T[fresh], centres_T[fresh]
        self._place_V[centres_T[fresh]] = place
        self._next = int((self._next + len(fresh)) % capacity)


class _Compute(Protocol):
    def __call__(
        self, centres_T: NDArray[np.int64], nodes_TK: NDArray, values_TK: NDArray, counts_T: NDArray
    ) -> None: ...


def _one_hop(centres_T: NDArray, indptr: NDArray, indices: NDArray) -> Rows:
    """Rows of A_hat at int64 centres, without diagonal; CSR with int64 `indptr` and int32 `indices`."""
    first_T, last_T = indptr[centres_T], indptr[centres_T + 1]
    degrees_T = last_T - first_T
    starts_T = np.concatenate([[0], np.cumsum(degrees_T)])
    columns_E = indices[np.arange(starts_T[-1]) + np.repeat(first_T - starts_T[:-1], degrees_T)]
    products_E = np.repeat(degrees_T + 1.0, degrees_T) * (indptr[columns_E + 1] - indptr[columns_E] + 1.0)
    values_E = 1.0 / np.sqrt(products_E)
    values_E[columns_E == np.repeat(centres_T, degrees_T)] = 0.0
    return starts_T, columns_E, values_E


@kernel()
def _two_hop(centres_T: NDArray, indptr: NDArray, indices: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Rows of A_hat^2 at int64 centres, the diagonal set to zero; CSR with int64 `indptr` and int32 `indices`."""
    starts_T = np.zeros(len(centres_T) + 1, np.int64)
    columns_E = np.empty(1024, np.int32)
    values_E = np.empty(1024)
    for row in range(len(centres_T)):
        centre, start = np.int64(centres_T[row]), starts_T[row]
        paths = 1
        for entry in range(indptr[centre], indptr[centre + 1]):
            paths += indptr[indices[entry] + 1] - indptr[indices[entry]] + 1
        paths += indptr[centre + 1] - indptr[centre]
        size = 4
        while size < 2 * paths:
            size *= 2
        if start + paths > len(columns_E):
            larger_E, larger_values_E = np.empty(2 * (start + paths), np.int32), np.empty(2 * (start + paths))
            for entry in range(start):
                larger_E[entry], larger_values_E[entry] = columns_E[entry], values_E[entry]
            columns_E, values_E = larger_E, larger_values_E
        table = np.full(size, -1, np.int64)
        count = 0
        degree = indptr[centre + 1] - indptr[centre] + 1.0
        for step in range(indptr[centre] - 1, indptr[centre + 1]):
            middle = centre if step < indptr[centre] else np.int64(indices[step])
            middle_degree = indptr[middle + 1] - indptr[middle] + 1.0
            for entry in range(indptr[middle] - 1, indptr[middle + 1]):
                other = middle if entry < indptr[middle] else np.int64(indices[entry])
                weight = 1.0 / (middle_degree * np.sqrt(degree * (indptr[other + 1] - indptr[other] + 1.0)))
                place = find(table, other)
                if table[place] == -1:
                    table[place] = other << 32 | count
                    columns_E[start + count], values_E[start + count] = other, 0.0
                    count += 1
                if other != centre:
                    values_E[start + (table[place] & 0xFFFFFFFF)] += weight
        starts_T[row + 1] = start + count
    return starts_T, columns_E[: starts_T[-1]].copy(), values_E[: starts_T[-1]].copy()
