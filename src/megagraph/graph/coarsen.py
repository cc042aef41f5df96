"""Coarsening: a partition of the nodes into super nodes, and the weighted graph between them (ans-gt 1.3).

Shapes: V nodes, S super nodes, F features, E stored directed edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import pymetis
import scipy.sparse as sp
from numpy.typing import NDArray

from megagraph.config import CoarseningConfig, UserError
from megagraph.graph.assemble import row_of_edge
from megagraph.graph.store import Coarsening, Graph


def coarsen(graph: Graph, config: CoarseningConfig) -> Coarsening:
    """Super nodes of an undirected graph: membership, mean features, and A_c = S^(-1/2) P A P^T S^(-1/2).

    P [S, V] is the 0/1 membership and S the diagonal of super-node sizes; A_c is before + I and normalisation and
    holds edges inside a super node on its diagonal. Every super node has a member. The attributes name the method,
    the requested and achieved ratio S/V, the seed and the fraction of edges cut (self-loops not counted).
    Raises `UserError` for an empty graph or where the partitioner gives up.
    """
    if graph.num_nodes == 0:
        raise UserError(f"data set {graph.name} has no nodes, coarsening needs one: use another data set")
    _, membership_V = np.unique(METHODS[config.method](graph, config), return_inverse=True)
    membership_V = membership_V.astype(np.int64)
    size_S = np.bincount(membership_V)
    adjacency = _coarse_adjacency(graph, membership_V, size_S)
    return Coarsening(
        membership_V=membership_V,
        features_SF=_mean_features(graph, membership_V, size_S),
        indptr=adjacency.indptr.astype(np.int64),
        indices=adjacency.indices.astype(np.int32, copy=False),
        weights=adjacency.data.astype(np.float32),
        attributes={
            "method": config.method,
            "requested_ratio": f"{config.ratio:.6g}",
            "achieved_ratio": f"{len(size_S) / graph.num_nodes:.6g}",
            "seed": str(config.seed),
            "cut_fraction": f"{_cut_fraction(graph, membership_V):.6g}",
        },
    )


def _partition(graph: Graph, config: CoarseningConfig) -> NDArray[np.int64]:
    """METIS into max(1, round(ratio * V)) parts; numbers may have gaps.

    Nodes without a neighbour give METIS nothing to go by: they are grouped among themselves at the same ratio, so
    that they do not blur the features of connected parts.
    """
    num_parts = max(1, round(config.ratio * graph.num_nodes))
    if num_parts >= graph.num_nodes:
        return np.arange(graph.num_nodes)
    membership_V = np.zeros(graph.num_nodes, np.int64)
    if num_parts == 1:
        return membership_V
    adjacency = _without_self_loops(graph)
    alone_V = np.diff(adjacency.indptr) == 0
    alone, joined = np.flatnonzero(alone_V), np.flatnonzero(~alone_V)
    num_alone = min(max(round(config.ratio * len(alone)), int(len(alone) > 0)), num_parts)
    if len(joined):
        num_alone = min(num_alone, num_parts - 1)
        membership_V[joined] = _metis(adjacency[joined][:, joined], num_parts - num_alone, config)
    membership_V[alone] = num_parts - num_alone + np.arange(len(alone)) * num_alone // max(len(alone), 1)
    return membership_V


def _without_self_loops(graph: Graph) -> sp.csr_array:
    """The adjacency [V, V] without its diagonal, in arrays of its own (`Graph.adjacency` shares the graph's)."""
    rows = row_of_edge(graph)
    proper = rows != graph.indices
    rows, columns = rows[proper], graph.indices[proper]
    shape = (graph.num_nodes, graph.num_nodes)
    return sp.coo_array((np.ones(len(rows), np.int8), (rows, columns)), shape=shape).tocsr()


def _metis(adjacency: sp.csr_array, num_parts: int, config: CoarseningConfig) -> NDArray[np.int64]:
    """The METIS part of every node of a symmetric graph without self-loops.

    Recursive bisection, not the k-way default: at parts of about ten nodes k-way leaves up to half of the parts
    empty and often ignores the seed; bisection fills every part, cuts fewer edges and is faster. METIS seeds the C
    library, where 0 and 1 start the same stream: the seed goes in one higher.
    """
    if num_parts >= adjacency.shape[0]:
        return np.arange(adjacency.shape[0])
    neighbours = pymetis.CSRAdjacency(adjacency.indptr.astype(np.int64), adjacency.indices.astype(np.int64))
    try:
        result = pymetis.part_graph(
            num_parts, neighbours, recursive=True, options=pymetis.Options(seed=config.seed + 1)
        )
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"coarsening.ratio={config.ratio}: METIS cannot make {num_parts} parts of {adjacency.shape[0]} nodes "
            f"({error}): lower the ratio or give the job more memory"
        ) from None
    return np.asarray(result.vertex_part, np.int64)


METHODS: Mapping[str, Callable[[Graph, CoarseningConfig], NDArray[np.int64]]] = MappingProxyType(
    {"partition": _partition}
)


def _indicator(membership_V: NDArray[np.int64], num_super: int, dtype: type) -> sp.csr_array:
    """P [S, V]."""
    num_nodes = len(membership_V)
    ones: NDArray = np.ones(num_nodes, dtype)
    return sp.coo_array((ones, (membership_V, np.arange(num_nodes))), shape=(num_super, num_nodes)).tocsr()


def _mean_features(graph: Graph, membership_V: NDArray[np.int64], size_S: NDArray[np.int64]) -> NDArray[np.float32]:
    """C X [S, F] with C the row-normalised P."""
    sums_SF = _indicator(membership_V, len(size_S), np.float32) @ graph.features_VF
    return (sums_SF / size_S[:, None]).astype(np.float32)


def _coarse_adjacency(graph: Graph, membership_V: NDArray[np.int64], size_S: NDArray[np.int64]) -> sp.csr_array:
    """A_c [S, S] in float64, columns sorted; symmetric to the bit, because the edge counts are whole numbers."""
    indicator = _indicator(membership_V, len(size_S), np.float64)
    counts = (indicator @ graph.adjacency() @ indicator.T).tocsr()
    counts.sort_indices()
    rows = np.repeat(np.arange(len(size_S)), np.diff(counts.indptr))
    counts.data /= np.sqrt(size_S[rows].astype(np.float64) * size_S[counts.indices])
    return counts


def _cut_fraction(graph: Graph, membership_V: NDArray[np.int64]) -> float:
    """Fraction of edges between two super nodes; 0 without edges."""
    rows = row_of_edge(graph)
    num_edges = np.count_nonzero(rows != graph.indices)
    num_cut = np.count_nonzero(membership_V[rows] != membership_V[graph.indices])
    return num_cut / num_edges if num_edges else 0.0
