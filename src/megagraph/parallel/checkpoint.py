"""Checkpoints on torch.distributed.checkpoint: one set of global names whatever the layout.

Layer names carry global numbers on every stage, tensors are plain or, of a sharded table, known parts of a whole, the
optimiser state is flattened to one key per parameter and quantity; so a job saved under one (pp, cp, dp, layers) is
loaded under any other.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from megagraph.config import UserError
from megagraph.parallel.table import sharded_tables

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_PROGRESS = "progress.json"


def save(
    folder: Path, number: int, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Write `folder/NUMBER` whole or not at all (temporary name, then rename), then drop older checkpoints.

    Args:
        folder: the run's checkpoint folder.
        number: of finished epochs; the newest has the largest.
        model: this rank's stage.
        optimizer: of the stage's parameters.
        progress: JSON-able state of the training loop, the same on every rank.
    """
    final, temporary = folder / f"{number:06d}", folder / f".{number:06d}.part"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    dcp.save(_parts(model, {"model": model_state, "optimizer": optimizer_state}), checkpoint_id=temporary)
    if dist.get_rank() == 0:
        (temporary / _PROGRESS).write_text(json.dumps(progress))
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        for older in checkpoints(folder):
            if older != final:
                shutil.rmtree(older)
    dist.barrier()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if (path / _PROGRESS).is_file())


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
    read_into(state, path, remedy="train into another folder")
    # Rows of sharded tables were read into the local tensors; everything else is taken as it was read.
    local: dict[str, Any] = {
        kind: {key: values[key] if isinstance(value, DTensor) else value for key, value in state[kind].items()}
        for kind, values in (("model", model_state), ("optimizer", optimizer_state))
    }
    set_state_dict(
        model, optimizer, model_state_dict=local["model"], optim_state_dict=local["optimizer"], options=_OPTIONS
    )
    progress: dict[str, Any] = json.loads((path / _PROGRESS).read_text())
    return progress


def _parts(model: nn.Module, state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The state with the rows of sharded tables, and their moments, as parts of whole ones; nothing is copied."""

    def part(key: str, value: Any) -> Any:
        stores = [store for name, store in sharded_tables(model).items() if name in key]
        return stores[0].part(value) if stores and isinstance(value, Tensor) and value.ndim == 2 else value

    return {kind: {key: part(key, value) for key, value in values.items()} for kind, values in state.items()}
