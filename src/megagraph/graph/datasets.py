"""Data sets: from a `DatasetConfig` to ``graph.safetensors`` and ``manifest.json``.

Every graph is undirected and 0/1. Self-loops are as the source gives them, and none gives any: the k-NN graph of
the digits and the planted partition have none, both PyG loaders drop those of the raw files. Features are the
source's own, without normalisation (ans-gt 1.1).

Shapes: V nodes, F features.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import scipy.sparse as sp

from megagraph.artifacts import GraphManifest, Provenance, RawFile
from megagraph.config import DatasetConfig, DigitsConfig, PlantedConfig, PygConfig, UserError
from megagraph.files import atomic_path
from megagraph.graph.assemble import assemble, count_self_loops
from megagraph.graph.fetch import fetch, require_space, writing
from megagraph.graph.planted import planted
from megagraph.graph.public import PUBLIC_SETS
from megagraph.graph.store import Graph, save_graph


def make_graph(
    name: str, config: DatasetConfig, scratch: Path, mirror: Path | None = None
) -> tuple[Graph, GraphManifest]:
    """The graph of a data set, in memory, and what is known of it.

    `scratch` is a writable folder for raw files and the PyG loaders' own caches, used by public data sets only;
    `mirror` a read-only folder with their raw files, else they are downloaded. Raises `UserError` (see `fetch`).
    """
    raw_files: tuple[RawFile, ...] = ()
    if isinstance(config, DigitsConfig):
        graph = _digits(name, config)
    elif isinstance(config, PlantedConfig):
        graph = planted(name, config)
    else:
        raw_files = fetch(PUBLIC_SETS[config.source], scratch, mirror)
        graph = _public(name, config, scratch)
    manifest = GraphManifest(
        name=name,
        source=config.source,
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        num_features=graph.num_features,
        num_classes=graph.num_classes,
        undirected=True,
        self_loops=count_self_loops(graph),
        public_split=graph.public_split is not None,
        raw_files=raw_files,
        provenance=Provenance.collect(),
    )
    return graph, manifest


def download(name: str, config: DatasetConfig, out: Path, mirror: Path | None = None) -> GraphManifest:
    """Write ``graph.safetensors`` and ``manifest.json`` into `out`; each appears whole, the manifest last.

    Raw files live in ``out/scratch`` until both are written. Raises `UserError` and leaves the earlier pair, if
    any, untouched.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        graph, manifest = make_graph(name, config, out / "scratch", mirror)
        require_space(out, graph.features_VF.nbytes + graph.indices.nbytes + graph.indptr.nbytes)
        manifest_path = out / "manifest.json"
        with atomic_path(manifest_path) as new_manifest, atomic_path(out / "graph.safetensors") as new_graph:
            save_graph(graph, new_graph)
            manifest.save(new_manifest)
            # A crash between the two renames must not pair the new graph with the old manifest.
            manifest_path.unlink(missing_ok=True)
        shutil.rmtree(out / "scratch", ignore_errors=True)
    return manifest


def _digits(name: str, config: DigitsConfig) -> Graph:
    """1,797 images of 8 x 8 pixels scaled to [0, 1]; joined where either is among the other's nearest neighbours."""
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    pixels_VF, labels_V = load_digits(return_X_y=True)
    if config.neighbors >= len(pixels_VF):
        raise UserError(
            f"neighbors={config.neighbors}: digits has {len(pixels_VF)} nodes, a node has at most "
            f"{len(pixels_VF) - 1} neighbours: lower it"
        )
    features_VF = (pixels_VF / 16.0).astype(np.float32)
    nearest = kneighbors_graph(features_VF, config.neighbors, mode="connectivity", include_self=False)
    return assemble(name, sp.csr_array(nearest), features_VF, labels_V.astype(np.int64), num_classes=10)


def _public(name: str, config: PygConfig, root: Path) -> Graph:
    """A graph read by its PyG loader from verified raw files below `root` (the Planetoid files are pickles)."""
    from torch_geometric.datasets import Amazon, Planetoid

    # force_reload: a cache that an earlier, killed process left may be half-written.
    if config.source == "computers":
        dataset = Amazon(str(root), "Computers", force_reload=True)
    else:
        title: Literal["CiteSeer", "Cora"] = "CiteSeer" if config.source == "citeseer" else "Cora"
        dataset = Planetoid(str(root), title, force_reload=True)
    data = dataset[0]
    sources, targets = data.edge_index.numpy()
    ones = np.ones(len(sources), np.bool_)
    public_split = None
    if "train_mask" in data:
        masks = (data.train_mask, data.val_mask, data.test_mask)
        train, val, test = (np.flatnonzero(mask.numpy()).astype(np.int64) for mask in masks)
        public_split = (train, val, test)
    return assemble(
        name,
        sp.coo_array((ones, (sources, targets)), shape=(data.num_nodes, data.num_nodes)),
        data.x.numpy().astype(np.float32, copy=False),
        data.y.numpy().astype(np.int64, copy=False),
        dataset.num_classes,
        public_split,
    )
