"""Coarsening: a partition of the nodes into super nodes, and the weighted graph between them (ans-gt 1.3).

Shapes: V nodes, S super nodes, F features, E stored directed edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from megagraph.config import CoarseningConfig, UserError
from megagraph.graph.assemble import count_self_loops
from megagraph.graph.contraction import algebraic_jc, variation_neighborhoods
from megagraph.graph.partition import label_propagation, partition
from megagraph.graph.spectral import spectral_errors
from megagraph.graph.store import Coarsening, Graph

Method = Callable[[Graph, CoarseningConfig], tuple[NDArray[np.int64], dict[str, str]]]
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "partition": partition,
        "label_propagation": label_propagation,
        "variation_neighborhoods": variation_neighborhoods,
        "algebraic_jc": algebraic_jc,
    }
)
# The spectrum is reported for graphs up to this size, where it costs a fraction of a second.
SPECTRAL_NODES = 5000
SPECTRAL_VALUES = 10
# Edges that are counted at a time, which bounds the temporaries.
BLOCK_EDGES = 1 << 23


def coarsen(graph: Graph, config: CoarseningConfig) -> Coarsening:
    """Super nodes of an undirected graph: membership, mean features, and A_c = S^(-1/2) P A P^T S^(-1/2).

    P [S, V] is the 0/1 membership and S the diagonal of super-node sizes; A_c is before + I and normalisation and
    holds edges inside a super node on its diagonal. Every super node has a member. The attributes name the method,
    the requested and achieved ratio S/V, the seed, the fraction of edges cut (self-loops not counted), and for graphs
    of at most 5000 nodes the mean and largest relative error of the first eigenvalues (`spectral_errors`). Besides
    the result it needs some 12 bytes per edge and what the method needs. Raises `UserError` for an empty or directed
    graph or where the partitioner gives up.
    """
    if graph.num_nodes == 0:
        raise UserError(f"data set {graph.name} has no nodes, coarsening needs one: use another data set")
    if not graph.undirected:
        raise UserError(f"data set {graph.name} is directed, coarsening needs both directions: set undirected: true")
    membership_V, attributes = METHODS[config.method](graph, config)
    membership_V = np.unique(membership_V, return_inverse=True)[1].astype(np.int64)
    size_S = np.bincount(membership_V)
    counts = _coarse_counts(graph, membership_V, size_S)
    return Coarsening(
        membership_V=membership_V,
        features_SF=_mean_features(graph, membership_V, size_S),
        indptr=counts.indptr.astype(np.int64),
        indices=counts.indices.astype(np.int32, copy=False),
        weights=_weights(counts, size_S),
        attributes={
            "method": config.method,
            "requested_ratio": f"{config.ratio:.6g}",
            "achieved_ratio": f"{len(size_S) / graph.num_nodes:.6g}",
            "seed": str(config.seed),
            "cut_fraction": f"{_cut_fraction(graph, counts):.6g}",
            **attributes,
            **_spectral_attributes(graph, membership_V),
        },
    )


def _mean_features(graph: Graph, membership_V: NDArray[np.int64], size_S: NDArray[np.int64]) -> NDArray[np.float32]:
    """C X [S, F] with C the row-normalised P."""
    num_nodes = graph.num_nodes
    ones: NDArray = np.ones(num_nodes, np.float32)
    members = sp.coo_array((ones, (membership_V, np.arange(num_nodes))), shape=(len(size_S), num_nodes)).tocsr()
    sums_SF = members @ graph.features_VF
    sums_SF /= size_S[:, None].astype(np.float32)
    return sums_SF


def _coarse_counts(graph: Graph, membership_V: NDArray[np.int64], size_S: NDArray[np.int64]) -> sp.csr_array:
    """P A P^T [S, S] as int32 (an edge between two super nodes counts in both directions), columns sorted.

    Nodes are visited super node by super node in blocks, so that every block of rows is final when it is made.
    """
    num_super = len(size_S)
    order_V = np.argsort(membership_V, kind="stable")
    degree_V = np.diff(graph.indptr)
    nodes_before = np.concatenate([[0], np.cumsum(size_S)])
    edges_before = np.concatenate([[0], np.cumsum(degree_V[order_V])])[nodes_before]
    cuts = np.searchsorted(edges_before, np.arange(BLOCK_EDGES, graph.num_edges, BLOCK_EDGES), side="right")
    bounds = np.unique(np.concatenate([[0], cuts, [num_super]]))
    blocks = []
    for first, last in pairwise(bounds):
        nodes = order_V[nodes_before[first] : nodes_before[last]]
        degree, group = degree_V[nodes], membership_V[nodes] - first
        steps = np.arange(degree.sum()) - np.repeat(np.cumsum(degree) - degree, degree)
        columns = membership_V[graph.indices[np.repeat(graph.indptr[nodes], degree) + steps]].astype(np.int32)
        rows = np.repeat(group.astype(np.int32), degree)
        ones = np.ones(len(rows), np.int32)
        block = sp.coo_array((ones, (rows, columns)), shape=(last - first, num_super)).tocsr()
        block.sort_indices()
        blocks.append(block)
    return sp.csr_array(sp.vstack(blocks, format="csr"))


def _weights(counts: sp.csr_array, size_S: NDArray[np.int64]) -> NDArray[np.float32]:
    """The values of A_c; symmetric to the bit, because counts are whole numbers and s_i s_j = s_j s_i."""
    rows = np.repeat(np.arange(len(size_S), dtype=np.int32), np.diff(counts.indptr))
    weights = np.empty(counts.nnz, np.float32)
    for first in range(0, counts.nnz, BLOCK_EDGES):
        part = slice(first, first + BLOCK_EDGES)
        product = size_S[rows[part]].astype(np.float64) * size_S[counts.indices[part]]
        weights[part] = counts.data[part] / np.sqrt(product)
    return weights


def _cut_fraction(graph: Graph, counts: sp.csr_array) -> float:
    """Fraction of edges between two super nodes; 0 without edges."""
    num_edges = graph.num_edges - count_self_loops(graph)
    num_cut = graph.num_edges - int(counts.diagonal().sum(dtype=np.int64))
    return num_cut / num_edges if num_edges else 0.0


def _spectral_attributes(graph: Graph, membership_V: NDArray[np.int64]) -> dict[str, str]:
    if graph.num_nodes > SPECTRAL_NODES:
        return {}
    errors = spectral_errors(graph, membership_V, SPECTRAL_VALUES)
    if not len(errors):
        return {}
    return {
        "spectral_values": str(len(errors)),
        "spectral_error_mean": f"{errors.mean():.4g}",
        "spectral_error_max": f"{errors.max():.4g}",
    }
