"""Eigenvalues and eigenvectors that coarsening needs: the first of a Laplacian, and how well a coarse graph keeps them.

Shapes: V nodes, K vectors, S super nodes.
"""

from __future__ import annotations

import warnings

import numpy as np
import scipy.sparse as sp
from numpy.random import PCG64, Generator
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import LinearOperator, eigsh, lobpcg

from megagraph.graph.store import Graph

# Below this the dense solver is the faster one, and the iterative ones need several times K nodes.
DENSE_NODES = 300
ITERATIONS = 60


def first_eigenvectors(laplacian_VV: sp.csr_array, num_vectors: int, seed: int) -> NDArray[np.float64]:
    """Eigenvectors [V, <= K] of the smallest non-zero eigenvalues of a combinatorial Laplacian, approximately.

    The constant vector of every component is lifted to the far end of the spectrum rather than computed.
    """
    num_nodes = laplacian_VV.shape[0]
    num_parts, part_V = connected_components(laplacian_VV, directed=False)
    num_vectors = min(num_vectors, num_nodes - num_parts)
    if num_nodes <= max(DENSE_NODES, 5 * num_vectors):
        return np.linalg.eigh(laplacian_VV.toarray())[1][:, num_parts : num_parts + num_vectors]
    degree_V = laplacian_VV.diagonal()
    means = sp.csr_array((1 / np.bincount(part_V)[part_V], (part_V, np.arange(num_nodes))))
    lift = 2 * degree_V.max()

    def apply(vectors: NDArray) -> NDArray:
        return laplacian_VV @ vectors + lift * (means @ vectors)[part_V]

    def precondition(vectors: NDArray) -> NDArray:
        return vectors / np.maximum(degree_V, 1.0).reshape(-1, *[1] * (vectors.ndim - 1))

    shape = laplacian_VV.shape
    operator = LinearOperator(shape, matvec=apply, matmat=apply, dtype=np.float64)
    inverse = LinearOperator(shape, matvec=precondition, matmat=precondition, dtype=np.float64)
    start = Generator(PCG64(seed)).standard_normal((num_nodes, num_vectors))
    with warnings.catch_warnings():
        # It steers a heuristic: what sixty iterations give is good enough, and the warning says only that.
        warnings.simplefilter("ignore")
        _, vectors_VK = lobpcg(operator, start, M=inverse, largest=False, tol=1e-4, maxiter=ITERATIONS)
    return np.asarray(vectors_VK, np.float64)


def spectral_errors(graph: Graph, membership_V: NDArray[np.int64], num_values: int) -> NDArray[np.float64]:
    """Relative errors (>= 0) of the first non-zero eigenvalues of the normalised Laplacian, largest component only.

    Fine: I - D^(-1/2) A D^(-1/2). Coarse: the same of P A P^T with its diagonal, whose eigenvalues are the Rayleigh-
    Ritz values in the space of vectors D^(1/2) P^T y, so that none is below its fine one. Empty where fewer than two
    super nodes meet the component.
    """
    adjacency_VV = graph.adjacency().astype(np.float64)
    _, part_V = connected_components(adjacency_VV, directed=False)
    nodes = np.flatnonzero(part_V == np.bincount(part_V).argmax())
    group_V = np.unique(membership_V[nodes], return_inverse=True)[1]
    num_groups = int(group_V.max()) + 1
    num_values = min(num_values, num_groups - 1)
    if num_values < 1:
        return np.empty(0)
    fine_VV = adjacency_VV[nodes][:, nodes]
    indicator_SV = sp.csr_array((np.ones(len(nodes)), (group_V, np.arange(len(nodes)))))
    fine = _first_values(fine_VV, num_values)
    coarse = _first_values(sp.csr_array(indicator_SV @ fine_VV @ indicator_SV.T), num_values)
    return np.maximum(coarse - fine, 0.0) / fine


def _first_values(weights_VV: sp.csr_array, num_values: int) -> NDArray[np.float64]:
    """The smallest eigenvalues of the normalised Laplacian of a connected graph, ascending, zero left out."""
    scale = sp.diags_array(1 / np.sqrt(np.asarray(weights_VV.sum(1))))
    matrix = scale @ weights_VV @ scale
    if matrix.shape[0] <= max(DENSE_NODES, 3 * num_values):
        return 1 - np.linalg.eigvalsh(matrix.toarray())[::-1][1 : num_values + 1]
    size = matrix.shape[0]
    start = Generator(PCG64(0)).standard_normal(size)
    values = eigsh(matrix, num_values + 1, which="LA", v0=start, ncv=min(size, 80), tol=1e-6, return_eigenvectors=False)
    return 1 - np.sort(values)[::-1][1:]
