"""Raw files arrive whole and verified, or not at all, with one line that says why."""

from __future__ import annotations

import hashlib
import io
import shutil
import socket
import threading
import zipfile
from collections import namedtuple
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import get_args

import pytest

from megagraph.artifacts import RawFile
from megagraph.config import PublicConfig, UserError
from megagraph.graph.fetch import PublicSet, Unpinned, fetch
from megagraph.graph.public import PUBLIC_SETS, READERS
from megagraph.graph.transfer import require_space, writing

CONTENT = bytes(range(256)) * 1000
FILE = RawFile(name="a.bin", bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
SECOND = RawFile(name="b.bin", bytes=3, sha256=hashlib.sha256(b"two").hexdigest())


class Server(ThreadingHTTPServer):
    """Serves `content`; misbehaves as `faults` (one per request) says; keeps the Range of every request."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.faults: list[str] = []
        self.ranges: list[str | None] = []
        self.supports_range = True

    @property
    def public(self):
        return PublicSet("Set", f"http://127.0.0.1:{self.server_port}", (FILE,))


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.isdigit():
            self.send_error(int(fault))
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.supports_range else 0
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        if fault != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def mirror(tmp_path):
    raw = tmp_path / "mirror" / "Set" / "raw"
    raw.mkdir(parents=True)
    (raw / "a.bin").write_bytes(CONTENT)
    (raw / "b.bin").write_bytes(b"two")
    return tmp_path / "mirror"


PAIR = PublicSet("Set", "http://127.0.0.1:9", (FILE, SECOND))


def names(root):
    return sorted(path.name for path in (root / "Set" / "raw").iterdir())


def get(public, root, mirror=None):
    return fetch(public, root, mirror, attempts=3, timeout=5.0, pause=0.0)


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mirror_files_arrive_and_mirror_stays_as_it_was(mirror, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in mirror.rglob("*")}
    for path in sorted(mirror.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert get(PAIR, tmp_path / "root", mirror) == (FILE, SECOND)
    finally:
        for path in mirror.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert names(tmp_path / "root") == ["a.bin", "b.bin"]
    copied = tmp_path / "root" / "Set" / "raw" / "a.bin"
    assert copied.read_bytes() == CONTENT
    assert copied.stat().st_mode & 0o200, "the loaders need a writable copy"
    assert {path: path.stat().st_mtime_ns for path in mirror.rglob("*")} == before


def test_whole_files_stay_and_damaged_ones_are_replaced(mirror, tmp_path):
    raw = tmp_path / "root" / "Set" / "raw"
    raw.mkdir(parents=True)
    (raw / "a.bin").write_bytes(CONTENT)
    (raw / "b.bin").write_bytes(b"2wo")
    (mirror / "Set" / "raw" / "a.bin").unlink()
    get(PAIR, tmp_path / "root", mirror)
    assert (raw / "b.bin").read_bytes() == b"two"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(CONTENT[:-1]), ["255999 bytes, expected 256000"]),
        (lambda path: path.write_bytes(CONTENT[:-1] + b"x"), ["sha256", FILE.sha256[:12]]),
        (lambda path: path.unlink(), ["No such file", "into the mirror", "MEGAGRAPH_MIRROR"]),
    ],
    ids=["truncated", "altered", "missing"],
)
def test_bad_mirror_file_is_refused_and_nothing_is_left(mirror, tmp_path, damage, words):
    damage(mirror / "Set" / "raw" / "a.bin")
    with pytest.raises(UserError) as caught:
        get(PAIR, tmp_path / "root", mirror)
    for word in ["a.bin", *words]:
        assert word in one_line(caught)
    assert names(tmp_path / "root") == []


def test_download(server, tmp_path):
    assert get(server.public, tmp_path) == (FILE,)
    assert (tmp_path / "Set" / "raw" / "a.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["a.bin"]


def test_cut_connection_goes_on_where_it_stopped(server, tmp_path):
    server.faults = ["cut", "503"]
    get(server.public, tmp_path)
    assert server.ranges == [None, "bytes=128000-", "bytes=128000-"]
    assert (tmp_path / "Set" / "raw" / "a.bin").read_bytes() == CONTENT


def test_part_of_an_earlier_process_is_used(server, tmp_path):
    raw = tmp_path / "Set" / "raw"
    raw.mkdir(parents=True)
    (raw / "a.bin.part").write_bytes(CONTENT[:1000])
    get(server.public, tmp_path)
    assert server.ranges == ["bytes=1000-"]
    assert names(tmp_path) == ["a.bin"]


def test_server_without_ranges_starts_again(server, tmp_path):
    server.supports_range = False
    server.faults = ["cut"]
    get(server.public, tmp_path)
    assert (tmp_path / "Set" / "raw" / "a.bin").read_bytes() == CONTENT


def test_always_cut_is_an_error_but_the_part_stays_for_the_next_call(server, tmp_path):
    server.faults = ["cut"] * 3
    with pytest.raises(UserError) as caught:
        get(server.public, tmp_path)
    assert "connection closed after 224000 of 256000 bytes" in one_line(caught)
    assert names(tmp_path) == ["a.bin.part"]
    get(server.public, tmp_path)
    assert server.ranges[-1] == "bytes=224000-"
    assert names(tmp_path) == ["a.bin"]


def test_wrong_checksum_leaves_nothing(server, tmp_path):
    server.content = CONTENT[::-1]
    with pytest.raises(UserError, match="sha256"):
        get(server.public, tmp_path)
    assert names(tmp_path) == []


def test_other_length_is_refused_at_once(server, tmp_path):
    server.content = b"<html>log in first</html>"
    with pytest.raises(UserError, match="offers 25 bytes, not 256000"):
        get(server.public, tmp_path)
    assert len(server.ranges) == 1
    assert names(tmp_path) == []


def test_endless_answer_without_length_is_refused(server, tmp_path):
    server.content = CONTENT * 3
    server.faults = ["no length"]
    with pytest.raises(UserError, match="expected 256000"):
        get(server.public, tmp_path)
    assert names(tmp_path) == []


def test_missing_page_is_not_tried_again(server, tmp_path):
    server.faults = ["404"] * 3
    with pytest.raises(UserError, match="HTTP 404"):
        get(server.public, tmp_path)
    assert len(server.ranges) == 1
    assert names(tmp_path) == []


def test_unreachable_network(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError) as caught:
        get(PublicSet("Set", f"http://127.0.0.1:{port}", (FILE,)), tmp_path)
    message = one_line(caught)
    assert "unreachable" in message
    assert "MEGAGRAPH_MIRROR" in message
    assert names(tmp_path) == []


def test_full_disk_is_seen_before_the_download(server, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 255_999, 255_999))
    with pytest.raises(UserError, match="free space"):
        get(server.public, tmp_path)
    assert server.ranges == []
    require_space(tmp_path, 255_999)


def test_disk_that_fills_up_during_the_copy(mirror, tmp_path, monkeypatch):
    def copyfile(source, target):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(UserError) as caught:
        get(PAIR, tmp_path / "root", mirror)
    assert "No space left on device" in one_line(caught)
    assert names(tmp_path / "root") == []


def test_writing_lets_user_errors_through():
    with pytest.raises(UserError, match=r"^own words$"), writing("folder"):
        raise UserError("own words")


def zip_of(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


MEMBERS = {"products/raw/a.csv.gz": CONTENT, "products/split/x/train.csv.gz": b"0\n", "products/other": b"unused"}
LOOSE = (Unpinned("raw/a.csv.gz"), Unpinned("split/x/train.csv.gz"))


def archived(server):
    return replace(server.public, files=LOOSE, archive="products.zip", inside="products/")


def test_archive_is_unpacked_recorded_and_removed(server, tmp_path):
    server.content = zip_of(MEMBERS)
    server.faults = ["cut", "no length"]
    files = get(archived(server), tmp_path)
    assert files[0] == RawFile(name="raw/a.csv.gz", bytes=len(CONTENT), sha256=FILE.sha256, pinned=False)
    assert (tmp_path / "Set" / "raw" / "a.csv.gz").read_bytes() == CONTENT
    assert (tmp_path / "Set" / "split" / "x" / "train.csv.gz").read_bytes() == b"0\n"
    left = sorted(path.name for path in (tmp_path / "Set").rglob("*") if path.is_file())
    assert left == ["a.csv.gz", "train.csv.gz"]
    assert len(server.ranges) == 2
    get(archived(server), tmp_path)
    assert len(server.ranges) == 2, "what is whole is not asked for again"


def test_archive_cut_by_the_network_is_resumed_by_the_next_call(server, tmp_path):
    server.content = zip_of(MEMBERS)
    server.faults = ["cut"] * 3
    with pytest.raises(UserError, match="connection closed after"):
        get(archived(server), tmp_path)
    kept = (tmp_path / "Set" / "products.zip.part").stat().st_size
    get(archived(server), tmp_path)
    assert server.ranges[-1] == f"bytes={kept}-"


def test_whole_archive_left_by_a_killed_process_is_fetched_again(server, tmp_path):
    server.content = zip_of(MEMBERS)
    (tmp_path / "Set").mkdir()
    (tmp_path / "Set" / "products.zip.part").write_bytes(server.content)
    server.faults = ["416"]
    get(archived(server), tmp_path)
    assert server.ranges == [f"bytes={len(server.content)}-", None]


@pytest.mark.parametrize("where", ["member", "directory", "page", "other"])
def test_damaged_archive_is_one_line_and_leaves_nothing(server, tmp_path, where):
    whole = zip_of({"other": b"1"} if where == "other" else MEMBERS)
    middle = 200  # inside the first member's bytes
    server.content = {
        "member": whole[:middle] + bytes(byte ^ 255 for byte in whole[middle : middle + 1]) + whole[middle + 1 :],
        "directory": whole[:-30],
        "page": b"<html>log in first</html>",
        "other": whole,
    }[where]
    with pytest.raises(UserError) as caught:
        get(archived(server), tmp_path)
    assert "products.zip: not the expected zip archive" in one_line(caught)
    assert [path for path in (tmp_path / "Set").rglob("*") if path.is_file()] == []


def test_full_disk_is_seen_when_the_server_tells_the_size(server, tmp_path, monkeypatch):
    server.content = zip_of(MEMBERS)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 100, 100))
    with pytest.raises(UserError, match="GB needed"):
        get(archived(server), tmp_path)
    assert [path for path in (tmp_path / "Set").rglob("*") if path.is_file()] == []


def test_mirror_may_hold_the_archive_in_place_of_the_files(server, tmp_path):
    folder = tmp_path / "mirror" / "Set"
    folder.mkdir(parents=True)
    (folder / "products.zip").write_bytes(zip_of(MEMBERS))
    get(archived(server), tmp_path / "root", tmp_path / "mirror")
    assert (tmp_path / "root" / "Set" / "raw" / "a.csv.gz").read_bytes() == CONTENT
    assert [path.name for path in folder.rglob("*")] == ["products.zip"]
    assert server.ranges == []


@pytest.mark.parametrize("with_mirror", [True, False])
def test_set_without_a_download_says_how_to_get_it(tmp_path, with_mirror):
    public = PublicSet("Set", "", (Unpinned("feats.npy"),), remedy="run the documented command")
    with pytest.raises(UserError) as caught:
        get(public, tmp_path / "root", tmp_path / "mirror" if with_mirror else None)
    assert "run the documented command" in one_line(caught)


def test_table_of_public_sets_is_complete():
    counts = {"citeseer": 8, "cora": 8, "computers": 1, "tolokers": 1, "wordnet": 8}
    counts |= {"products": 8, "arxiv": 8, "reddit": 2, "reddit2": 4}
    assert {name: len(public.files) for name, public in PUBLIC_SETS.items()} == counts
    assert PUBLIC_SETS.keys() == READERS.keys() == set(get_args(PublicConfig.model_fields["source"].annotation))
    for public in PUBLIC_SETS.values():
        assert public.url or public.remedy
        assert public.archive or not public.url or all(file.sha256 for file in public.files)
        assert all(len(file.sha256) == 64 and file.bytes > 0 for file in public.files if file.sha256 is not None)
