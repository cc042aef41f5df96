"""Personalised PageRank rows by local push: work and memory of a row depend on what it reaches, not on the graph.

Reached nodes get local numbers through a small hash table, so a row touches no array over V; the work arrays are made
once for all rows of a call, grow with the widest row and are cleared where they were used.

Shapes: V nodes, T target nodes, K kept entries per target, L local numbers of the nodes that a row has reached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numba import njit
from numpy.typing import NDArray

from megagraph.graph.store import Graph

_START = 1024
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_MASS, _LEFT, _LIMIT = 0, 1, 2
_NODE, _SLOT, _NOW, _NEXT = 0, 1, 2, 3


@njit(cache=True, nogil=True, inline="always")
def find(table: NDArray, node: Any) -> Any:
    """Place of int `node` in a table of ``node << 32 | number`` (-1 is free), or the free place where it belongs."""
    mask = len(table) - 1
    place = np.int64((np.uint64(node) * _SPREAD) >> _HALF) & mask
    while table[place] != -1 and (table[place] >> 32) != node:
        place = (place + 1) & mask
    return place


@njit(cache=True, nogil=True)
def keep_largest(value: float, node: int, kept: int, values_K: NDArray, nodes_K: NDArray) -> int:
    """Offer (float value, int node) to a min-heap of `kept` entries that holds the K largest; the new length."""
    top_k = len(values_K)
    if kept < top_k:
        place = kept
        while place > 0 and values_K[(place - 1) >> 1] > value:
            parent = (place - 1) >> 1
            values_K[place], nodes_K[place] = values_K[parent], nodes_K[parent]
            place = parent
        values_K[place], nodes_K[place] = value, node
        return kept + 1
    if top_k == 0 or value <= values_K[0]:
        return kept
    place = 0
    while 2 * place + 1 < top_k:
        child = 2 * place + 1
        if child + 1 < top_k and values_K[child + 1] < values_K[child]:
            child += 1
        if values_K[child] >= value:
            break
        values_K[place], nodes_K[place] = values_K[child], nodes_K[child]
        place = child
    values_K[place], nodes_K[place] = value, node
    return kept


@njit(cache=True, nogil=True)
def _grown(array_XL: NDArray, size: int) -> NDArray:
    """A copy of the work array with room for int `size` local numbers, zero beyond the old ones."""
    grown_XL = np.zeros((array_XL.shape[0], size), array_XL.dtype)
    grown_XL[:, : array_XL.shape[1]] = array_XL
    return grown_XL


@njit(cache=True, nogil=True)
def _rehashed(names_XL: NDArray, count: int, size: int) -> NDArray:
    """A table of int `size` places that knows the first int `count` local nodes; their places are renewed."""
    table = np.full(size, -1, np.int64)
    for local in range(count):
        node = np.int64(names_XL[_NODE, local])
        place = find(table, node)
        table[place] = node << 32 | local
        names_XL[_SLOT, local] = place
    return table


@njit(cache=True, nogil=True)
def _send(
    local: int,
    count: int,
    waiting: int,
    indptr: NDArray,
    indices: NDArray,
    restart: float,
    epsilon: float,
    loop: float,
    amounts_XL: NDArray,
    names_XL: NDArray,
    queued_XL: NDArray,
    table: NDArray,
) -> tuple[int, int]:
    """Push what is left at a local number to its neighbours; new (count, waiting).

    Amounts are scaled by sqrt(d+1): a neighbour v then gets the same from u whatever its degree, and "residual above
    epsilon sqrt(d+1)" reads "left above epsilon (d+1)". The self-loop of A + I is summed in closed form.
    """
    node = names_XL[_NODE, local]
    start, stop = indptr[node], indptr[node + 1]
    amount = amounts_XL[_LEFT, local] / (stop - start + loop * restart)
    amounts_XL[_LEFT, local] = 0.0
    amounts_XL[_MASS, local] += restart * amount * (stop - start + loop)
    queued_XL[0, local] = 0
    flow = (1.0 - restart) * amount
    for entry in range(start, stop):
        other = np.int64(indices[entry])
        place = find(table, other)
        if table[place] == -1:
            table[place] = other << 32 | count
            names_XL[_NODE, count] = other
            names_XL[_SLOT, count] = place
            amounts_XL[_LIMIT, count] = epsilon * (indptr[other + 1] - indptr[other] + loop)
            there = count
            count += 1
        else:
            there = table[place] & 0xFFFFFFFF
        amounts_XL[_LEFT, there] += flow
        if queued_XL[0, there] == 0 and amounts_XL[_LEFT, there] > amounts_XL[_LIMIT, there]:
            queued_XL[0, there] = 1
            names_XL[_NEXT, waiting] = there
            waiting += 1
    return count, waiting


@njit(cache=True, nogil=True)
def _keep(
    count: int,
    restart: float,
    epsilon: float,
    by_column: bool,
    amounts_XL: NDArray,
    names_XL: NDArray,
    queued_XL: NDArray,
    table: NDArray,
    values_K: NDArray,
    nodes_K: NDArray,
) -> int:
    """Write the largest estimates of a row, in no order, and clear the work arrays; the number of kept entries.

    The estimate of an entry is the pushed mass plus c times what is left there, still below the exact value.
    """
    kept = 0
    for local in range(count):
        value = amounts_XL[_MASS, local] + restart * amounts_XL[_LEFT, local]
        scale = np.sqrt(amounts_XL[_LIMIT, local] / epsilon)
        value /= scale * scale if by_column else scale
        kept = keep_largest(value, names_XL[_NODE, local], kept, values_K, nodes_K)
        amounts_XL[_MASS, local] = 0.0
        amounts_XL[_LEFT, local] = 0.0
        queued_XL[0, local] = 0
        table[names_XL[_SLOT, local]] = -1
    return kept


@njit(cache=True, nogil=True)
def pagerank_rows(
    nodes_T: NDArray,
    indptr: NDArray,
    indices: NDArray,
    restart: float,
    epsilon: float,
    by_column: bool,
    nodes_TK: NDArray,
    values_TK: NDArray,
    counts_T: NDArray,
) -> None:
    """Fill int32 `nodes_TK`, float64 `values_TK` and int64 `counts_T` with the largest entries per target, unordered.

    The graph is CSR with int64 `indptr` and int32 `indices`; see `personalised_pagerank` for what a row is.
    bool `by_column` walks on A D^-1 instead of A_hat, up to a factor of the row (ans-gt 1.2).
    """
    amounts_XL = np.zeros((3, _START))
    names_XL = np.zeros((4, _START), np.int32)
    queued_XL = np.zeros((1, _START), np.uint8)
    table = np.full(4 * _START, -1, np.int64)
    loop = 0.0 if by_column else 1.0
    for row in range(len(nodes_T)):
        source = np.int64(nodes_T[row])
        degree = indptr[source + 1] - indptr[source] + loop
        if degree == 0.0:
            counts_T[row] = 0
            continue
        place = find(table, source)
        table[place] = source << 32
        names_XL[_NODE, 0], names_XL[_SLOT, 0], names_XL[_NEXT, 0] = source, place, 0
        amounts_XL[_LEFT, 0], amounts_XL[_LIMIT, 0] = np.sqrt(degree), epsilon * degree
        queued_XL[0, 0] = 1
        count, waiting = 1, 1
        while waiting > 0:
            names_XL[_NOW, :waiting] = names_XL[_NEXT, :waiting]
            turn, waiting = waiting, 0
            for index in range(turn):
                local = names_XL[_NOW, index]
                node = names_XL[_NODE, local]
                need = count + indptr[node + 1] - indptr[node]
                if need > amounts_XL.shape[1]:
                    amounts_XL, names_XL = _grown(amounts_XL, 2 * need), _grown(names_XL, 2 * need)
                    queued_XL = _grown(queued_XL, 2 * need)
                if 2 * need > len(table):
                    size = len(table)
                    while size < 4 * need:
                        size *= 2
                    table = _rehashed(names_XL, count, size)
                work = (amounts_XL, names_XL, queued_XL, table)
                count, waiting = _send(local, count, waiting, indptr, indices, restart, epsilon, loop, *work)
        work = (amounts_XL, names_XL, queued_XL, table)
        counts_T[row] = _keep(count, restart, epsilon, by_column, *work, values_TK[row], nodes_TK[row])


def personalised_pagerank(
    graph: Graph, nodes_T: NDArray[np.int64], *, restart: float, epsilon: float, top_k: int
) -> sp.csr_array:
    """The `top_k` largest entries of rows `nodes_T` of c (I - (1-c) A_hat)^-1, c = `restart`, as float64 CSR [T, V].

    Local push (Andersen, Chung, Lang 2006) on the symmetrically normalised A_hat of an undirected graph (ans-gt 1.4).
    Entries are never too large, and too small by at most ``epsilon * sqrt(degree_j + 1)``: what is left at u is below
    epsilon sqrt(d_u+1), and the vector sqrt(d+1) is a fixed point of the whole operator. Work per target is at most
    sqrt(degree_i + 1) / (c epsilon) edge visits; memory is what the widest row reaches. The target itself is an entry
    of its row.
    """
    top_k = min(top_k, graph.num_nodes)
    nodes_TK = np.empty((len(nodes_T), top_k), np.int32)
    values_TK = np.empty((len(nodes_T), top_k), np.float64)
    counts_T = np.zeros(len(nodes_T), np.int64)
    targets_T = np.ascontiguousarray(nodes_T, np.int64)
    rule = (restart, epsilon, False)
    pagerank_rows(targets_T, graph.indptr, graph.indices, *rule, nodes_TK, values_TK, counts_T)
    kept_TK = np.arange(top_k) < counts_T[:, None]
    indptr = np.concatenate([[0], np.cumsum(counts_T)])
    rows = sp.csr_array((values_TK[kept_TK], nodes_TK[kept_TK], indptr), shape=(len(nodes_T), graph.num_nodes))
    rows.sort_indices()
    return rows
