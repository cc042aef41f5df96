"""Personalised PageRank rows by local push: work and memory of a row depend on what it reaches, not on the graph.

Reached nodes get local numbers through a small hash table, so a row touches no array over V. The work arrays are made
once for all rows of a call and grow with the widest row, which is then begun again.

Shapes: V nodes, T target nodes, K kept entries per target, L local numbers of the nodes that a row has reached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from megagraph.graph.jit import inner, kernel
from megagraph.graph.store import Graph

_START = 2048
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_LEFT, _LIMIT = 0, 1
_NODE, _SLOT, _QUEUE = 0, 1, 2


@inner()
def find(table: NDArray, node: Any) -> Any:
    """Place of int `node` in a table of ``node << 32 | number`` (-1 is free), or the free place where it belongs."""
    mask = len(table) - 1
    place = np.int64((np.uint64(node) * _SPREAD) >> _HALF) & mask
    while table[place] != -1 and (table[place] >> 32) != node:
        place = (place + 1) & mask
    return place


@inner()
def keep_largest(value: float, node: int, kept: int, values_K: NDArray, nodes_K: NDArray) -> int:
    """Offer (float value, int node) to a min-heap of `kept` entries that holds the K largest; the new length."""
    top_k = len(values_K)
    if kept < top_k:
        place = kept
        while place > 0 and values_K[(place - 1) >> 1] > value:
            parent = (place - 1) >> 1
            values_K[place] = values_K[parent]
            nodes_K[place] = nodes_K[parent]
            place = parent
        values_K[place] = value
        nodes_K[place] = node
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
        values_K[place] = values_K[child]
        nodes_K[place] = nodes_K[child]
        place = child
    values_K[place] = value
    nodes_K[place] = node
    return kept


@inner()
def _reach(
    node: Any,
    count: int,
    indptr: NDArray,
    epsilon: float,
    loop: float,
    amounts_LX: NDArray,
    names_XL: NDArray,
    table: NDArray,
) -> Any:
    """Local number of int64 `node`, which is `count` where it is a new one."""
    place = find(table, node)
    if table[place] != -1:
        return table[place] & 0xFFFFFFFF
    table[place] = node << 32 | count
    names_XL[_NODE, count] = node
    names_XL[_SLOT, count] = place
    amounts_LX[count, _LIMIT] = epsilon * (indptr[node + 1] - indptr[node] + loop)
    return count


@inner()
def _keep(
    count: int,
    restart: float,
    epsilon: float,
    loop: float,
    mass_L: NDArray,
    amounts_LX: NDArray,
    names_XL: NDArray,
    table: NDArray,
    values_K: NDArray,
    nodes_K: NDArray,
) -> int:
    """Write the largest estimates of a row, in no order, and clear the work arrays; the number of kept entries.

    The estimate of an entry is the pushed mass plus c times what is left there, still below the exact value.
    """
    kept: Any = np.int64(0)
    for local in range(count):
        value = mass_L[local] + restart * amounts_LX[local, _LEFT]
        scale = np.sqrt(amounts_LX[local, _LIMIT] / epsilon)
        value /= scale if loop > 0.0 else scale * scale
        kept = keep_largest(value, names_XL[_NODE, local], kept, values_K, nodes_K)
        mass_L[local] = 0.0
        amounts_LX[local, _LEFT] = 0.0
        table[names_XL[_SLOT, local]] = -1
    return kept


@kernel()
def _push_rows(
    nodes_T: NDArray,
    begin: int,
    indptr: NDArray,
    indices: NDArray,
    restart: float,
    epsilon: float,
    loop: float,
    mass_L: NDArray,
    amounts_LX: NDArray,
    names_XL: NDArray,
    table: NDArray,
    nodes_TK: NDArray,
    values_TK: NDArray,
    counts_T: NDArray,
) -> tuple[int, int]:
    """Rows `begin` and after of `pagerank_rows`, until one needs more room: that row and the room, or (T, 0).

    Amounts are scaled by sqrt(d+1): a neighbour v then gets the same from u whatever its degree, and "residual above
    epsilon sqrt(d+1)" reads "left above epsilon (d+1)". The self-loop of A + I, where float `loop` is 1, is summed in
    closed form. The queue is a ring; a node waits in it exactly while what is left there is above its limit. The work
    arrays are as made by `pagerank_rows` on entry, and again when the last row is done.
    """
    room = len(amounts_LX)
    for row in range(begin, len(nodes_T)):
        source = nodes_T[row]
        degree = indptr[source + 1] - indptr[source] + loop
        if degree == 0.0:
            counts_T[row] = 0
            continue
        _reach(source, np.int64(0), indptr, epsilon, loop, amounts_LX, names_XL, table)
        amounts_LX[0, _LEFT] = np.sqrt(degree)
        names_XL[_QUEUE, 0] = 0
        count: Any = np.int64(1)
        head, waiting = 0, 1
        while waiting > 0:
            local = np.int64(names_XL[_QUEUE, head])
            node = np.int64(names_XL[_NODE, local])
            head, waiting = head + 1 if head + 1 < room else 0, waiting - 1
            start, stop = indptr[node], indptr[node + 1]
            if count + stop - start > room:
                return row, count + stop - start
            amount = amounts_LX[local, _LEFT] / (stop - start + loop * restart)
            amounts_LX[local, _LEFT] = 0.0
            mass_L[local] += restart * amount * (stop - start + loop)
            flow = (1.0 - restart) * amount
            for entry in range(start, stop):
                there = _reach(np.int64(indices[entry]), count, indptr, epsilon, loop, amounts_LX, names_XL, table)
                count += there == count
                before, limit = amounts_LX[there, _LEFT], amounts_LX[there, _LIMIT]
                amounts_LX[there, _LEFT] = before + flow
                if before <= limit and before + flow > limit:
                    tail = head + waiting
                    names_XL[_QUEUE, tail if tail < room else tail - room] = there
                    waiting += 1
        counts_T[row] = _keep(
            count, restart, epsilon, loop, mass_L, amounts_LX, names_XL, table, values_TK[row], nodes_TK[row]
        )
    return len(nodes_T), 0


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
    rule = (restart, epsilon, 0.0 if by_column else 1.0)
    row, room, need = 0, _START, 0
    while row < len(nodes_T):
        work = (np.zeros(room), np.zeros((room, 2)), np.empty((3, room), np.int32), np.full(2 * room, -1, np.int64))
        row, need = _push_rows(nodes_T, row, indptr, indices, *rule, *work, nodes_TK, values_TK, counts_T)
        while room < need:
            room *= 2


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
