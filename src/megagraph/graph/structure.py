"""The normalised adjacency of the nodes and of the super nodes, and the powers that structural bias is read from.

Shapes: V nodes, S super nodes.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import DTypeLike

from megagraph.graph.induced import InducedPowers
from megagraph.graph.powers import MAX_NONZEROS, DensePowers, Powers, SparsePowers
from megagraph.graph.store import Coarsening, Graph

MAX_DENSE_SUPER = 4096


def symmetric_normalisation(matrix: sp.csr_array) -> sp.csr_array:
    """D^(-1/2) X D^(-1/2) with D the row sums of X, float64 CSR with sorted columns."""
    scale = 1.0 / np.sqrt(np.asarray(matrix.sum(axis=1), np.float64))
    row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    data = matrix.data * scale[row] * scale[matrix.indices]
    result = sp.csr_array((data, matrix.indices, matrix.indptr), shape=matrix.shape)
    result.sort_indices()
    return result


def normalised_adjacency(graph: Graph) -> sp.csr_array:
    """A_hat = (D+I)^(-1/2) (A+I) (D+I)^(-1/2), float64 CSR [V, V] (ans-gt 1.2)."""
    return symmetric_normalisation(_with_loops(graph.adjacency()))


def normalised_coarse_adjacency(coarsening: Coarsening) -> sp.csr_array:
    """B_1 = D_c^(-1/2) (A_c + I) D_c^(-1/2), D_c the row sums of A_c + I, float64 CSR [S, S] (ans-gt 1.3)."""
    return symmetric_normalisation(_with_loops(coarsening.adjacency()))


def _with_loops(matrix: sp.csr_array) -> sp.csr_array:
    return sp.csr_array(matrix.astype(np.float64) + sp.eye_array(matrix.shape[0], format="csr"))


def fine_powers(
    graph: Graph, mode: str, num_powers: int, dtype: DTypeLike, *, max_nonzeros: int = MAX_NONZEROS
) -> Powers:
    """Powers of A_hat between nodes: `mode` is `global` (exact) or `induced` (config `sampling.powers`).

    `UserError`, before any power is computed, when `global` needs more than `max_nonzeros` stored non-zeros.
    """
    if mode == "induced":
        return InducedPowers(graph.indptr, graph.indices, None)
    remedy = "set sampling.powers: induced, or fewer bias_channels"
    return SparsePowers(normalised_adjacency(graph), num_powers, dtype, remedy=remedy, max_nonzeros=max_nonzeros)


def coarse_powers(
    coarsening: Coarsening,
    mode: str,
    num_powers: int,
    dtype: DTypeLike,
    *,
    max_dense: int = MAX_DENSE_SUPER,
) -> Powers:
    """Powers of B_1 between super nodes: dense up to `max_dense` super nodes.

    Above that sparse where `mode` is `global`, and of each sequence's own super nodes where it is `induced`: exact
    powers of a large coarse graph are nearly full, and a sequence of a large graph sees few of its super nodes.
    """
    if coarsening.num_super <= max_dense:
        return DensePowers(normalised_coarse_adjacency(coarsening), num_powers, dtype)
    if mode == "induced":
        return InducedPowers(coarsening.indptr, coarsening.indices, coarsening.weights)
    remedy = "set sampling.powers: induced, a smaller coarsening ratio, or fewer bias_channels"
    return SparsePowers(normalised_coarse_adjacency(coarsening), num_powers, dtype, remedy=remedy)
