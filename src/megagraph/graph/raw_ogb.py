"""OGB's node-property csv layout, read by pandas in chunks straight into the final arrays.

``raw/{edge,node-feat,node-label,num-node-list,num-edge-list}.csv.gz`` and ``split/<name>/{train,valid,test}.csv.gz``,
without header. The ogb package is not needed (its packaged loaders fail with current torch, datasets.md 4).

Shapes: V nodes, E edges as stored, F features.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megagraph.graph.raw import RawGraph, adjacency_from_edges, reading

EDGE_ROWS = 1 << 22
FEATURE_ROWS = 1 << 16
RAW_NAMES = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")


def ogb_files(split: str) -> tuple[str, ...]:
    """The files of the layout, as the table of public sets names them."""
    parts = tuple(f"split/{split}/{part}.csv.gz" for part in ("train", "valid", "test"))
    return tuple(f"raw/{name}.csv.gz" for name in RAW_NAMES) + parts


def read_ogb(folder: Path, split: str, *, each_edge_once: bool) -> RawGraph:
    """The graph below `folder`; peak memory is that of the arrays and one chunk. `UserError` for a damaged file.

    `each_edge_once` is the data set's ``add_inverse_edge``: products has each edge once, arxiv is directed.
    """
    raw = folder / "raw"
    num_nodes = _count(raw / "num-node-list.csv.gz")
    features_VF = _features(raw / "node-feat.csv.gz", num_nodes)
    edges = _edges(raw / "edge.csv.gz", _count(raw / "num-edge-list.csv.gz"))
    with reading(raw / "edge.csv.gz"):
        adjacency = adjacency_from_edges(*edges, num_nodes)
    with reading(raw / "node-label.csv.gz"):
        labels_V = _column(raw / "node-label.csv.gz", "float64")
        labels_V = np.where(np.isnan(labels_V), -1, labels_V).astype(np.int64)
    parts = []
    for part in ("train", "valid", "test"):
        path = folder / "split" / split / f"{part}.csv.gz"
        with reading(path):
            parts.append(_column(path, "int64"))
    train, valid, test = parts
    return RawGraph(adjacency, features_VF, labels_V, ((split, (train, valid, test)),), each_edge_once)


def _column(path: Path, dtype: str) -> NDArray:
    return pd.read_csv(path, header=None, dtype=dtype).to_numpy()[:, 0]


def _count(path: Path) -> int:
    """The one number of a num-*-list file (a node-property data set is one graph)."""
    with reading(path):
        numbers = _column(path, "int64")
        if len(numbers) != 1 or numbers[0] < 0:
            raise ValueError(f"holds {len(numbers)} counts, expected one")
    return int(numbers[0])


def _edges(path: Path, num_edges: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Source and target of every edge [E]."""
    sources, targets = np.empty(num_edges, np.int32), np.empty(num_edges, np.int32)
    first = 0
    with reading(path), pd.read_csv(path, header=None, dtype="int32", chunksize=EDGE_ROWS) as chunks:
        for chunk in chunks:
            last = first + len(chunk)
            if last > num_edges or chunk.shape[1] != 2:
                raise ValueError(f"expected {num_edges} rows of 2 numbers")
            sources[first:last], targets[first:last] = chunk[0], chunk[1]
            first = last
        if first != num_edges:
            raise ValueError(f"{first} edges, expected {num_edges}")
    return sources, targets


def _features(path: Path, num_nodes: int) -> NDArray[np.float32]:
    """Features [V, F]; F is that of the first row."""
    features_VF = np.empty((num_nodes, 0), np.float32)
    first = 0
    with reading(path), pd.read_csv(path, header=None, dtype="float32", chunksize=FEATURE_ROWS) as chunks:
        for chunk in chunks:
            if first == 0:
                features_VF = np.empty((num_nodes, chunk.shape[1]), np.float32)
            last = first + len(chunk)
            if last > num_nodes or chunk.isna().to_numpy().any():
                raise ValueError(f"expected {num_nodes} rows of {features_VF.shape[1]} numbers")
            features_VF[first:last] = chunk
            first = last
        if first != num_nodes:
            raise ValueError(f"{first} rows, expected {num_nodes}")
    return features_VF
