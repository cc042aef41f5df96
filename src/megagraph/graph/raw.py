"""What every reader of raw files gives back, and how a damaged file becomes one line.

Shapes: V nodes, F features.
"""

from __future__ import annotations

import errno
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from megagraph.config import UserError
from megagraph.graph.store import Split

# What numpy, pandas, json, gzip, zip and pickle raise for bytes that are not theirs.
DAMAGE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, ValueError, LookupError, TypeError, UnpicklingError)


@dataclass(frozen=True)
class RawGraph:
    """A graph as its files give it: 0/1 adjacency, float32 features, labels (-1: none), own splits by name.

    `each_edge_once`: the files hold one direction of undirected edges, the inverse is part of the data set.
    """

    adjacency_VV: sp.csr_array | sp.coo_array
    features_VF: NDArray[np.float32]
    labels_V: NDArray[np.int64]
    splits: tuple[tuple[str, Split], ...] = ()
    each_edge_once: bool = False


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a failure to make sense of the file `path` into a `UserError` of one line; a full disk stays what it is."""
    try:
        yield
    except UserError:
        raise
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"{path}: damaged or of another format ({reason}): get the file again from its publisher"
        ) from None


def adjacency_from_edges(sources: NDArray, targets: NDArray, num_nodes: int) -> sp.coo_array:
    """One boolean entry per edge [V, V]; `ValueError` for a node number outside 0..V-1."""
    ones = np.ones(len(sources), np.bool_)
    return sp.coo_array((ones, (sources, targets)), shape=(num_nodes, num_nodes))


def adjacency_from_csr(indptr: NDArray, indices: NDArray, num_nodes: int) -> sp.csr_array:
    """A boolean matrix [V, V] of the non-zero pattern; `ValueError` for an impossible one."""
    ones = np.ones(len(indices), np.bool_)
    matrix = sp.csr_array((ones, indices, indptr), shape=(num_nodes, num_nodes))
    matrix.check_format(full_check=True)
    return matrix


def check_raw(raw: RawGraph, folder: Path) -> RawGraph:
    """`raw`, if features (finite), labels and splits are those of its V nodes; else a `UserError`."""
    num_nodes = raw.adjacency_VV.shape[0]
    for what, count in (("features", len(raw.features_VF)), ("labels", len(raw.labels_V))):
        if count != num_nodes:
            raise UserError(
                f"{folder}: {count} {what} for {num_nodes} nodes: the files do not belong together, get them again"
            )
    if not np.isfinite(raw.features_VF.sum(dtype=np.float64)):
        raise UserError(f"{folder}: features are not finite: a file is damaged, get it again from its publisher")
    for name, parts in raw.splits:
        nodes = np.concatenate(parts)
        inside = len(nodes) == 0 or (nodes.min() >= 0 and nodes.max() < num_nodes)
        if not inside or len(np.unique(nodes)) != len(nodes):
            raise UserError(
                f"{folder}: split {name} names nodes twice or outside 0..{num_nodes - 1}: the files do not belong "
                f"together, get them again"
            )
    return raw
