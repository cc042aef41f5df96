"""The raw files of the public data sets: where they are, how they arrive, how they are checked.

A file comes from a mirror (a read-only folder laid out as ``<folder>/raw/<file>``) or over HTTPS. It travels under
the name ``<file>.part`` and gets its own name only after its size and SHA-256 are right.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from safetensors import SafetensorError
from tqdm import tqdm

from megagraph.artifacts import RawFile
from megagraph.config import UserError

BLOCK_BYTES = 1 << 16
# Server-side and rate-limit answers pass; any other 4xx says the same the next time.
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class PublicSet:
    """A public data set: its folder below the scratch root, the address of its files, their sizes and checksums."""

    folder: str
    url: str
    files: tuple[RawFile, ...]


def fetch(
    public: PublicSet,
    root: Path,
    mirror: Path | None = None,
    *,
    attempts: int = 4,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> tuple[RawFile, ...]:
    """Bring the raw files to ``root/<folder>/raw`` and return their names, sizes and checksums.

    Whole files already there stay. With `mirror` they are copied from it (nothing is written there), otherwise
    downloaded: `attempts` tries, `timeout` seconds of silence each, `pause` seconds before the second try, doubled
    each time. A download cut by the network leaves its ``.part``, from which the next call goes on; every other
    failure leaves nothing. Raises `UserError` for a missing, truncated or altered file, an unreachable server, a
    full disk.
    """
    raw = root / public.folder / "raw"
    with writing(raw):
        raw.mkdir(parents=True, exist_ok=True)
        missing = [file for file in public.files if not _is_whole(raw / file.name, file)]
        require_space(raw, sum(file.bytes for file in missing))
        for file in missing:
            part = raw / f"{file.name}.part"
            if mirror is not None:
                origin = str(mirror / public.folder / "raw" / file.name)
                _copy(Path(origin), part, file)
            else:
                origin = f"{public.url}/{file.name}"
                _download(origin, part, file, attempts, timeout, pause)
            _verify(part, file, origin)
            part.replace(raw / file.name)
    return public.files


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise `UserError` unless the disk of the existing `folder` has `num_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"{folder}: {free / 1e9:.3f} GB free, {num_bytes / 1e9:.3f} GB needed: free space or name another folder"
        )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a failure to write below `folder` (disk full, no permission) into a `UserError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{folder}: cannot be written ({reason}): free space or name another folder") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _is_whole(path: Path, file: RawFile) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes and _sha256(path) == file.sha256


def _verify(part: Path, file: RawFile, origin: str) -> None:
    """Raise `UserError` and remove `part` unless it has the size and checksum of `file`."""
    size = part.stat().st_size
    if size == file.bytes and _sha256(part) == file.sha256:
        return
    found = f"sha256 {_sha256(part)[:12]}..., expected {file.sha256[:12]}..."
    if size != file.bytes:
        found = f"{size} bytes, expected {file.bytes}"
    part.unlink()
    raise UserError(f"{origin}: {found}: the file is damaged or another version, get it again from its publisher")


def _copy(source: Path, part: Path, file: RawFile) -> None:
    try:
        source.open("rb").close()
    except OSError as error:
        raise UserError(
            f"{source}: {error.strerror}: put the file into the mirror, or unset MEGAGRAPH_MIRROR to download it"
        ) from None
    try:
        shutil.copyfile(source, part)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _download(url: str, part: Path, file: RawFile, attempts: int, timeout: float, pause: float) -> None:
    """Download to `part`, resuming what is there, until all bytes have come or the attempts are used up."""
    reason = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            size = _transfer(url, part, file, timeout)
        except HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code not in PASSING_STATUS:
                break
        except (URLError, HTTPException, TimeoutError, ConnectionError, SSLError) as error:
            reason = f"unreachable ({getattr(error, 'reason', None) or error or type(error).__name__})"
        else:
            if size >= file.bytes:
                return
            reason = f"connection closed after {size} of {file.bytes} bytes"
    raise UserError(
        f"{url}: {reason}: check the network and run again, or set MEGAGRAPH_MIRROR to a folder with the raw files"
    )


def _transfer(url: str, part: Path, file: RawFile, timeout: float) -> int:
    """One request; appends to `part` where the server supports it. Returns the bytes that `part` holds then."""
    size = part.stat().st_size if part.exists() else 0
    if size == file.bytes:
        return size
    if size > file.bytes:
        size = 0
    headers = {"User-Agent": "megagraph"} | ({"Range": f"bytes={size}-"} if size else {})
    with urlopen(Request(url, headers=headers), timeout=timeout) as response:
        if response.status != 206:
            size = 0
        _check_offer(response, size, part, file, url)
        bar = tqdm(total=file.bytes, initial=size, desc=file.name, unit="B", unit_scale=True, disable=None, leave=False)
        with part.open("ab" if size else "wb") as out, bar:
            # One block too many is enough to know that the file is too long.
            while size <= file.bytes and (block := response.read(BLOCK_BYTES)):
                out.write(block)
                size += len(block)
                bar.update(len(block))
    return size


def _check_offer(response: HTTPResponse, offset: int, part: Path, file: RawFile, url: str) -> None:
    """Refuse an answer of another length (an error page, another version) before it is stored."""
    length = response.headers.get("Content-Length")
    if length is not None and offset + int(length) != file.bytes:
        part.unlink(missing_ok=True)
        raise UserError(
            f"{url}: the server offers {offset + int(length)} bytes, not {file.bytes}: another version or an error "
            f"page, set MEGAGRAPH_MIRROR to a folder with the raw files"
        )
