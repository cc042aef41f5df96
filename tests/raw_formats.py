"""One small graph in every raw format, under the real file names: what a mirror of the public data sets looks like."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import scipy.sparse as sp

from megagraph.artifacts import RawFile
from megagraph.graph.public import PUBLIC_SETS

# Planetoid's loader validates on the 500 nodes after the training ones, so the graph has a few more.
NUM_NODES, NUM_TRAIN, NUM_VALID, NUM_CLASSES, NUM_FEATURES = 520, 10, 500, 3, 5


@dataclass(frozen=True)
class Toy:
    """A directed list of distinct edges without a pair of opposite ones (one self-loop), features, labels, split."""

    sources: np.ndarray
    targets: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    split: tuple = field(
        default=(
            np.arange(NUM_TRAIN),
            np.arange(NUM_TRAIN, NUM_TRAIN + NUM_VALID),
            np.arange(NUM_TRAIN + NUM_VALID, NUM_NODES),
        )
    )

    @property
    def directed(self):
        """Dense 0/1 adjacency of the edges as listed."""
        dense = np.zeros((NUM_NODES, NUM_NODES), np.float32)
        dense[self.sources, self.targets] = 1
        return dense

    @property
    def undirected(self):
        """Dense 0/1 adjacency with every inverse, self-loop included."""
        return np.maximum(self.directed, self.directed.T)


def toy(seed=0):
    """A graph with quarter-valued features (exact in every format) and a self-loop at node 3."""
    rng = np.random.default_rng(seed)
    low, high = np.triu_indices(NUM_NODES, 1)
    chosen = rng.choice(len(low), 1500, replace=False)
    turned = rng.random(1500) < 0.5
    sources = np.where(turned, high[chosen], low[chosen])
    targets = np.where(turned, low[chosen], high[chosen])
    features = rng.integers(-4, 5, (NUM_NODES, NUM_FEATURES)) / 4
    labels = np.arange(NUM_NODES) % NUM_CLASSES
    return Toy(np.append(sources, 3), np.append(targets, 3), features.astype(np.float32), labels)


def write_mirror(source, mirror, graph=None):
    """Write the raw files of data set `source` below `mirror`; returns the paths, largest file first."""
    graph = graph or toy()
    folder = Path(mirror) / PUBLIC_SETS[source].folder
    (folder / "raw").mkdir(parents=True)
    WRITERS[source](folder, graph)
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)


def table_for(source, mirror):
    """The table of public sets with the checksums of the fixture where the real ones are pinned."""
    public = PUBLIC_SETS[source]
    files = []
    for file in public.files:
        if isinstance(file, RawFile):
            content = public.path(Path(mirror), file.name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            files.append(RawFile(name=file.name, bytes=len(content), sha256=digest))
        else:
            files.append(file)
    return MappingProxyType({source: replace(public, files=tuple(files))})


def both_ways(graph):
    """Sources and targets of every stored entry of the undirected graph."""
    return np.nonzero(graph.undirected)


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (",".join(map(str, np.atleast_1d(row).tolist())) for row in rows)
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def ogb(split):
    """A writer of OGB's csv layout with the split folder of that name."""

    def write(folder, graph):
        write_csv(folder / "raw" / "edge.csv.gz", np.stack([graph.sources, graph.targets], 1))
        write_csv(folder / "raw" / "node-feat.csv.gz", graph.features)
        write_csv(folder / "raw" / "node-label.csv.gz", graph.labels)
        write_csv(folder / "raw" / "num-node-list.csv.gz", [NUM_NODES])
        write_csv(folder / "raw" / "num-edge-list.csv.gz", [len(graph.sources)])
        for name, nodes in zip(("train", "valid", "test"), graph.split, strict=True):
            write_csv(folder / "split" / split / f"{name}.csv.gz", nodes)

    return write


def reddit(folder, graph):
    """DGL's two archives; features as float64, as published."""
    types = np.repeat([1, 2, 3], [len(part) for part in graph.split])
    np.savez(
        folder / "raw" / "reddit_data.npz",
        feature=graph.features.astype(np.float64),
        label=graph.labels,
        node_types=types,
        node_ids=np.arange(NUM_NODES),
    )
    sp.save_npz(folder / "raw" / "reddit_graph.npz", sp.coo_matrix(graph.undirected))


def reddit2(folder, graph):
    """GraphSAINT's four files."""
    matrix = sp.csr_matrix(graph.undirected)
    np.savez(
        folder / "raw" / "adj_full.npz",
        data=matrix.data.astype(bool),
        indices=matrix.indices,
        indptr=matrix.indptr,
        shape=matrix.shape,
    )
    np.save(folder / "raw" / "feats.npy", graph.features.astype(np.float64))
    labels = {str(node): int(label) for node, label in enumerate(graph.labels)}
    (folder / "raw" / "class_map.json").write_text(json.dumps(labels))
    role = {name: part.tolist() for name, part in zip(("tr", "va", "te"), graph.split, strict=True)}
    (folder / "raw" / "role.json").write_text(json.dumps(role))


def planetoid(title):
    """A writer of Planetoid's pickles: a duplicate edge, and test nodes listed backwards."""

    def write(folder, graph):
        onehot = np.eye(NUM_CLASSES, dtype=np.int32)[graph.labels]
        num_known = NUM_TRAIN + NUM_VALID
        tests = np.arange(NUM_NODES - 1, num_known - 1, -1)
        neighbours = {node: [] for node in range(NUM_NODES)}
        for source, target in zip(graph.sources.tolist(), graph.targets.tolist(), strict=True):
            neighbours[source] += [target, target]
        contents = {
            "x": sp.csr_matrix(graph.features[:NUM_TRAIN]),
            "y": onehot[:NUM_TRAIN],
            "allx": sp.csr_matrix(graph.features[:num_known]),
            "ally": onehot[:num_known],
            "tx": sp.csr_matrix(graph.features[tests]),
            "ty": onehot[tests],
            "graph": neighbours,
        }
        for name, content in contents.items():
            (folder / "raw" / f"ind.{title}.{name}").write_bytes(pickle.dumps(content))
        (folder / "raw" / f"ind.{title}.test.index").write_text("".join(f"{node}\n" for node in tests))

    return write


def amazon(folder, graph):
    """Shchur's archive: the directed edges, signed attributes."""
    adjacency, attributes = sp.csr_matrix(graph.directed), sp.csr_matrix(graph.features)
    np.savez(
        folder / "raw" / "amazon_electronics_computers.npz",
        **{f"adj_{part}": getattr(adjacency, part) for part in ("data", "indices", "indptr", "shape")},
        **{f"attr_{part}": getattr(attributes, part) for part in ("data", "indices", "indptr", "shape")},
        labels=graph.labels,
    )


def tolokers(folder, graph):
    """Yandex's archive; split number 1 has train and test swapped."""
    masks = [np.isin(np.arange(NUM_NODES), part) for part in graph.split]
    np.savez(
        folder / "raw" / "tolokers.npz",
        node_features=graph.features,
        node_labels=graph.labels,
        edges=np.stack([graph.sources, graph.targets], 1),
        train_masks=np.stack([masks[0], masks[2]]),
        val_masks=np.stack([masks[1], masks[1]]),
        test_masks=np.stack([masks[2], masks[0]]),
    )


WRITERS = {
    "products": ogb("sales_ranking"),
    "arxiv": ogb("time"),
    "wordnet": ogb("random"),
    "reddit": reddit,
    "reddit2": reddit2,
    "citeseer": planetoid("citeseer"),
    "cora": planetoid("cora"),
    "computers": amazon,
    "tolokers": tolokers,
}
