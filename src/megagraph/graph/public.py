"""The table of public data sets: addresses, sizes, SHA-256 where they are published, and the reader of each.

The mirror layout is that of the usual loaders: ``Cora/raw``, ``ogbn_products/raw`` and ``ogbn_products/split``, ...
OGB and Reddit publish no checksum: those files are checked by the zip archive's CRC and recorded in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from megagraph.artifacts import RawFile
from megagraph.graph.fetch import PublicSet, Unpinned
from megagraph.graph.raw import RawGraph
from megagraph.graph.raw_npz import read_computers, read_reddit, read_reddit2, read_tolokers
from megagraph.graph.raw_ogb import ogb_files, read_ogb
from megagraph.graph.raw_planetoid import read_planetoid

PLANETOID_URL = "https://github.com/kimiyoung/planetoid/raw/master/data"
AMAZON_URL = "https://github.com/shchur/gnn-benchmark/raw/master/data/npz"
TOLOKERS_URL = "https://github.com/yandex-research/heterophilous-graphs/raw/main/data"
OGB_URL = "http://snap.stanford.edu/ogb/data/nodeproppred"
REDDIT_URL = "https://data.dgl.ai/dataset"
REDDIT2_REMEDY = (
    "get the four files with python -c \"from torch_geometric.datasets import Reddit2; Reddit2('Reddit2')\" "
    "and set MEGAGRAPH_MIRROR to the folder that holds Reddit2/raw"
)
WORDNET_REMEDY = "set MEGAGRAPH_MIRROR to a folder that holds wordnet/raw and wordnet/split (OGB's csv layout)"

READERS: Mapping[str, Callable[[Path], RawGraph]] = MappingProxyType(
    {
        "citeseer": partial(read_planetoid, title="CiteSeer"),
        "cora": partial(read_planetoid, title="Cora"),
        "computers": read_computers,
        "products": partial(read_ogb, split="sales_ranking", each_edge_once=True),
        "arxiv": partial(read_ogb, split="time", each_edge_once=False),
        "wordnet": partial(read_ogb, split="random", each_edge_once=False),
        "reddit": read_reddit,
        "reddit2": read_reddit2,
        "tolokers": read_tolokers,
    }
)


def _files(rows: str) -> tuple[RawFile, ...]:
    """Raw files from lines of ``name bytes sha256``."""
    parts = (row.split() for row in rows.strip().splitlines())
    return tuple(RawFile(name=name, bytes=int(size), sha256=sha256) for name, size, sha256 in parts)


def _unpinned(*names: str) -> tuple[Unpinned, ...]:
    return tuple(Unpinned(name) for name in names)


PUBLIC_SETS: Mapping[str, PublicSet] = MappingProxyType(
    {
        "citeseer": PublicSet(
            "CiteSeer",
            PLANETOID_URL,
            _files("""
ind.citeseer.allx 595021 2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668
ind.citeseer.ally 55623 f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95
ind.citeseer.graph 61987 d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7
ind.citeseer.test.index 5000 2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4
ind.citeseer.tx 260321 539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21
ind.citeseer.ty 24135 55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce
ind.citeseer.x 31087 d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6
ind.citeseer.y 3014 8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924
"""),
        ),
        "cora": PublicSet(
            "Cora",
            PLANETOID_URL,
            _files("""
ind.cora.allx 257305 9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543
ind.cora.ally 47959 2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71
ind.cora.graph 59847 58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d
ind.cora.test.index 5000 297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875
ind.cora.tx 148025 b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a
ind.cora.ty 28135 41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad
ind.cora.x 22119 23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab
ind.cora.y 4054 94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1
"""),
        ),
        "computers": PublicSet(
            "Computers",
            AMAZON_URL,
            _files("""
amazon_electronics_computers.npz 31921488 736ba1d9fd85eac2da83a5ad25c463f04b0031a6ca01563f90a7099d9e8ffb2c
"""),
        ),
        "tolokers": PublicSet(
            "tolokers",
            TOLOKERS_URL,
            _files("""
tolokers.npz 1329769 dacf3ac94cec53d03cd2adb5255c08b33dee1656c33ca8164a464bd9450a1667
"""),
        ),
        "products": PublicSet(
            "ogbn_products",
            OGB_URL,
            _unpinned(*ogb_files("sales_ranking")),
            archive="products.zip",
            inside="products/",
        ),
        "arxiv": PublicSet("ogbn_arxiv", OGB_URL, _unpinned(*ogb_files("time")), archive="arxiv.zip", inside="arxiv/"),
        "reddit": PublicSet(
            "Reddit", REDDIT_URL, _unpinned("reddit_data.npz", "reddit_graph.npz"), archive="reddit.zip"
        ),
        "reddit2": PublicSet(
            "Reddit2",
            "",
            _unpinned("adj_full.npz", "feats.npy", "class_map.json", "role.json"),
            remedy=REDDIT2_REMEDY,
        ),
        "wordnet": PublicSet(
            "wordnet",
            "",
            _files("""
raw/edge.csv.gz 3116780 4e2c10ee3715d6160623d4b1ee716f928f0b034df4e1e0f27ace2365f257f6ce
raw/node-feat.csv.gz 14289451 733d768168c22958c7805d6de592a124beadeb8eae81dfdc353099b75aa90f9e
raw/node-label.csv.gz 89600 0dde125d456535059518e61ed53643490d55a1187a7e4a66a5645e5ecc02dece
raw/num-edge-list.csv.gz 27 83f48d90d1de0f18519cc67d18a8a08945e3f47bbf28ace7169b6401d4af4794
raw/num-node-list.csv.gz 27 0ffae757edad96d879b576941dfd2fedaa76c08a98d4ef2bc7918d3e7b692bcc
split/random/train.csv.gz 159396 443060bd3e365d739fe8592ccc7ab9252af63e802c7f4087c01f3fde03fabd67
split/random/valid.csv.gz 53875 a239a5b28ac6aef55daf93b4ae96b168989fe97126d5534e5cee0ef86cae5293
split/random/test.csv.gz 53923 197c5e115474c31db2917ad00bdf3bef4b2cd019cf4c58e5182f6ddac0b9da03
"""),
            remedy=WORDNET_REMEDY,
        ),
    }
)
