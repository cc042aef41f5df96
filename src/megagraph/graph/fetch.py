"""The raw files of the public data sets: where they are, how they arrive, how they are checked.

A file comes from a mirror (a read-only folder laid out as ``<folder>/raw/<file>``), by itself over HTTP or inside a
zip archive. It travels under the name ``<file>.part`` and gets its own name only after it was checked: against the
known size and SHA-256, or, where none is published, against the archive's own CRC.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from megagraph.artifacts import RawFile
from megagraph.config import UserError
from megagraph.graph.transfer import require_space, transfer, writing

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Unpinned:
    """A raw file whose size and checksum nobody publishes: both are recorded when it first arrives."""

    name: str
    bytes: None = None
    sha256: None = None


Wanted = RawFile | Unpinned


@dataclass(frozen=True)
class PublicSet:
    """A public data set: its folder below the scratch root and its files.

    A file name without a folder is below ``raw/``; one with a folder (``split/time/train.csv.gz``) is below the data
    set's own folder. `url` is the address of the files, or of `archive` (a zip whose members are the files below
    `inside`). Without `url` there is no public download and `remedy` says how to get the files.
    """

    folder: str
    url: str
    files: tuple[Wanted, ...]
    archive: str = ""
    inside: str = ""
    remedy: str = ""

    def path(self, root: Path, name: str) -> Path:
        """Where the file `name` is below a scratch root or a mirror."""
        return root / self.folder / (name if "/" in name else f"raw/{name}")


def fetch(
    public: PublicSet,
    root: Path,
    mirror: Path | None = None,
    *,
    attempts: int = 4,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> tuple[RawFile, ...]:
    """Bring the raw files below ``root/<folder>`` and return their names, sizes and checksums.

    Whole files already there stay. With `mirror` they are copied from it (nothing is written there; it may hold the
    archive in place of the files), otherwise downloaded: `attempts` tries, `timeout` seconds of silence each, `pause`
    seconds before the second try, doubled each time. A download cut by the network leaves its ``.part``, from which
    the next call goes on; every other failure leaves nothing. Raises `UserError` for a missing, truncated or altered
    file, an unreachable server, a full disk, a data set without a download.
    """
    folder = root / public.folder
    with writing(folder):
        (folder / "raw").mkdir(parents=True, exist_ok=True)
        missing = [file for file in public.files if not _is_whole(public.path(root, file.name), file)]
        require_space(folder, sum(file.bytes or 0 for file in missing))
        archive = _archive(public, mirror, missing)
        if mirror is None and missing and not public.url:
            raise UserError(f"data set {public.folder} has no public download that is checked here: {public.remedy}")
        if archive is not None or (mirror is None and public.archive and missing):
            _fetch_archive(public, root, archive, attempts, timeout, pause)
            return tuple(_record(public, root, file) for file in public.files)
        for file in missing:
            target = public.path(root, file.name)
            part = target.with_name(f"{target.name}.part")
            target.parent.mkdir(parents=True, exist_ok=True)
            if mirror is not None:
                origin = str(public.path(mirror, file.name))
                _copy(Path(origin), part, public.remedy or "unset MEGAGRAPH_MIRROR to download it")
            else:
                origin = f"{public.url}/{file.name}"
                transfer(origin, part, file.bytes, attempts=attempts, timeout=timeout, pause=pause)
            _verify(part, file, origin)
            part.replace(target)
    return tuple(_record(public, root, file) for file in public.files)


def _archive(public: PublicSet, mirror: Path | None, missing: list[Wanted]) -> Path | None:
    """The archive in the mirror, if it has to stand in for a file."""
    if mirror is None or not public.archive:
        return None
    archive = mirror / public.folder / public.archive
    absent = any(not public.path(mirror, file.name).exists() for file in missing)
    return archive if absent and archive.is_file() else None


def _fetch_archive(
    public: PublicSet, root: Path, archive: Path | None, attempts: int, timeout: float, pause: float
) -> None:
    """Unpack the wanted members of a zip, downloaded unless `archive` is one; the download is removed afterwards."""
    if archive is not None:
        _unpack(public, root, archive, str(archive))
        return
    origin = f"{public.url}/{public.archive}"
    part = root / public.folder / f"{public.archive}.part"
    transfer(origin, part, None, attempts=attempts, timeout=timeout, pause=pause)
    try:
        _unpack(public, root, part, origin)
    finally:
        part.unlink(missing_ok=True)


def _unpack(public: PublicSet, root: Path, archive: Path, origin: str) -> None:
    """Every wanted member under its own name, CRC checked by reading it to the end."""
    targets = {file.name: public.path(root, file.name) for file in public.files}
    try:
        with zipfile.ZipFile(archive) as members:
            sizes = {name: members.getinfo(public.inside + name).file_size for name in targets}
            require_space(root, sum(sizes.values()))
            for name, target in targets.items():
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_name(f"{target.name}.part")
                try:
                    with members.open(public.inside + name) as source, part.open("wb") as out:
                        shutil.copyfileobj(source, out, BLOCK_BYTES)
                    part.replace(target)
                finally:
                    part.unlink(missing_ok=True)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{origin}: not the expected zip archive ({reason}): it is damaged or another version, get it again from "
            f"its publisher"
        ) from None


def _record(public: PublicSet, root: Path, file: Wanted) -> RawFile:
    """The file as it is on the disk; what the table pins was checked before."""
    if isinstance(file, RawFile):
        return file
    path = public.path(root, file.name)
    return RawFile(name=file.name, bytes=path.stat().st_size, sha256=_sha256(path), pinned=False)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _is_whole(path: Path, file: Wanted) -> bool:
    """Whether the file is there and right; one without a checksum got its name only after it was complete."""
    if not path.is_file():
        return False
    return file.sha256 is None or (path.stat().st_size == file.bytes and _sha256(path) == file.sha256)


def _verify(part: Path, file: Wanted, origin: str) -> None:
    """Raise `UserError` and remove `part` unless it has the size and checksum of `file`, as far as they are known."""
    if file.sha256 is None:
        return
    size = part.stat().st_size
    if size == file.bytes and _sha256(part) == file.sha256:
        return
    found = f"sha256 {_sha256(part)[:12]}..., expected {file.sha256[:12]}..."
    if size != file.bytes:
        found = f"{size} bytes, expected {file.bytes}"
    part.unlink()
    raise UserError(f"{origin}: {found}: the file is damaged or another version, get it again from its publisher")


def _copy(source: Path, part: Path, otherwise: str) -> None:
    try:
        source.open("rb").close()
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}: put the file into the mirror, or {otherwise}") from None
    try:
        require_space(part.parent, source.stat().st_size)
        shutil.copyfile(source, part)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
