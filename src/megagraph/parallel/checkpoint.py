"""Checkpoints on torch.distributed.checkpoint: one set of global names whatever the layout.

Layer names carry global numbers on every stage, tensors are plain or, of a sharded table, known parts of a whole, the
optimiser state is flattened to one key per parameter and quantity; so a job saved under one (pp, cp, dp, layers) is
loaded under any other.

A checkpoint is a folder `EPOCH` or `EPOCH-STEP`. It has that name only when all of it is on the disk, and its
`progress.json` lists what belongs to it, so that one which lost a part since is not taken for whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from megagraph.config import UserError
from megagraph.parallel.table import sharded_tables

log = logging.getLogger("megagraph.checkpoint")

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_PROGRESS, _FINISHED = "progress.json", "finished"
_NAME = re.compile(r"(\d+)(?:-(\d+))?")


class Position(NamedTuple):
    """How far a run is: finished epochs, and finished steps of the epoch under way. Later ones compare greater."""

    epoch: int
    step: int = 0

    @property
    def name(self) -> str:
        """`000012` after twelve epochs, `000012-000003` three steps later."""
        return f"{self.epoch:06d}-{self.step:06d}" if self.step else f"{self.epoch:06d}"

    @classmethod
    def of(cls, path: Path) -> Position | None:
        """The inverse of `name`; None if the folder is no checkpoint."""
        match = _NAME.fullmatch(path.name)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


def save(
    folder: Path,
    position: Position,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    keep: Iterable[Path] = (),
) -> Path:
    """Write a checkpoint whole or not at all (temporary name, on the disk, then rename), then drop older ones.

    A process killed at any moment leaves the checkpoints before, or this one; so does a full disk, an `OSError`.

    Args:
        folder: the run's checkpoint folder.
        position: how far the run is.
        model: this rank's stage.
        optimizer: of the stage's parameters.
        progress: JSON-able state of the training loop; that of rank 0 is written.
        keep: checkpoints that stay beside this one.

    Returns:
        The checkpoint, `folder/POSITION`.
    """
    final = folder / position.name
    temporary = folder / f".{position.name}.part"
    if dist.get_rank() == 0:
        for left in (*folder.glob(".*.part"), *folder.glob(".*.old")):  # by a killed process
            shutil.rmtree(left)
        temporary.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    whole = _parts(model, {"model": model_state, "optimizer": optimizer_state})
    try:  # each rank syncs its own files before it says that it is done
        dcp.save(whole, checkpoint_id=temporary)
    except dcp.api.CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):  # a full disk is the user's to know, in one line
                raise failure from None
        raise
    if dist.get_rank() == 0:
        files = {path.name: path.stat().st_size for path in temporary.iterdir()}
        (temporary / _PROGRESS).write_text(json.dumps({"files": files, **progress}))
        _sync(temporary / _PROGRESS)
        _sync(temporary)
        _remove(final)
        temporary.rename(final)
        _sync(folder)
        for other in _named(folder):
            if other not in {final, *keep}:
                _remove(other)
    dist.barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; a line tells of each that is not complete."""
    complete = []
    for path in _named(folder):
        if lacking := _lacking(path):
            log.info("%s is not complete (%s): ignored", path, lacking)
        else:
            complete.append(path)
    return complete


def progress_of(path: Path) -> dict[str, Any]:
    """The state of the training loop in a checkpoint."""
    progress: dict[str, Any] = json.loads((path / _PROGRESS).read_text())
    return progress


def mark_finished(path: Path) -> None:
    """Note in a checkpoint that its run has written its results."""
    (path / _FINISHED).touch()


def is_finished(path: Path) -> bool:
    """Whether the run of a checkpoint has written its results."""
    return (path / _FINISHED).exists()


def read_into(state: dict[str, Any], path: Path, remedy: str) -> None:
    """Fill the tensors of `state` from a checkpoint, together with all ranks, or alone without a process group.

    Raises `UserError` with the remedy if the checkpoint is of another model.
    """
    try:
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (dcp.api.CheckpointException, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"{path} is a checkpoint of another model ({reason}): {remedy}") from None


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill model and optimiser of this rank's stage from a checkpoint of any layout; returns the progress.

    Raises `UserError` if the checkpoint is of another model.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    state = _parts(model, {"model": model_state, "optimizer": optimizer_state})
    read_into(state, path, remedy="remove it, or train into another folder")
    # Rows of sharded tables were read into the local tensors; everything else is taken as it was read.
    local: dict[str, Any] = {
        kind: {key: values[key] if isinstance(value, DTensor) else value for key, value in state[kind].items()}
        for kind, values in (("model", model_state), ("optimizer", optimizer_state))
    }
    set_state_dict(
        model, optimizer, model_state_dict=local["model"], optim_state_dict=local["optimizer"], options=_OPTIONS
    )
    return progress_of(path)


def _parts(model: nn.Module, state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The state with the rows of sharded tables, and their moments, as parts of whole ones; nothing is copied."""

    def part(key: str, value: Any) -> Any:
        stores = [store for name, store in sharded_tables(model).items() if name in key]
        return stores[0].part(value) if stores and isinstance(value, Tensor) and value.ndim == 2 else value

    return {kind: {key: part(key, value) for key, value in values.items()} for kind, values in state.items()}


def _named(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, oldest first."""
    found = ((Position.of(path), path) for path in folder.glob("*"))
    return [path for _, path in sorted((position, path) for position, path in found if position)]


def _lacking(path: Path) -> str:
    """Why a checkpoint is not complete; empty if it is."""
    try:
        files: dict[str, int] = progress_of(path)["files"]
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return f"no readable {_PROGRESS}"
    for name, size in files.items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            return f"{name} is missing or has another size"
    return ""


def _remove(path: Path) -> None:
    """Remove a checkpoint under another name, so that a process killed meanwhile leaves no half of it."""
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        path.rename(old)
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    """Have the content of a file, or the names in a folder, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
