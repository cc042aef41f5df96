"""Small graphs and coarsenings made by hand: the fixture `make` of the tests of this folder."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from megagraph.config import CoarseningConfig, PublicConfig
from megagraph.graph.store import Coarsening, Graph


def graph_of(adjacency_VV, *, num_features=3, num_classes=4, seed=0):
    """A `Graph` from a dense symmetric 0/1 matrix, with recognisable features."""
    csr = sp.csr_array(adjacency_VV)
    num_nodes = csr.shape[0]
    labels_V = np.random.default_rng(seed).integers(num_classes, size=num_nodes)
    features_VF = np.arange(num_nodes * num_features, dtype=np.float32).reshape(num_nodes, num_features)
    return Graph("small", csr.indptr.astype(np.int64), csr.indices.astype(np.int32), features_VF, labels_V, num_classes)


def random_graph(num_nodes=40, average_degree=4.0, *, seed=0, isolated=2):
    """A random symmetric graph whose last `isolated` nodes have no edge and whose first node is a hub."""
    rng = np.random.default_rng(seed)
    upper_VV = np.triu(rng.random((num_nodes, num_nodes)) < average_degree / num_nodes, 1)
    upper_VV[0, 1 : num_nodes // 2] = True
    if isolated:
        upper_VV[:, num_nodes - isolated :] = False
    return graph_of((upper_VV | upper_VV.T).astype(np.float32), seed=seed)


def coarsening_of(graph, num_super=8, *, seed=0):
    """A random partition with A_c = S^(-1/2) P A P^T S^(-1/2)."""
    rng = np.random.default_rng(seed + 1)
    membership_V = rng.permutation(np.arange(graph.num_nodes) % num_super)
    member_SV = np.eye(num_super)[:, membership_V]
    scale_S = 1 / np.sqrt(member_SV.sum(1))
    coarse_SS = scale_S[:, None] * (member_SV @ graph.adjacency().toarray() @ member_SV.T) * scale_S
    csr = sp.csr_array(coarse_SS)
    features_SF = -1.0 - np.arange(num_super * graph.num_features, dtype=np.float32).reshape(num_super, -1)
    return Coarsening(
        membership_V,
        features_SF,
        csr.indptr.astype(np.int64),
        csr.indices.astype(np.int32),
        csr.data.astype(np.float32),
    )


def dense_normalised(matrix):
    """D^(-1/2) (X + I) D^(-1/2), D the row sums of X + I, by dense arithmetic in float64."""
    looped = np.asarray(matrix, np.float64) + np.eye(len(matrix))
    scale = 1 / np.sqrt(looped.sum(1))
    return scale[:, None] * looped * scale


def powers_of(matrix, num_powers):
    powers = [matrix]
    while len(powers) < num_powers:
        powers.append(powers[-1] @ matrix)
    return powers


def dense_bias(graph, coarsening, batch, builder, num_powers, mode, global_powers=None):
    """The definition, token by token, for a batch that holds all rows."""
    a_hat = dense_normalised(graph.adjacency().toarray())
    if mode == "global" and global_powers is None:
        global_powers = powers_of(a_hat, num_powers)
    b_powers = powers_of(dense_normalised(coarsening.adjacency().toarray()), num_powers)
    num_tokens = builder.num_regular + builder.num_super
    bias = np.zeros((len(batch.ids_BT), num_powers, num_tokens, num_tokens))
    for b, ids_T in enumerate(batch.ids_BT.numpy()):
        if batch.nodes_B[b] < 0:
            continue
        fine, coarse = ids_T[: builder.num_regular], ids_T[builder.num_regular :] - graph.num_nodes
        own = a_hat[np.ix_(fine, fine)]
        place = np.arange(len(fine)) if mode == "induced" else fine
        a_powers = powers_of(own, num_powers) if mode == "induced" else global_powers
        both = np.concatenate([coarsening.membership_V[fine], coarse])
        for m in range(num_powers):
            bias[b, m, : len(fine), : len(fine)] = a_powers[m][np.ix_(place, place)]
            bias[b, m, len(fine) : len(both), : len(both)] = b_powers[m][np.ix_(coarse, both)]
            bias[b, m, : len(both), len(fine) : len(both)] = b_powers[m][np.ix_(both, coarse)]
    return bias


@pytest.fixture(scope="session")
def make():
    """The makers above by short names."""
    return SimpleNamespace(
        graph_of=graph_of,
        graph=random_graph,
        coarsening=coarsening_of,
        dense_normalised=dense_normalised,
        dense_bias=dense_bias,
    )


@pytest.fixture(scope="session")
def cora(tmp_path_factory):
    """The real Cora graph from the mirror (tests marked `mirror`)."""
    from megagraph.graph.datasets import make_graph

    mirror = Path(os.environ["MEGAGRAPH_MIRROR"])
    return make_graph("cora", PublicConfig(source="cora"), tmp_path_factory.mktemp("cora"), mirror)[0]


@pytest.fixture(scope="session")
def cora_coarsening(cora):
    """A tenth of Cora's nodes, by METIS."""
    from megagraph.graph.coarsen import coarsen

    return coarsen(cora, CoarseningConfig())


@pytest.fixture(scope="session")
def cora_powers(cora):
    """Powers 1..4 of Cora's normalised adjacency, dense."""
    return powers_of(dense_normalised(cora.adjacency().toarray()), 4)
