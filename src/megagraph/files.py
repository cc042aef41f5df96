"""Files written whole or not at all, JSON and CSV, and the commit that wrote them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from megagraph.config import UserError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; `UserError` if the file is missing or broken."""
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: make it first") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON (line {error.lineno}): make the file again") from None
    if not isinstance(body, dict):
        raise UserError(f"{path}: holds a {type(body).__name__}, expected an object: make the file again")
    return body


def read_yaml(path: Path, remedy: str) -> Any:
    """What a YAML file holds; `UserError` if it is missing, with the remedy, or broken."""
    try:
        return yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: {remedy}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())}): correct it") from None


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; renamed onto it if the block succeeds, removed if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with one header, the keys of the first row; every row must have the same keys."""
    rows = list(rows)
    if not rows:
        raise UserError(f"{path}: no rows to write: nothing was measured")
    with atomic_path(path) as temporary, temporary.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def git_commit() -> str:
    """Short commit of the source tree, `+dirty` if tracked files differ, `unknown` outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return (commit + ("+dirty" if git("status", "--porcelain", "-uno") else "")) if commit else "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
