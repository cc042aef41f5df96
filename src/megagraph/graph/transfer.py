"""One file over HTTP: resumed where it was cut, never longer than what the server or the checksum table promises."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from safetensors import SafetensorError
from tqdm import tqdm

from megagraph.config import UserError

BLOCK_BYTES = 1 << 16
# Server-side and rate-limit answers pass; any other 4xx says the same the next time.
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
RANGE_NOT_SATISFIABLE = 416


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


def transfer(
    url: str, part: Path, expected: int | None = None, *, attempts: int = 4, timeout: float = 30.0, pause: float = 1.0
) -> None:
    """Download to `part`, resuming what is there, until all bytes have come or the attempts are used up.

    `expected` is the size in bytes where it is known, else the server's own word is taken. `timeout` seconds of
    silence end a try; `pause` seconds pass before the second one, doubled each time. Raises `UserError`; a download
    cut by the network leaves its `part`.
    """
    reason = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            size, total = _request(url, part, expected, timeout)
        except HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code == RANGE_NOT_SATISFIABLE and part.exists():
                # Nothing follows what is there: it is whole, or another version's rest. Only a fresh copy tells.
                part.unlink()
            elif error.code not in PASSING_STATUS:
                break
        except (URLError, HTTPException, TimeoutError, ConnectionError, SSLError) as error:
            reason = f"unreachable ({getattr(error, 'reason', None) or error or type(error).__name__})"
        else:
            if total is None or size >= total:
                return
            reason = f"connection closed after {size} of {total} bytes"
    raise UserError(
        f"{url}: {reason}: check the network and run again, or set MEGAGRAPH_MIRROR to a folder with the raw files"
    )


def _request(url: str, part: Path, expected: int | None, timeout: float) -> tuple[int, int | None]:
    """One request; appends to `part` where the server supports it. Returns the bytes in `part` and the total."""
    size = part.stat().st_size if part.exists() else 0
    if size == expected:
        return size, expected
    if expected is not None and size > expected:
        size = 0
    headers = {"User-Agent": "megagraph"} | ({"Range": f"bytes={size}-"} if size else {})
    with urlopen(Request(url, headers=headers), timeout=timeout) as response:
        if response.status != 206:
            size = 0
        total = _total(response, size, part, expected, url)
        if total is not None:
            require_space(part.parent, total - size)
        bar = tqdm(total=total, initial=size, desc=part.stem, unit="B", unit_scale=True, disable=None, leave=False)
        with part.open("ab" if size else "wb") as out, bar:
            # One block too many is enough to know that the file is too long.
            while (total is None or size <= total) and (block := response.read(BLOCK_BYTES)):
                out.write(block)
                size += len(block)
                bar.update(len(block))
    return size, total


def _total(response: HTTPResponse, offset: int, part: Path, expected: int | None, url: str) -> int | None:
    """The size of the whole file; refuses another length (an error page, another version) before it is stored."""
    length = response.headers.get("Content-Length")
    if length is None:
        return expected
    offered = offset + int(length)
    if expected is not None and offered != expected:
        part.unlink(missing_ok=True)
        raise UserError(
            f"{url}: the server offers {offered} bytes, not {expected}: another version or an error "
            f"page, set MEGAGRAPH_MIRROR to a folder with the raw files"
        )
    return offered
