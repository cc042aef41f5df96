"""Degree-corrected planted partition: labels are communities, degrees have a heavy tail, features are noisy labels.

The generator is linear in nodes and edges. A table lists every node once per half-edge ("stub"), community by
community, so that a partner in proportion to its degree is one gather from a range of the table.

Shapes: V nodes, C communities, F features, T stubs.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from megagraph.config import PlantedConfig, UserError
from megagraph.graph.assemble import assemble
from megagraph.graph.store import Graph

# Random numbers are drawn in blocks, which bounds the temporaries and leaves the stream as it is.
BLOCK = 1 << 20
DEGREE_PASSES = 20


def planted(name: str, config: PlantedConfig) -> Graph:
    """The graph described by `config`; a pure function of it.

    Communities have equal sizes (within one). Degrees follow a power law with `degree_exponent`, cut at
    sqrt(average_degree * V) and at the size of a community. A drawn edge stays in its community with probability
    `homophily`. Self-loops and repeated edges are dropped, so the mean degree is a little below `average_degree`
    (by a tenth in small dense communities). Features are the community's random unit vector plus normal noise of
    `feature_noise` per entry. Raises `UserError` where no simple graph of that density exists.
    """
    _check(config)
    label_rng, degree_rng, edge_rng, feature_rng = Generator(PCG64(config.seed)).spawn(4)
    labels_V = label_rng.permutation(np.arange(config.nodes, dtype=np.int64) % config.communities)
    stubs_V = _stubs_per_node(config, degree_rng)
    adjacency = _adjacency(labels_V, stubs_V, config, edge_rng)
    features_VF = _features(labels_V, config, feature_rng)
    return assemble(name, adjacency, features_VF, labels_V, config.communities)


def _check(config: PlantedConfig) -> None:
    if config.nodes > np.iinfo(np.int32).max:
        raise UserError(f"nodes={config.nodes} does not fit 32-bit node numbers: use fewer than 2147483648")
    if config.communities > config.nodes:
        raise UserError(
            f"communities={config.communities} is more than nodes={config.nodes}: lower communities or raise nodes"
        )
    within = config.nodes // config.communities - 1
    if config.communities > 1 and config.average_degree * config.homophily > within:
        raise UserError(
            f"average_degree={config.average_degree} with homophily={config.homophily} needs more neighbours than the "
            f"{within} others of a community: lower average_degree or communities"
        )
    if config.average_degree > config.nodes - 1:
        raise UserError(
            f"average_degree={config.average_degree} is more than the {config.nodes - 1} other nodes: lower it"
        )


def _stubs_per_node(config: PlantedConfig, rng: Generator) -> NDArray[np.int64]:
    """Half-edges of every node [V]: a truncated power law with the asked mean, rounded at random (zero occurs)."""
    mean = config.average_degree
    largest = max(mean, min(np.sqrt(mean * config.nodes), config.nodes / config.communities))
    # The logarithm of a Pareto variable is exponential; cutting there avoids overflow for exponents near one.
    exponent_V = rng.standard_exponential(config.nodes) / (config.degree_exponent - 1)
    degree_V = np.exp(np.minimum(exponent_V, np.log(config.nodes)))
    for _ in range(DEGREE_PASSES):
        degree_V *= mean / degree_V.mean()
        np.minimum(degree_V, largest, out=degree_V)
    return np.floor(degree_V + rng.random(config.nodes)).astype(np.int64)


def _adjacency(
    labels_V: NDArray[np.int64], stubs_V: NDArray[np.int64], config: PlantedConfig, rng: Generator
) -> sp.csr_array:
    """One direction of the edges [V, V]: every second stub looks for a partner, in its community or outside it."""
    order_V = np.argsort(labels_V, kind="stable")
    table_T = np.repeat(order_V.astype(np.int32), stubs_V[order_V])
    size_C = np.bincount(labels_V, weights=stubs_V, minlength=config.communities).astype(np.int64)
    first_C = np.cumsum(size_C) - size_C
    sources = table_T[::2].copy()
    targets = np.empty_like(sources)
    for start in range(0, len(sources), BLOCK):
        community = labels_V[sources[start : start + BLOCK]]
        size, first = size_C[community], first_C[community]
        outside = len(table_T) - size
        stays = (rng.random(len(size)) < config.homophily) | (outside == 0)
        place = np.floor(rng.random(len(size)) * np.where(stays, size, outside)).astype(np.int64)
        # Outside places count as if the community's own range were cut out of the table.
        place += np.where(stays, first, np.where(place >= first, size, 0))
        targets[start : start + BLOCK] = table_T[place]
    proper = sources != targets
    sources, targets = sources[proper], targets[proper]
    entries = np.ones(len(sources), np.bool_)
    return sp.coo_array((entries, (sources, targets)), shape=(config.nodes, config.nodes)).tocsr()


def _features(labels_V: NDArray[np.int64], config: PlantedConfig, rng: Generator) -> NDArray[np.float32]:
    """Community mean plus noise [V, F]."""
    means_CF = rng.standard_normal((config.communities, config.features), dtype=np.float32)
    means_CF /= np.linalg.norm(means_CF, axis=1, keepdims=True)
    features_VF = rng.standard_normal((config.nodes, config.features), dtype=np.float32)
    features_VF *= np.float32(config.feature_noise)
    for start in range(0, config.nodes, BLOCK):
        rows = slice(start, start + BLOCK)
        features_VF[rows] += means_CF[labels_V[rows]]
    return features_VF
