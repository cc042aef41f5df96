"""The Planetoid citation graphs by their PyG loader (which makes edges undirected and drops self-loops).

Shapes: V nodes, F features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from megagraph.graph.raw import RawGraph, adjacency_from_edges, reading


def read_planetoid(folder: Path, title: Literal["CiteSeer", "Cora"]) -> RawGraph:
    """The graph of the verified pickles in ``folder/raw``; `UserError` for files that are no Planetoid graph."""
    from torch_geometric.datasets import Planetoid

    with reading(folder / "raw"):
        # force_reload: a cache that an earlier, killed process left may be half-written.
        data = Planetoid(str(folder.parent), title, force_reload=True)[0]
        sources, targets = data.edge_index.numpy()
        masks = (data.train_mask, data.val_mask, data.test_mask)
        train, valid, test = (np.flatnonzero(mask.numpy()) for mask in masks)
        return RawGraph(
            adjacency_from_edges(sources, targets, data.num_nodes),
            data.x.numpy().astype(np.float32, copy=False),
            data.y.numpy().astype(np.int64, copy=False),
            (("masks", (train, valid, test)),),
        )
