"""Data sets: the invariants of every graph, the published counts of the real ones, whole files or none."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from megagraph.artifacts import GraphManifest
from megagraph.config import DigitsConfig, PlantedConfig, PublicConfig, UserError
from megagraph.graph import datasets
from megagraph.graph.assemble import assemble, count_self_loops
from megagraph.graph.datasets import download, make_graph
from megagraph.graph.store import load_graph
from raw_formats import NUM_NODES, table_for, write_mirror

PLANTED = PlantedConfig(source="planted", nodes=300, communities=3, features=4)


def check(graph, manifest):
    adjacency = graph.adjacency()
    assert adjacency.has_canonical_format, "columns sorted, no duplicates"
    assert (adjacency != adjacency.T).nnz == 0
    assert (graph.indptr.dtype, graph.indices.dtype) == (np.int64, np.int32)
    assert (graph.features_VF.dtype, graph.labels_V.dtype) == (np.float32, np.int64)
    assert len(graph.features_VF) == len(graph.labels_V) == graph.num_nodes
    assert graph.labels_V.min() >= 0
    assert graph.labels_V.max() < graph.num_classes
    for field in ("name", "num_nodes", "num_edges", "num_features", "num_classes"):
        assert getattr(manifest, field) == getattr(graph, field)
    assert manifest.undirected
    assert manifest.self_loops == np.count_nonzero(adjacency.diagonal())
    assert manifest.public_split == (graph.public_split is not None)


def test_assemble_makes_any_matrix_a_graph():
    rows, cols, values = [0, 0, 2, 1, 3], [2, 2, 0, 1, 0], [1.0, 5.0, 1.0, 0.5, 2.0]
    matrix = sp.coo_array((values, (rows, cols)), shape=(4, 4))
    graph = assemble("toy", matrix, np.zeros((4, 1), np.float32), np.zeros(4, np.int64), 1)
    assert graph.adjacency().toarray().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert graph.num_edges == 5
    assert graph.adjacency().has_canonical_format
    assert graph.undirected
    assert count_self_loops(graph) == 1


def test_assemble_keeps_direction_and_drops_self_loops_where_asked():
    matrix = sp.coo_array(([1, 1, 1, 1], ([0, 0, 2, 1], [2, 2, 1, 1])), shape=(3, 3))
    features, labels = np.zeros((3, 1), np.float32), np.zeros(3, np.int64)
    one_way = assemble("toy", matrix, features, labels, 1, undirected=False)
    assert one_way.adjacency().toarray().tolist() == [[0, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert not one_way.undirected
    bare = assemble("toy", matrix, features, labels, 1, drop_self_loops=True)
    assert bare.adjacency().toarray().tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 0]]
    assert (bare.indptr.dtype, bare.indices.dtype) == (np.int64, np.int32)
    symmetric = assemble("toy", matrix + matrix.T, features, labels, 1, undirected=False)
    assert symmetric.undirected, "nothing is lost by a direction that is not there"


def test_digits(tmp_path):
    graph, manifest = make_graph("digits", DigitsConfig(source="digits", neighbors=8), tmp_path)
    check(graph, manifest)
    assert (graph.num_nodes, graph.num_features, graph.num_classes) == (1797, 64, 10)
    assert (graph.features_VF.min(), graph.features_VF.max()) == (0.0, 1.0)
    degrees = np.diff(graph.indptr)
    assert degrees.min() == 8
    assert 8 * 1797 < graph.num_edges < 16 * 1797
    assert manifest.self_loops == 0
    nearest = np.argsort(np.linalg.norm(graph.features_VF - graph.features_VF[7], axis=1), kind="stable")[1:6]
    assert set(nearest) <= set(graph.indices[graph.indptr[7] : graph.indptr[8]])
    assert not any(tmp_path.iterdir())


def test_digits_with_too_many_neighbours(tmp_path):
    with pytest.raises(UserError, match=r"neighbors=1797.*at most 1796.*lower it"):
        make_graph("digits", DigitsConfig(source="digits", neighbors=1797), tmp_path)


def test_planted(tmp_path):
    graph, manifest = make_graph("mine", PLANTED, tmp_path)
    check(graph, manifest)
    assert (manifest.source, manifest.raw_files) == ("planted", ())
    assert (graph.num_nodes, graph.num_features, graph.num_classes) == (300, 4, 3)


def test_planted_with_standard_features(tmp_path):
    config = PLANTED.model_copy(update={"feature_norm": "standard"})
    graph, manifest = make_graph("mine", config, tmp_path)
    np.testing.assert_allclose(graph.features_VF.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(graph.features_VF.std(0), 1, rtol=1e-5)
    assert (manifest.config, manifest.split) == (config, "none")


def test_download_writes_both_files_and_nothing_else(tmp_path):
    manifest = download("mine", PLANTED, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["graph.safetensors", "manifest.json"]
    check(load_graph(tmp_path / "out" / "graph.safetensors"), GraphManifest.load(tmp_path / "out" / "manifest.json"))
    assert GraphManifest.load(tmp_path / "out" / "manifest.json") == manifest


@pytest.mark.parametrize("broken", ["save_graph", "manifest"])
def test_failure_while_writing_keeps_the_earlier_pair(tmp_path, monkeypatch, broken):
    download("mine", PLANTED, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*args):
        raise OSError(28, "No space left on device")

    if broken == "save_graph":
        monkeypatch.setattr(datasets, "save_graph", fail)
    else:
        monkeypatch.setattr(GraphManifest, "save", fail)
    with pytest.raises(UserError, match="No space left on device") as caught:
        download("mine", PLANTED.model_copy(update={"seed": 1}), tmp_path)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_full_disk_is_seen_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(UserError, match="GB needed"):
        download("mine", PLANTED, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_cora(tmp_path, monkeypatch):
    write_mirror("cora", tmp_path / "mirror")
    table = table_for("cora", tmp_path / "mirror")
    monkeypatch.setattr(datasets, "PUBLIC_SETS", table)
    return tmp_path / "mirror", table["cora"].files


def test_mirror_is_read_only_and_raw_files_do_not_stay(tiny_cora, tmp_path):
    mirror, files = tiny_cora
    out = tmp_path / "out"
    manifest = download("cora", PublicConfig(source="cora"), out, mirror)
    check(load_graph(out / "graph.safetensors"), manifest)
    assert manifest.raw_files == files
    assert all(file.pinned for file in manifest.raw_files)
    assert (manifest.source, manifest.self_loops) == ("cora", 0)
    assert sorted(path.name for path in out.iterdir()) == ["graph.safetensors", "manifest.json"]
    assert sorted(path.name for path in mirror.rglob("*")) == sorted(["Cora", "raw", *(file.name for file in files)])


def test_half_written_cache_of_a_killed_process_is_not_used(tiny_cora, tmp_path):
    mirror, _ = tiny_cora
    processed = tmp_path / "scratch" / "Cora" / "processed"
    processed.mkdir(parents=True)
    (processed / "data.pt").write_bytes(b"half")
    graph, _ = make_graph("cora", PublicConfig(source="cora"), tmp_path / "scratch", mirror)
    assert graph.num_nodes == NUM_NODES


def test_damaged_mirror_leaves_no_output(tiny_cora, tmp_path):
    mirror, files = tiny_cora
    damaged = mirror / "Cora" / "raw" / files[0].name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(UserError, match=files[0].name):
        download("cora", PublicConfig(source="cora"), tmp_path / "out", mirror)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.mirror
@pytest.mark.parametrize(
    ("source", "counts", "public"),
    [
        ("citeseer", (3327, 9104, 3703, 6), [120, 500, 1000]),
        ("cora", (2708, 10556, 1433, 7), [140, 500, 1000]),
        ("computers", (13752, 491722, 767, 10), None),
        ("tolokers", (11758, 1038000, 10, 2), [5879, 2939, 2940]),
        ("wordnet", (117659, 739238, 128, 45), [70595, 23532, 23532]),
    ],
)
def test_published_counts(source, counts, public, tmp_path):
    mirror = os.environ.get("MEGAGRAPH_MIRROR")
    if not mirror:
        pytest.skip("MEGAGRAPH_MIRROR does not name a folder with the raw files of the public data sets")
    manifest = download(source, PublicConfig(source=source), tmp_path, Path(mirror))
    graph = load_graph(tmp_path / "graph.safetensors")
    check(graph, manifest)
    assert (graph.num_nodes, graph.num_edges, graph.num_features, graph.num_classes) == counts
    assert manifest.self_loops == 0
    assert set(np.unique(graph.labels_V)) == set(range(counts[3]))
    assert (None if graph.public_split is None else [len(part) for part in graph.public_split]) == public
    assert json.loads((tmp_path / "manifest.json").read_text())["schema"] == "megagraph.graph/1"
