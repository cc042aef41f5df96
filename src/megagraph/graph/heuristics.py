"""Where the nodes of a sequence come from: personalised PageRank and one-hop rows, merged into `Candidates`.

Shapes: V nodes, T target nodes, E stored candidates, H heuristics (not heads here), K kept entries per target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numba import njit
from numpy.typing import NDArray

from megagraph.graph.store import Graph
from megagraph.graph.structure import normalised_adjacency


@dataclass(frozen=True)
class Candidates:
    """The nodes that may stand beside each centre, in CSR form over V; the centre itself is never among its own.

    `indptr` [V+1] and `indices` [E] are the union of the heuristics' supports, columns ascending. Row h of
    `values_HE` is heuristic h, each centre's values summing to 1 (0 where the heuristic knows no node);
    `weights_H` sums to 1 (ans-gt 1.4: s = sum_h p_h s_h / sum(s_h)).
    """

    names: tuple[str, ...]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values_HE: NDArray[np.float32]
    weights_H: NDArray[np.float64]

    def mixture(self) -> NDArray[np.float32]:
        """The sampling weight s [E] of every candidate."""
        return (self.weights_H.astype(np.float32) @ self.values_HE).astype(np.float32)


@njit(cache=True)
def _keep_largest(value: float, node: int, kept: int, top_k: int, values_K: NDArray, nodes_K: NDArray) -> int:
    """Insert (float value, int node) into the descending lists of `kept` entries; the new length, at most `top_k`."""
    if kept == top_k:
        if top_k == 0 or value <= values_K[kept - 1]:
            return kept
        kept -= 1
    place = kept
    while place > 0 and values_K[place - 1] < value:
        values_K[place] = values_K[place - 1]
        nodes_K[place] = nodes_K[place - 1]
        place -= 1
    values_K[place] = value
    nodes_K[place] = node
    return kept + 1


@njit(cache=True)
def _push(
    source: int,
    indptr: NDArray,
    indices: NDArray,
    share_V: NDArray,
    restart: float,
    epsilon: float,
    mass_V: NDArray,
    scaled_V: NDArray,
    state_V: NDArray,
    queue_V: NDArray,
    touched_V: NDArray,
) -> int:
    """Local push from int64 `source` over CSR (int64 `indptr`, int32 `indices`); the number of touched nodes.

    float64 `scaled_V` holds the residual over sqrt(d+1): a push at u then sends scaled_u share_v to v, with float64
    `share_V` = (1-c) / (d+1), and "residual above epsilon sqrt(d+1)" is a comparison with epsilon. The self-loop of
    A + I is summed in closed form.
    uint8 `state_V`: 0 untouched, 1 touched, 2 queued. Work arrays must be zero on entry; the caller clears them.
    """
    num_nodes = len(indptr) - 1
    scaled_V[source] = 1.0 / np.sqrt(indptr[source + 1] - indptr[source] + 1.0)
    state_V[source] = 2
    touched_V[0] = source
    queue_V[0] = source
    num_touched, head, waiting = 1, 0, 1
    while waiting > 0:
        node = queue_V[head]
        head = head + 1 if head + 1 < num_nodes else 0
        waiting -= 1
        state_V[node] = 1
        degree = indptr[node + 1] - indptr[node] + 1.0
        amount = scaled_V[node] / (1.0 - share_V[node])
        scaled_V[node] = 0.0
        mass_V[node] += restart * amount * np.sqrt(degree)
        for entry in range(indptr[node], indptr[node + 1]):
            other = indices[entry]
            scaled_V[other] += amount * share_V[other]
            if state_V[other] == 0:
                touched_V[num_touched] = other
                num_touched += 1
                state_V[other] = 1
            if state_V[other] == 1 and scaled_V[other] > epsilon:
                tail = head + waiting
                queue_V[tail if tail < num_nodes else tail - num_nodes] = other
                waiting += 1
                state_V[other] = 2
    return num_touched


@njit(cache=True)
def _pagerank_rows(
    nodes_T: NDArray,
    indptr: NDArray,
    indices: NDArray,
    restart: float,
    epsilon: float,
    nodes_TK: NDArray,
    values_TK: NDArray,
    counts_T: NDArray,
) -> None:
    """Fill int32 `nodes_TK`, float64 `values_TK` and int64 `counts_T` with the largest entries, descending, per target.

    The estimate of an entry is the pushed mass plus c times what is left there, still below the exact value.
    """
    num_nodes = len(indptr) - 1
    mass_V = np.zeros(num_nodes)
    scaled_V = np.zeros(num_nodes)
    state_V = np.zeros(num_nodes, np.uint8)
    queue_V = np.empty(num_nodes, np.int64)
    share_V = (1.0 - restart) / (indptr[1:] - indptr[:-1] + 1.0)
    touched_V = np.empty(num_nodes, np.int64)
    for row in range(len(nodes_T)):
        touched = _push(
            nodes_T[row], indptr, indices, share_V, restart, epsilon, mass_V, scaled_V, state_V, queue_V, touched_V
        )
        kept = 0
        for place in range(touched):
            node = touched_V[place]
            left = scaled_V[node] * np.sqrt(indptr[node + 1] - indptr[node] + 1.0)
            value = mass_V[node] + restart * left
            kept = _keep_largest(value, node, kept, nodes_TK.shape[1], values_TK[row], nodes_TK[row])
            mass_V[node] = 0.0
            scaled_V[node] = 0.0
            state_V[node] = 0
        counts_T[row] = kept


def personalised_pagerank(
    graph: Graph, nodes_T: NDArray[np.int64], *, restart: float, epsilon: float, top_k: int
) -> sp.csr_array:
    """The `top_k` largest entries of rows `nodes_T` of c (I - (1-c) A_hat)^-1, c = `restart`, as float64 CSR [T, V].

    Local push (Andersen, Chung, Lang 2006) on the symmetrically normalised A_hat of an undirected graph (ans-gt 1.4).
    Entries are never too large, and too small by at most ``epsilon * sqrt(degree_j + 1)``: what is left at u is below
    epsilon sqrt(d_u+1), and the vector sqrt(d+1) is a fixed point of the whole operator. Work per target is at most
    sqrt(degree_i + 1) / (c epsilon) edge visits; memory O(V + T top_k). The target itself is an entry of its row.
    """
    top_k = min(top_k, graph.num_nodes)
    nodes_TK = np.empty((len(nodes_T), top_k), np.int32)
    values_TK = np.empty((len(nodes_T), top_k), np.float64)
    counts_T = np.zeros(len(nodes_T), np.int64)
    _pagerank_rows(
        np.ascontiguousarray(nodes_T, np.int64),
        np.ascontiguousarray(graph.indptr, np.int64),
        np.ascontiguousarray(graph.indices, np.int32),
        float(restart),
        float(epsilon),
        nodes_TK,
        values_TK,
        counts_T,
    )
    kept_TK = np.arange(top_k) < counts_T[:, None]
    indptr = np.concatenate([[0], np.cumsum(counts_T)])
    rows = sp.csr_array((values_TK[kept_TK], nodes_TK[kept_TK], indptr), shape=(len(nodes_T), graph.num_nodes))
    rows.sort_indices()
    return rows


def one_hop(graph: Graph) -> sp.csr_array:
    """A_hat without its diagonal as float64 CSR [V, V] (ans-gt 1.4)."""
    return _without_diagonal(normalised_adjacency(graph))


def _without_diagonal(matrix: sp.csr_array) -> sp.csr_array:
    row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    keep = row != matrix.indices
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row[keep], minlength=matrix.shape[0]))])
    return sp.csr_array((matrix.data[keep], matrix.indices[keep], indptr), shape=matrix.shape)


@njit(cache=True)
def _place(
    union_indptr: NDArray,
    union_indices: NDArray,
    indptr: NDArray,
    indices: NDArray,
    data: NDArray,
    out_E: NDArray,
) -> None:
    """Write each row of float64 CSR `data`, scaled to sum 1, into float32 `out_E` at its place in the union's rows.

    Columns ascend in both, and the union holds every column of the row.
    """
    for row in range(len(indptr) - 1):
        total = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            total += data[entry]
        place = union_indptr[row]
        for entry in range(indptr[row], indptr[row + 1]):
            while union_indices[place] != indices[entry]:
                place += 1
            out_E[place] = data[entry] / total


def merge(rows: Mapping[str, sp.csr_array], weights: Mapping[Any, float]) -> Candidates:
    """`Candidates` from heuristics given as non-negative CSR [V, V] and their mixture weights (any positive scale)."""
    names = tuple(rows)
    matrices = [_without_diagonal(sp.csr_array(rows[name])) for name in names]
    union: Any = sp.csr_array(matrices[0].shape, dtype=np.float32)
    for matrix in matrices:
        matrix.eliminate_zeros()
        matrix.sort_indices()
        pattern = sp.csr_array((np.ones(matrix.nnz, np.float32), matrix.indices, matrix.indptr), shape=matrix.shape)
        union = union + pattern
    union.sort_indices()
    indptr, indices = union.indptr.astype(np.int64), union.indices.astype(np.int32)
    values_HE = np.zeros((len(names), union.nnz), np.float32)
    for values_E, matrix in zip(values_HE, matrices, strict=True):
        own = (matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), matrix.data.astype(np.float64))
        _place(indptr, indices, *own, values_E)
    weights_H = np.array([weights[name] for name in names], np.float64)
    return Candidates(names, indptr, indices, values_HE, weights_H / weights_H.sum())


def candidates(
    graph: Graph, heuristics: Mapping[Any, float], *, restart: float, epsilon: float, top_k: int
) -> Candidates:
    """Candidates of every node from the heuristics named (`ppr`, `one_hop`) with their mixture weights.

    `top_k` bounds the PageRank entries per node, the centre not counted; memory O(E + V top_k).
    """
    rows: dict[str, sp.csr_array] = {}
    if "ppr" in heuristics:
        every = np.arange(graph.num_nodes)
        rows["ppr"] = personalised_pagerank(graph, every, restart=restart, epsilon=epsilon, top_k=top_k + 1)
    if "one_hop" in heuristics:
        rows["one_hop"] = one_hop(graph)
    return merge(rows, heuristics)
