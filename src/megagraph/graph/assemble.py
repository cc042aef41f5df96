"""From a loader's matrix to a `Graph`: the one place that makes the adjacency 0/1, canonical and (as asked) undirected.

Shapes: V nodes, E stored directed edges, F features.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from megagraph.graph.store import Graph, Split


def assemble(
    name: str,
    adjacency_VV: sp.csr_array | sp.coo_array,
    features_VF: NDArray[np.float32],
    labels_V: NDArray[np.int64],
    num_classes: int,
    public_split: Split | None = None,
    *,
    undirected: bool = True,
    drop_self_loops: bool = False,
) -> Graph:
    """The graph of any sparse matrix: every non-zero entry is an edge, kept in both directions if `undirected`.

    Duplicates are merged, columns sorted, self-loops kept unless `drop_self_loops` (`count_self_loops` tells their
    number). Linear in E; besides the result it needs about 10 bytes per entry, because the entries are booleans
    until the end. A matrix that is symmetric gives an undirected graph either way.
    """
    edges = adjacency_VV.tocsr().astype(np.bool_, copy=False)
    edges.sum_duplicates()
    if undirected:
        edges = (edges + edges.T).tocsr()
    edges.sort_indices()
    if drop_self_loops:
        edges = _without_diagonal(edges)
    return Graph(
        name=name,
        indptr=edges.indptr.astype(np.int64),
        indices=edges.indices.astype(np.int32, copy=False),
        features_VF=features_VF,
        labels_V=labels_V,
        num_classes=num_classes,
        public_split=public_split,
        undirected=undirected or _is_symmetric(edges),
    )


def _is_symmetric(edges_VV: sp.csr_array) -> bool:
    """Whether a canonical boolean matrix equals its transpose."""
    turned = edges_VV.T.tocsr()
    turned.sort_indices()
    return np.array_equal(turned.indptr, edges_VV.indptr) and np.array_equal(turned.indices, edges_VV.indices)


def _without_diagonal(edges_VV: sp.csr_array) -> sp.csr_array:
    """The matrix without its diagonal; the same object where that is empty."""
    rows = np.repeat(np.arange(edges_VV.shape[0], dtype=np.int32), np.diff(edges_VV.indptr))
    proper = rows != edges_VV.indices
    if proper.all():
        return edges_VV
    counts = np.bincount(rows[proper], minlength=edges_VV.shape[0])
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return sp.csr_array((edges_VV.data[proper], edges_VV.indices[proper], indptr), shape=edges_VV.shape)


def count_self_loops(graph: Graph) -> int:
    """Number of nodes joined to themselves."""
    return int(np.count_nonzero(row_of_edge(graph) == graph.indices))


def row_of_edge(graph: Graph) -> NDArray[np.int32]:
    """The source node of every stored edge [E]; `graph.indices` holds the targets."""
    return np.repeat(np.arange(graph.num_nodes, dtype=np.int32), np.diff(graph.indptr))
