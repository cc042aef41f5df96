"""The data sets published as numpy archives: Reddit, Reddit2, Amazon Computers, tolokers.

Large arrays go from the archive to the final one in blocks, so that a float64 original is never held whole.

Shapes: V nodes, E edges as stored, F features.
"""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import scipy.sparse as sp
from numpy.typing import DTypeLike, NDArray

from megagraph.graph.raw import RawGraph, adjacency_from_csr, adjacency_from_edges, reading
from megagraph.graph.store import Split

BLOCK_VALUES = 1 << 20
TRAIN, VALID, TEST = 1, 2, 3


def read_reddit(folder: Path) -> RawGraph:
    """DGL's Reddit: `reddit_data.npz` (feature, label, node_types 1/2/3), `reddit_graph.npz` (scipy COO)."""
    data, graph = folder / "raw" / "reddit_data.npz", folder / "raw" / "reddit_graph.npz"
    with reading(data):
        features_VF = _member(data, "feature", np.float32)
        labels_V = _member(data, "label", np.int64)
        types_V = _member(data, "node_types", np.int64)
    with reading(graph):
        rows, columns = _member(graph, "row", np.int32), _member(graph, "col", np.int32)
        adjacency = adjacency_from_edges(rows, columns, int(_member(graph, "shape", np.int64)[0]))
    train, valid, test = (np.flatnonzero(types_V == part) for part in (TRAIN, VALID, TEST))
    return RawGraph(adjacency, features_VF, labels_V, (("node_types", (train, valid, test)),))


def read_reddit2(folder: Path) -> RawGraph:
    """GraphSAINT's Reddit: `adj_full.npz` (CSR), `feats.npy`, `class_map.json`, `role.json` (tr, va, te)."""
    raw = folder / "raw"
    with reading(raw / "adj_full.npz"):
        num_nodes = int(_member(raw / "adj_full.npz", "shape", np.int64)[0])
        indptr = _member(raw / "adj_full.npz", "indptr", np.int64)
        adjacency = adjacency_from_csr(indptr, _member(raw / "adj_full.npz", "indices", np.int32), num_nodes)
    with reading(raw / "feats.npy"), (raw / "feats.npy").open("rb") as handle:
        features_VF = _stream(handle, np.float32)
    labels_V = np.full(num_nodes, -1, np.int64)
    with reading(raw / "class_map.json"):
        for node, label in json.loads((raw / "class_map.json").read_bytes()).items():
            labels_V[int(node)] = label
    with reading(raw / "role.json"):
        role = json.loads((raw / "role.json").read_bytes())
        train, valid, test = (np.asarray(role[part], np.int64) for part in ("tr", "va", "te"))
    return RawGraph(adjacency, features_VF, labels_V, (("role", (train, valid, test)),))


def read_computers(folder: Path) -> RawGraph:
    """Shchur's Amazon Computers: CSR `adj_*` and `attr_*`, labels; x > 0 becomes 1, as in PyG. No split."""
    path = folder / "raw" / "amazon_electronics_computers.npz"
    with reading(path), np.load(path) as arrays:
        num_nodes, num_features = (int(size) for size in arrays["attr_shape"])
        adjacency = adjacency_from_csr(arrays["adj_indptr"], arrays["adj_indices"], num_nodes)
        present = (arrays["attr_data"] > 0).astype(np.float32)
        attributes = sp.csr_array(
            (present, arrays["attr_indices"], arrays["attr_indptr"]), shape=(num_nodes, num_features)
        )
        attributes.check_format(full_check=True)
        return RawGraph(adjacency, attributes.toarray(), arrays["labels"].astype(np.int64))


def read_tolokers(folder: Path) -> RawGraph:
    """Yandex's tolokers: node_features, node_labels, edges [E, 2] (each once), ten train, val and test masks."""
    path = folder / "raw" / "tolokers.npz"
    with reading(path), np.load(path) as arrays:
        features_VF = arrays["node_features"].astype(np.float32)
        sources, targets = arrays["edges"].astype(np.int32).T
        adjacency = adjacency_from_edges(sources, targets, len(features_VF))
        masks = zip(arrays["train_masks"], arrays["val_masks"], arrays["test_masks"], strict=True)
        splits = tuple((f"masks[{number}]", _split_of_masks(*three)) for number, three in enumerate(masks))
        return RawGraph(adjacency, features_VF, arrays["node_labels"].astype(np.int64), splits, each_edge_once=True)


def _split_of_masks(train_V: NDArray, valid_V: NDArray, test_V: NDArray) -> Split:
    return np.flatnonzero(train_V), np.flatnonzero(valid_V), np.flatnonzero(test_V)


def _member(path: Path, name: str, dtype: DTypeLike) -> NDArray:
    """One array of an npz, as `dtype`; reading to the end checks the archive's CRC."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as handle:
        return _stream(handle, dtype)


def _stream(handle: IO[bytes], dtype: DTypeLike) -> NDArray:
    """An npy file as `dtype`, converted block by block. `ValueError` for anything but plain numbers, all there."""
    version = np.lib.format.read_magic(handle)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, column_major, stored = read_header(handle)
    if stored.kind not in "iufb":
        raise ValueError(f"holds {stored}, expected numbers")
    values = np.empty(math.prod(shape), dtype)
    for first in range(0, len(values), BLOCK_VALUES):
        last = min(first + BLOCK_VALUES, len(values))
        block = handle.read((last - first) * stored.itemsize)
        # What does not fit float32 becomes infinite, which is refused later by name.
        with np.errstate(over="ignore"):
            values[first:last] = np.frombuffer(block, stored, count=last - first)
    if handle.read(1):
        raise ValueError("longer than its header says")
    return values.reshape(shape, order="F" if column_major else "C")
