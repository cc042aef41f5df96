"""Data sets: from a `DatasetConfig` to ``graph.safetensors`` and ``manifest.json``.

Every graph is 0/1. Direction, self-loops, feature normalisation and the split carried along are keys of the data
set's configuration and recorded in the manifest; the k-NN graph of the digits and the planted partition are
undirected without self-loops by construction. By default features are the source's own (ans-gt 1.1).

Shapes: V nodes, F features.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from megagraph.artifacts import GraphManifest, Provenance, RawFile
from megagraph.config import DatasetConfig, DigitsConfig, PlantedConfig, PublicConfig, UserError
from megagraph.files import atomic_path
from megagraph.graph.assemble import assemble, count_self_loops
from megagraph.graph.features import normalise_features
from megagraph.graph.fetch import fetch
from megagraph.graph.planted import planted
from megagraph.graph.public import PUBLIC_SETS, READERS
from megagraph.graph.raw import check_raw
from megagraph.graph.store import Graph, Split, save_graph
from megagraph.graph.transfer import require_space, writing


def make_graph(
    name: str, config: DatasetConfig, scratch: Path, mirror: Path | None = None
) -> tuple[Graph, GraphManifest]:
    """The graph of a data set, in memory, and what is known of it.

    `scratch` is a writable folder for raw files and the PyG loaders' own caches, used by public data sets only;
    `mirror` a read-only folder with their raw files, else they are downloaded. Raises `UserError` (see `fetch`).
    """
    raw_files: tuple[RawFile, ...] = ()
    split_name = "none"
    if isinstance(config, DigitsConfig):
        graph = _digits(name, config)
    elif isinstance(config, PlantedConfig):
        graph = planted(name, config)
    else:
        public = PUBLIC_SETS[config.source]
        raw_files = fetch(public, scratch, mirror)
        graph, split_name = _public(name, config, scratch / public.folder)
    normalise_features(graph.features_VF, config.feature_norm)
    manifest = GraphManifest(
        name=name,
        source=config.source,
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        num_features=graph.num_features,
        num_classes=graph.num_classes,
        undirected=graph.undirected,
        self_loops=count_self_loops(graph),
        public_split=graph.public_split is not None,
        split=split_name,
        config=config,
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


def _public(name: str, config: PublicConfig, folder: Path) -> tuple[Graph, str]:
    """A graph read from the raw files in `folder`, and the name of its split (`none` where it carries none)."""
    try:
        raw = check_raw(READERS[config.source](folder), folder)
    except UserError:
        # Files without a published checksum showed only now that they are bad: do not read them again.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    split_name, split = "none", None
    if config.split != "none" and (raw.splits or config.split > 0):
        split_name, split = _pick(config, raw.splits)
    graph = assemble(
        name,
        raw.adjacency_VV,
        raw.features_VF,
        raw.labels_V,
        num_classes=int(raw.labels_V.max(initial=-1)) + 1,
        public_split=split,
        undirected=config.undirected or raw.each_edge_once,
        drop_self_loops=config.self_loops == "drop",
    )
    return graph, split_name


def _pick(config: PublicConfig, splits: tuple[tuple[str, Split], ...]) -> tuple[str, Split]:
    """The split of that number, in int64; `UserError` where the data set has fewer."""
    number = int(config.split)
    if number >= len(splits):
        raise UserError(f"split={number}: {config.source} publishes {len(splits)} splits: use a number below that")
    split_name, (train, val, test) = splits[number]
    return split_name, (train.astype(np.int64), val.astype(np.int64), test.astype(np.int64))
