"""The two nouns of the data floor, `Graph` and `Coarsening`, and their files (safetensors: mapped, no pickle).

Shapes: V nodes, E stored directed edges, F features, S super nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megagraph.config import UserError
from megagraph.files import atomic_path

Split = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Graph:
    """A graph with features and labels; the adjacency is 0/1 in CSR form, columns sorted, no duplicates.

    `undirected` is false only for a data set that asked to stay directed; then the adjacency may not be symmetric.
    """

    name: str
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    features_VF: NDArray[np.float32]
    labels_V: NDArray[np.int64]
    num_classes: int
    public_split: Split | None = None
    undirected: bool = True

    @property
    def num_nodes(self) -> int:
        """V."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Stored directed edges."""
        return len(self.indices)

    @property
    def num_features(self) -> int:
        """F."""
        return self.features_VF.shape[1]

    def adjacency(self) -> sp.csr_array:
        """The 0/1 adjacency [V, V] as float32, sharing the index arrays."""
        ones = np.ones(self.num_edges, np.float32)
        return sp.csr_array((ones, self.indices, self.indptr), shape=(self.num_nodes, self.num_nodes))


@dataclass(frozen=True)
class Coarsening:
    """A partition of the nodes into super nodes, and the graph between them."""

    membership_V: NDArray[np.int64]
    features_SF: NDArray[np.float32]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    weights: NDArray[np.float32]
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def num_super(self) -> int:
        """S."""
        return len(self.indptr) - 1

    def adjacency(self) -> sp.csr_array:
        """A_c [S, S]: S^(-1/2) P A P^T S^(-1/2), before self-loops and normalisation (`ans-gt.md` 1.3)."""
        return sp.csr_array((self.weights, self.indices, self.indptr), shape=(self.num_super, self.num_super))


def _write(path: Path, arrays: dict[str, NDArray], metadata: dict[str, str]) -> None:
    with atomic_path(path) as temporary:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, metadata)


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """The open file and its metadata; `UserError` for a missing, truncated or foreign one."""
    try:
        with safe_open(path, framework="numpy") as handle:
            metadata = handle.metadata() or {}
            if metadata.get("schema") != kind:
                raise UserError(f"{path}: schema is {metadata.get('schema')!r}, expected {kind!r}: make the file again")
            yield handle, metadata
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: make it first") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a complete safetensors file ({error}): make the file again") from None


def _read(path: Path, kind: str) -> tuple[dict[str, NDArray], dict[str, str]]:
    with _opened(path, kind) as (handle, metadata):
        names = handle.keys()
        return {name: handle.get_tensor(name) for name in names}, metadata


def read_header(path: Path, kind: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes of the arrays and the metadata of a file written here, without reading it; errors as of `load_graph`."""
    with _opened(path, kind) as (handle, metadata):
        names = handle.keys()
        return {name: tuple(handle.get_slice(name).get_shape()) for name in names}, metadata


def save_graph(graph: Graph, path: Path) -> None:
    """Write a graph to one safetensors file, atomically."""
    arrays: dict[str, NDArray] = {
        "indptr": graph.indptr,
        "indices": graph.indices,
        "features": graph.features_VF,
        "labels": graph.labels_V,
    }
    if graph.public_split is not None:
        arrays |= dict(zip(("public.train", "public.val", "public.test"), graph.public_split, strict=True))
    metadata = {
        "schema": "megagraph.graph/1",
        "name": graph.name,
        "num_classes": str(graph.num_classes),
        "undirected": str(graph.undirected),
    }
    _write(path, arrays, metadata)


def load_graph(path: Path) -> Graph:
    """Read a graph written by `save_graph`; `UserError` for a missing, truncated or foreign file."""
    arrays, metadata = _read(path, "megagraph.graph/1")
    public = tuple(arrays[f"public.{part}"] for part in ("train", "val", "test")) if "public.train" in arrays else None
    return Graph(
        name=metadata["name"],
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        features_VF=arrays["features"],
        labels_V=arrays["labels"],
        num_classes=int(metadata["num_classes"]),
        public_split=public,  # type: ignore[arg-type]
        undirected=metadata.get("undirected", "True") == "True",
    )


def save_coarsening(coarsening: Coarsening, path: Path) -> None:
    """Write a coarsening to one safetensors file, atomically."""
    arrays: dict[str, NDArray] = {
        "membership": coarsening.membership_V,
        "features": coarsening.features_SF,
        "indptr": coarsening.indptr,
        "indices": coarsening.indices,
        "weights": coarsening.weights,
    }
    metadata = {"schema": "megagraph.coarsening/1", "attributes": json.dumps(coarsening.attributes, sort_keys=True)}
    _write(path, arrays, metadata)


def load_coarsening(path: Path) -> Coarsening:
    """Read a coarsening written by `save_coarsening`."""
    arrays, metadata = _read(path, "megagraph.coarsening/1")
    return Coarsening(
        membership_V=arrays["membership"],
        features_SF=arrays["features"],
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        weights=arrays["weights"],
        attributes=json.loads(metadata["attributes"]),
    )
