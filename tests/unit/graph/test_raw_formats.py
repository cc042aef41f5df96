"""Every raw format, under the real names, from a mirror to a graph; damaged files are one line."""

from __future__ import annotations

import errno
import gzip
import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from megagraph.artifacts import GraphManifest
from megagraph.config import PublicConfig, UserError
from megagraph.graph import datasets, raw_npz, raw_ogb
from megagraph.graph.datasets import download, make_graph
from megagraph.graph.raw import reading
from megagraph.graph.store import load_graph, save_graph
from raw_formats import NUM_CLASSES, NUM_FEATURES, NUM_NODES, table_for, toy, write_csv, write_mirror

SOURCES = ["products", "arxiv", "reddit", "reddit2", "citeseer", "cora", "computers", "tolokers", "wordnet"]
PINNED = {"citeseer", "cora", "computers", "tolokers", "wordnet"}
SPLITS = {"products": "sales_ranking", "arxiv": "time", "wordnet": "random", "reddit": "node_types", "reddit2": "role"}
SPLITS |= {"citeseer": "masks", "cora": "masks", "tolokers": "masks[0]", "computers": "none"}
STAYS_DIRECTED = {"arxiv", "computers", "wordnet"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Writes a data set into a mirror and registers the fixture's checksums; returns mirror and files."""

    def write(source):
        mirror = tmp_path / "mirror"
        files = write_mirror(source, mirror)
        monkeypatch.setattr(datasets, "PUBLIC_SETS", table_for(source, mirror))
        return mirror, files

    return write


def load(source, mirror, tmp_path, **keys):
    return make_graph(source, PublicConfig(source=source, **keys), tmp_path / "scratch", mirror)


@pytest.mark.parametrize("source", SOURCES)
def test_format_gives_the_graph(source, place, tmp_path):
    mirror, _ = place(source)
    manifest = download(source, PublicConfig(source=source), tmp_path / "out", mirror)
    graph = load_graph(tmp_path / "out" / "graph.safetensors")
    truth = toy()
    bare = truth.undirected.copy()
    np.fill_diagonal(bare, 0)
    np.testing.assert_array_equal(graph.adjacency().toarray(), bare)
    assert graph.adjacency().has_canonical_format
    features = truth.features > 0 if source == "computers" else truth.features
    np.testing.assert_array_equal(graph.features_VF, features)
    assert graph.features_VF.dtype == np.float32
    np.testing.assert_array_equal(graph.labels_V, truth.labels)
    assert (graph.num_classes, graph.undirected) == (NUM_CLASSES, True)
    if source == "computers":
        assert graph.public_split is None
    else:
        for mine, theirs in zip(graph.public_split, truth.split, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == np.int64
    assert GraphManifest.load(tmp_path / "out" / "manifest.json") == manifest
    assert manifest.config == PublicConfig(source=source)
    assert (manifest.split, manifest.self_loops) == (SPLITS[source], 0)
    assert {file.pinned for file in manifest.raw_files} == {source in PINNED}
    assert all(file.bytes > 0 and len(file.sha256) == 64 for file in manifest.raw_files)


@pytest.mark.parametrize("source", ["products", "arxiv", "reddit", "reddit2", "computers", "tolokers"])
def test_direction_and_self_loops_are_the_configurations(source, place, tmp_path):
    mirror, _ = place(source)
    graph, manifest = load(source, mirror, tmp_path, undirected=False, self_loops="keep", split="none")
    truth = toy()
    wanted = truth.directed if source in STAYS_DIRECTED else truth.undirected
    np.testing.assert_array_equal(graph.adjacency().toarray(), wanted)
    assert manifest.self_loops == 1
    assert manifest.undirected == graph.undirected == (source not in STAYS_DIRECTED)
    assert (graph.public_split, manifest.split) == (None, "none")
    save_graph(graph, tmp_path / "g.safetensors")
    assert load_graph(tmp_path / "g.safetensors").undirected == graph.undirected


def test_planetoid_loader_leaves_no_choice():
    with pytest.raises(ValueError, match=r"undirected=False.*cora makes edges undirected"):
        PublicConfig(source="cora", undirected=False)
    with pytest.raises(ValueError, match="self_loops=keep"):
        PublicConfig(source="citeseer", self_loops="keep")


def test_split_number(place, tmp_path):
    mirror, _ = place("tolokers")
    graph, manifest = load("tolokers", mirror, tmp_path, split=1)
    np.testing.assert_array_equal(graph.public_split[0], toy().split[2])
    assert manifest.split == "masks[1]"
    with pytest.raises(UserError, match="split=2: tolokers publishes 2 splits"):
        load("tolokers", mirror, tmp_path, split=2)


def test_feature_norm(place, tmp_path):
    mirror, _ = place("arxiv")
    truth = toy().features.astype(np.float64)
    row, manifest = load("arxiv", mirror, tmp_path, feature_norm="row")
    sums = np.abs(truth).sum(1, keepdims=True)
    np.testing.assert_allclose(row.features_VF, truth / np.where(sums > 0, sums, 1), rtol=1e-6)
    assert manifest.config.feature_norm == "row"
    standard, _ = load("arxiv", mirror, tmp_path, feature_norm="standard")
    np.testing.assert_allclose(standard.features_VF, (truth - truth.mean(0)) / truth.std(0), rtol=1e-4, atol=1e-6)


def test_chunks_and_blocks_do_not_show(place, tmp_path, monkeypatch):
    for module, name in ((raw_ogb, "EDGE_ROWS"), (raw_ogb, "FEATURE_ROWS"), (raw_npz, "BLOCK_VALUES")):
        monkeypatch.setattr(module, name, 7)
    for source in ("products", "reddit"):
        mirror, _ = place(source)
        graph, _ = load(source, mirror, tmp_path)
        np.testing.assert_array_equal(graph.features_VF, toy().features)
        assert graph.num_edges == toy().undirected.sum() - 1


def test_unlabelled_nodes(place, tmp_path):
    mirror, files = place("arxiv")
    (path,) = (file for file in files if file.name == "node-label.csv.gz")
    write_csv(path, ["nan", *toy().labels[1:]])
    assert load("arxiv", mirror, tmp_path)[0].labels_V[:2].tolist() == [-1, 1]


def truncated(content):
    return content[: len(content) // 2]


def altered(content):
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 0x5A for byte in content[middle : middle + 16]) + content[middle + 16 :]


def foreign(content):
    return b"<html>log in first</html>\n"


@pytest.mark.parametrize("damage", [truncated, altered, foreign])
@pytest.mark.parametrize("source", SOURCES)
def test_damage_to_any_file_is_one_line(source, damage, place, tmp_path):
    mirror, files = place(source)
    for number, path in enumerate(files):
        if damage is altered and path.name == "feats.npy":
            continue  # neither a published checksum nor a CRC: other numbers are other features
        content, out = path.read_bytes(), tmp_path / f"out-{number}"
        path.write_bytes(damage(content))
        with pytest.raises(UserError) as caught:
            download(source, PublicConfig(source=source), out, mirror)
        path.write_bytes(content)
        assert "\n" not in str(caught.value)
        assert path.name in str(caught.value)
        assert not [left for left in out.glob("*") if left.is_file()]


def test_repaired_mirror_is_read_again(place, tmp_path):
    mirror, files = place("arxiv")
    content = files[0].read_bytes()
    files[0].write_bytes(truncated(content))
    with pytest.raises(UserError):
        load("arxiv", mirror, tmp_path)
    files[0].write_bytes(content)
    assert load("arxiv", mirror, tmp_path)[0].num_nodes == NUM_NODES


def test_features_that_are_no_numbers(place, tmp_path):
    mirror, files = place("reddit2")
    (path,) = (file for file in files if file.name == "feats.npy")
    features = np.load(path)
    features[5, 1] = 1e300
    np.save(path, features)
    with pytest.raises(UserError, match="not finite"):
        load("reddit2", mirror, tmp_path)


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("edge.csv.gz", [[0, 1]], "1 edges, expected 1501"),
        ("edge.csv.gz", [[0, 520]] * 1501, "edge.csv.gz: damaged"),
        ("edge.csv.gz", [[0, 1, 2]] * 1501, "rows of 2 numbers"),
        ("node-feat.csv.gz", [[0.5] * NUM_FEATURES], "1 rows, expected 520"),
        ("node-feat.csv.gz", [[0.5] * NUM_FEATURES] * 521, "expected 520 rows"),
        ("node-label.csv.gz", [1, 2], "2 labels for 520 nodes"),
        ("num-node-list.csv.gz", [260, 260], "2 counts"),
        ("train.csv.gz", [NUM_NODES], "split sales_ranking"),
        ("train.csv.gz", [NUM_NODES - 1], "split sales_ranking"),
    ],
)
def test_files_that_do_not_belong_together(place, tmp_path, name, rows, words):
    mirror, files = place("products")
    (path,) = (file for file in files if file.name == name)
    write_csv(path, rows)
    with pytest.raises(UserError, match=words):
        load("products", mirror, tmp_path)


def test_pickled_arrays_are_refused(place, tmp_path):
    mirror, files = place("reddit")
    (path,) = (file for file in files if file.name == "reddit_data.npz")
    np.savez(path, feature=np.array([{"no": "pickle"}], dtype=object), label=[0], node_types=[1])
    with pytest.raises(UserError, match="expected numbers"):
        load("reddit", mirror, tmp_path)


def test_full_disk_is_not_called_a_damaged_file(tmp_path):
    with pytest.raises(OSError, match="No space left"), reading(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match="damaged or of another format"), reading(tmp_path):
        raise OSError("Not a gzipped file")


def test_reader_of_ogb_files_asks_nothing_and_imports_no_ogb(tmp_path):
    write_mirror("products", tmp_path)
    code = (
        "import sys; from pathlib import Path; from megagraph.graph.raw_ogb import read_ogb\n"
        f"read_ogb(Path({str(tmp_path / 'ogbn_products')!r}), 'sales_ranking', each_edge_once=True)\n"
        "assert not {'ogb', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("source", SOURCES)
def test_command_line_ends_with_2(source, place, tmp_path, capsys, monkeypatch):
    if importlib.util.find_spec("megagraph.cli") is None:
        pytest.skip("this tree has no command line")
    cli = importlib.import_module("megagraph.cli")
    mirror, files = place(source)
    files[0].write_bytes(truncated(files[0].read_bytes()))
    monkeypatch.setenv("MEGAGRAPH_MIRROR", str(mirror))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"source": source}))
    assert cli.main(["download", str(config), source, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megagraph: error: ")
    assert error.count("\n") == 1
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_file()]


def test_csv_fixture_is_the_real_layout(tmp_path):
    write_mirror("arxiv", tmp_path)
    with gzip.open(tmp_path / "ogbn_arxiv" / "raw" / "edge.csv.gz", "rt") as handle:
        first = handle.readline().strip().split(",")
    assert [int(node) for node in first] == [toy().sources[0], toy().targets[0]]
