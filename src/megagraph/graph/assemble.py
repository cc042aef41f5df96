"""From a loader's matrix to a `Graph`: the one place that makes the adjacency undirected, 0/1 and canonical.

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
) -> Graph:
    """The graph of any sparse matrix: every non-zero entry is an edge, kept in both directions.

    Duplicates are merged, columns sorted, self-loops kept (`count_self_loops` tells their number). Linear in E;
    besides the result it needs about 10 bytes per entry, because the entries are booleans until the end.
    """
    one_way = adjacency_VV.tocsr().astype(np.bool_, copy=False)
    one_way.sum_duplicates()
    both_ways = (one_way + one_way.T).tocsr()
    both_ways.sort_indices()
    return Graph(
        name=name,
        indptr=both_ways.indptr.astype(np.int64),
        indices=both_ways.indices.astype(np.int32, copy=False),
        features_VF=features_VF,
        labels_V=labels_V,
        num_classes=num_classes,
        public_split=public_split,
    )


def count_self_loops(graph: Graph) -> int:
    """Number of nodes joined to themselves."""
    return int(np.count_nonzero(row_of_edge(graph) == graph.indices))


def row_of_edge(graph: Graph) -> NDArray[np.int32]:
    """The source node of every stored edge [E]; `graph.indices` holds the targets."""
    return np.repeat(np.arange(graph.num_nodes, dtype=np.int32), np.diff(graph.indptr))
