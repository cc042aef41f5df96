"""A trained model as one safetensors file with its configuration, from a checkpoint of any layout.

The file needs no process group, no pickle and no data set to be read: names and shapes are those of the whole model,
the run's configuration and the graph's sizes stand in the metadata.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megagraph.artifacts import GraphManifest
from megagraph.config import RunConfig, UserError
from megagraph.files import atomic_path
from megagraph.model.hierarchical import HierarchicalGT
from megagraph.model.nodes import AllRows, NodeTable
from megagraph.parallel.checkpoint import Position, checkpoints, read_into
from megagraph.train.engine import DTYPES

SCHEMA = "megagraph.model/1"


def export(run: RunConfig, data: Path, folder: Path, out: Path) -> None:
    """Write the newest checkpoint of a run to `out`.

    Args:
        run: the configuration the run was trained with.
        data: folder of its graph; only `manifest.json` is read.
        folder: the run's folder, which holds `checkpoint`.
        out: the safetensors file.
    """
    existing = checkpoints(folder / "checkpoint")
    if not existing:
        raise UserError(f"{folder / 'checkpoint'} holds no complete checkpoint: train the run first")
    manifest = GraphManifest.load(data / "manifest.json")
    model = _empty(run, manifest.num_features, manifest.num_classes, manifest.num_nodes)
    state = model.state_dict()
    read_into({"model": state}, existing[-1], remedy="give its own run")
    position = Position.of(existing[-1]) or Position(0)
    metadata = {
        "schema": SCHEMA,
        "run": run.model_dump_json(),
        "num_features": str(manifest.num_features),
        "num_classes": str(manifest.num_classes),
        "num_nodes": str(manifest.num_nodes),
        "epochs": str(position.epoch),
        "steps": str(position.step),
    }
    with atomic_path(out) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary, metadata)


def load_exported(path: Path) -> tuple[HierarchicalGT, RunConfig]:
    """The whole model and the configuration of an exported file; raises `UserError` for any other file."""
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            if metadata.get("schema") != SCHEMA:
                raise UserError(f"{path}: schema is {metadata.get('schema')!r}, expected {SCHEMA!r}: export it again")
            run = RunConfig.model_validate_json(metadata["run"])
            sizes = (int(metadata.get(name, "0")) for name in ("num_features", "num_classes", "num_nodes"))
            model = _empty(run, *sizes)
            names = handle.keys()
            model.load_state_dict({name: handle.get_tensor(name) for name in names})
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: export it first") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a complete safetensors file ({error}): export it again") from None
    return model, run


def _empty(run: RunConfig, num_features: int, num_classes: int, num_nodes: int) -> HierarchicalGT:
    """The run's whole model without a feature table."""
    if run.model.arch != "hierarchical":
        raise UserError(f"run {run.id} has model.arch={run.model.arch}: only graph transformers are exported")
    dtype = DTYPES[run.train.dtype]
    nodes = NodeTable(run.model.hidden, AllRows(num_nodes)) if run.model.node_embedding else None
    return HierarchicalGT(run.model, torch.empty(0, num_features, dtype=dtype), num_classes, nodes=nodes).to(dtype)
