"""Coarsening by contraction of neighbours, level by level (Loukas 2019; ans-gt 1.3), for small graphs.

`algebraic_jc` contracts a matching of the edges whose ends smoothed random vectors cannot tell apart;
`variation_neighborhoods` contracts the neighbourhoods that change the first eigenvectors least. Contraction never
joins two components, so a graph of many small ones keeps more super nodes than the ratio asks for.

Shapes: V nodes of the present level, K vectors, E stored directed edges.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import scipy.sparse as sp
from numba import njit
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from megagraph.config import CoarseningConfig
from megagraph.graph.spectral import first_eigenvectors
from megagraph.graph.store import Graph

MAX_LEVELS = 20
STALLED = 2
# Half-damped Jacobi sweeps and the smallest squared difference that counts, as in the original (ans-gt 1.3).
SWEEPS = 20
LEAST_DIFFERENCE = 1e-6


def algebraic_jc(graph: Graph, config: CoarseningConfig) -> tuple[NDArray[np.int64], dict[str, str]]:
    """Membership [V] by greedy maximal matchings in order of algebraic proximity, at most 20 levels."""
    weights_VV = _weights(graph)
    membership = np.arange(graph.num_nodes)
    target = _target(graph, config)
    rng = Generator(PCG64(config.seed))
    for _ in range(MAX_LEVELS):
        num_nodes = weights_VV.shape[0]
        group_V = _matching(weights_VV, num_nodes - target, config.num_vectors, rng)
        if _stalls(group_V, target):
            break
        membership = group_V[membership]
        weights_VV = _contracted(weights_VV, group_V)
    return membership, {}


def variation_neighborhoods(graph: Graph, config: CoarseningConfig) -> tuple[NDArray[np.int64], dict[str, str]]:
    """Membership [V] by contraction of neighbourhoods in order of local variation cost, at most 20 levels.

    The cost of a set C is ||A^T P L_C P A||_F / (|C| - 1): L_C is the Laplacian of the edges at C with those that
    leave it counted twice, P takes the mean over C off, and A [V, K] holds the first eigenvectors of the Laplacian
    scaled so that A^T L A = I. Constant vectors of components are left out, unlike in the original, where a graph of
    more than K components has no cost at all.
    """
    weights_VV = _weights(graph)
    membership = np.arange(graph.num_nodes)
    target = _target(graph, config)
    basis_VK = first_eigenvectors(_laplacian(weights_VV), config.num_vectors, config.seed)
    for _ in range(MAX_LEVELS):
        num_nodes = weights_VV.shape[0]
        basis_VK = _scaled(_laplacian(weights_VV), basis_VK)
        degree_V = np.asarray(weights_VV.sum(1))
        # One index type: scipy changes it with the size, and every new one would be compiled anew.
        indptr, indices = weights_VV.indptr.astype(np.int64), weights_VV.indices.astype(np.int64)
        group_V = _neighbourhoods(indptr, indices, weights_VV.data, degree_V, basis_VK, num_nodes - target)
        group_V = np.unique(group_V, return_inverse=True)[1]
        if _stalls(group_V, target):
            break
        membership = group_V[membership]
        weights_VV = _contracted(weights_VV, group_V)
        size_S = np.bincount(group_V)
        means_SV = sp.csr_array((1 / size_S[group_V], (group_V, np.arange(num_nodes))))
        basis_VK = np.asarray(means_SV @ basis_VK)
    return membership, {}


def _target(graph: Graph, config: CoarseningConfig) -> int:
    """Super nodes asked for: ceil(ratio * V), at least one; the slack keeps 0.1 * 30 at 3."""
    return max(1, math.ceil(config.ratio * graph.num_nodes - 1e-9))


def _weights(graph: Graph) -> sp.csr_array:
    """The adjacency [V, V] in float64 without self-loops, in arrays of its own."""
    weights_VV = graph.adjacency().astype(np.float64)
    weights_VV = sp.csr_array(weights_VV - sp.diags_array(weights_VV.diagonal()))
    weights_VV.eliminate_zeros()
    weights_VV.sort_indices()
    return weights_VV


def _laplacian(weights_VV: sp.csr_array) -> sp.csr_array:
    return sp.csr_array(sp.diags_array(np.asarray(weights_VV.sum(1))) - weights_VV)


def _contracted(weights_VV: sp.csr_array, group_V: NDArray[np.int64]) -> sp.csr_array:
    """P W P^T [S, S] without its diagonal."""
    edges = weights_VV.tocoo()
    rows, columns = group_V[edges.row], group_V[edges.col]
    between = rows != columns
    num_groups = int(group_V.max()) + 1
    shape = (num_groups, num_groups)
    matrix = sp.coo_array((edges.data[between], (rows[between], columns[between])), shape=shape).tocsr()
    matrix.sort_indices()
    return matrix


def _stalls(group_V: NDArray[np.int64], target: int) -> bool:
    """Whether a level removes at most two nodes and still misses the target: what is left are stars (ans-gt 1.3)."""
    num_groups = int(group_V.max()) + 1
    removed = len(group_V) - num_groups
    return removed == 0 or (removed <= STALLED and num_groups > target)


def _matching(weights_VV: sp.csr_array, to_remove: int, num_vectors: int, rng: Generator) -> NDArray[np.int64]:
    """Group number of every node [V]: pairs of a greedy matching of at most `to_remove` edges, the others alone."""
    num_nodes = weights_VV.shape[0]
    degree_V = np.asarray(weights_VV.sum(1))
    walk_VV = sp.diags_array(np.divide(1.0, degree_V, out=np.zeros(num_nodes), where=degree_V > 0)) @ weights_VV
    vectors_VK = rng.standard_normal((num_nodes, num_vectors)) / math.sqrt(num_nodes)
    for _ in range(SWEEPS):
        vectors_VK = 0.5 * vectors_VK + 0.5 * (walk_VV @ vectors_VK)
    upper = sp.triu(weights_VV, 1).tocoo()
    distance_E = np.square(vectors_VK[upper.row] - vectors_VK[upper.col]).max(1, initial=0.0)
    # Many edges tie at the least difference: leaves first, or they would wait for their hub one level each.
    leaf_E = np.minimum(degree_V[upper.row], degree_V[upper.col])
    order = np.lexsort((leaf_E, np.maximum(distance_E, LEAST_DIFFERENCE)))
    partner = list(range(num_nodes))
    free = [True] * num_nodes
    for one, other in zip(upper.row[order].tolist(), upper.col[order].tolist(), strict=True):
        if to_remove <= 0:
            break
        if free[one] and free[other]:
            free[one] = free[other] = False
            partner[other] = one
            to_remove -= 1
    return np.unique(partner, return_inverse=True)[1]


def _scaled(laplacian_VV: sp.csr_array, basis_VK: NDArray[np.float64]) -> NDArray[np.float64]:
    """A basis of the same space with A^T L A = I; directions without energy are dropped."""
    energy_K, turn_KK = np.linalg.eigh(basis_VK.T @ (laplacian_VV @ basis_VK))
    kept = energy_K > 1e-10 * max(energy_K.max(initial=0.0), 1e-300)
    return np.ascontiguousarray(basis_VK @ (turn_KK[:, kept] / np.sqrt(energy_K[kept])))


@njit(cache=True)
def _cost(
    members: NDArray,
    indptr: NDArray,
    indices: NDArray,
    weights: NDArray,
    degree_V: NDArray,
    basis_VK: NDArray,
    inside_V: NDArray,
) -> float:
    """Local variation cost of the int nodes `members`; `inside_V` (bool) is scratch and comes back all false."""
    num_vectors = basis_VK.shape[1]
    mean_K, image_K = np.zeros(num_vectors), np.zeros(num_vectors)
    total_KK = np.zeros((num_vectors, num_vectors))
    for node in members:
        inside_V[node] = True
        for k in range(num_vectors):
            mean_K[k] += basis_VK[node, k] / len(members)
    for node in members:
        inner = 0.0
        image_K[:] = 0.0
        for edge in range(indptr[node], indptr[node + 1]):
            other = indices[edge]
            if inside_V[other]:
                inner += weights[edge]
                for k in range(num_vectors):
                    image_K[k] -= weights[edge] * (basis_VK[other, k] - mean_K[k])
        for k in range(num_vectors):
            image_K[k] += (2.0 * degree_V[node] - inner) * (basis_VK[node, k] - mean_K[k])
        for k in range(num_vectors):
            for j in range(num_vectors):
                total_KK[k, j] += (basis_VK[node, k] - mean_K[k]) * image_K[j]
    square = 0.0
    for value in total_KK.flat:
        square += value * value
    for node in members:
        inside_V[node] = False
    return math.sqrt(square) / (len(members) - 1)


@njit(cache=True)
def _neighbourhoods(
    indptr: NDArray, indices: NDArray, weights: NDArray, degree_V: NDArray, basis_VK: NDArray, to_remove: int
) -> NDArray:
    """A group label for every node (int): disjoint neighbourhoods by increasing cost, at most `to_remove` nodes fewer.

    A neighbourhood that lost nodes to a cheaper one goes back with what is left of it and its new cost.
    """
    num_nodes = len(indptr) - 1
    group_V = np.arange(num_nodes)
    taken_V = np.zeros(num_nodes, np.bool_)
    inside_V = np.zeros(num_nodes, np.bool_)
    members_V = np.empty(num_nodes, np.int64)
    # No set has size -1: these come first, and go back with their cost.
    queue = [(-1.0, -1, centre) for centre in range(num_nodes)]
    while to_remove > 0 and len(queue) > 0:
        cost, size, centre = heapq.heappop(queue)
        count = 0
        if not taken_V[centre]:
            members_V[0] = centre
            count = 1
        for edge in range(indptr[centre], indptr[centre + 1]):
            if not taken_V[indices[edge]]:
                members_V[count] = indices[edge]
                count += 1
        if count < 2:
            continue
        members = members_V[:count]
        if count != size:
            cost = _cost(members, indptr, indices, weights, degree_V, basis_VK, inside_V)
            heapq.heappush(queue, (cost, count, centre))
        elif count - 1 <= to_remove:
            to_remove -= count - 1
            for node in members:
                taken_V[node] = True
                group_V[node] = members[0]
    return group_V
