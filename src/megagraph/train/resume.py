"""Where a run begins, and the checkpoints it leaves.

A checkpoint says what made it, in three parts: `training`, which it must share with a run that goes on from it;
`rest`, which a person may change on the way (the length, the code); `layout`, which changes no number of the model but
all that is measured.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megagraph.config import ParallelPlan, RunConfig, UserError
from megagraph.parallel import checkpoint
from megagraph.train.engine import Data
from megagraph.train.training import Training

log = logging.getLogger("megagraph.train")

Resume = Literal["no", "strict", "auto"]
"""Start afresh; go on from the newest checkpoint or refuse; go on if it is of this very run and that has stopped."""
Identity = dict[str, dict[str, Any]]

_ROOMS = ("attention", "graph", "model", "parallel", "train")
"""The source that numbers of a training depend on; not the commit, which changes with a config or a figure."""
_SAVING = {"checkpoint_every", "checkpoint_steps", "keep_checkpoints"}
_CHANGEABLE = {"epochs", "warmup_epochs", "end_lr", "eval_every"}
_HOW = {"accumulate", "prefetch"}
_NO_LAYOUT = {"world_size", "nodes", "plan", "memory_limit_gb", "microbatches", "timeout_seconds"}


@dataclass(frozen=True)
class Start:
    """The beginning of a run: what it is, and the checkpoints it goes on from (the last of them), if any."""

    identity: Identity
    checkpoints: tuple[Path, ...] = ()
    same_layout: bool = True


def choose_start(run: RunConfig, plan: ParallelPlan, data: Data, folder: Path, resume: Resume) -> Start:
    """How a run begins, decided by rank 0 for all, because ranks may see a shared disk at different times.

    Raises `UserError` on every rank if `resume` is strict and the newest checkpoint is of another training.
    """
    decided: list[Start | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            decided = [decide(run.id, identify(run, plan, data), folder, resume)]
        except UserError as error:
            decided = [str(error)]
    dist.broadcast_object_list(decided, src=0)
    (start,) = decided
    if not isinstance(start, Start):
        raise UserError(str(start))
    return start


def identify(run: RunConfig, plan: ParallelPlan, data: Data) -> Identity:
    """What makes a run the run it is, as JSON: its settings, the graph itself, the code, the layout."""
    kept = run.model_dump(mode="json", include={"dataset", "coarsening", "split", "sampling", "model"})
    train = run.train.model_dump(mode="json", exclude=_SAVING | _HOW)
    layout = run.parallel.model_dump(mode="json", exclude=_NO_LAYOUT)
    return {
        "training": {
            **kept,
            "train": {key: value for key, value in train.items() if key not in _CHANGEABLE},
            "graph": _digest_of_graph(data),
        },
        "rest": {
            "train": {key: train[key] for key in sorted(_CHANGEABLE)},
            "code": _digest_of_code(),
            "torch": torch.__version__,
        },
        "layout": {
            **layout,
            "device": run.device,
            "plan": plan.model_dump(mode="json"),
            "train": run.train.model_dump(mode="json", include=_HOW),
        },
    }


def decide(name: str, identity: Identity, folder: Path, resume: Resume) -> Start:
    """How run `name` begins, given the checkpoints in `folder`; a line tells of it.

    Raises `UserError` if `resume` is strict and the newest is of another training.
    """
    existing = checkpoint.checkpoints(folder) if resume != "no" else []
    if not existing:
        if resume == "strict":
            log.info("%s: no complete checkpoint in %s: starts afresh", name, folder)
        return Start(identity)
    newest = existing[-1]
    saved: Identity = checkpoint.progress_of(newest).get("identity", {})
    if resume == "strict" and (differing := _differing(saved, identity, ["training"])):
        raise UserError(
            f"{newest} was trained with other settings of {', '.join(differing)}: "
            f"restore them, remove the checkpoint, or train into another folder"
        )
    if resume == "auto" and checkpoint.is_finished(newest):
        log.info("%s: starts afresh: the run that left %s has finished", name, newest)
        return Start(identity)
    if resume == "auto" and (differing := _differing(saved, identity, list(identity))):
        log.info("%s: starts afresh: %s was trained with other settings of %s", name, newest, ", ".join(differing))
        return Start(identity)
    log.info("%s: goes on from %s", name, newest)
    return Start(identity, tuple(existing), not _differing(saved, identity, ["layout"]))


def _differing(saved: Identity, identity: Identity, parts: list[str]) -> list[str]:
    """Names of the settings in which two identities differ, dotted and sorted."""
    before = {key: value for part in parts for key, value in _flat(saved.get(part, {})).items()}
    now = {key: value for part in parts for key, value in _flat(identity[part]).items()}
    missing = object()
    return sorted(key for key in {*before, *now} if before.get(key, missing) != now.get(key, missing))


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return flat


def _digest_of_graph(data: Data) -> str:
    """A short hash of what training reads of the graph and its coarsening: the same name may come to mean another."""
    graph, coarse = data.graph, data.coarsening
    arrays = [graph.indptr, graph.indices, graph.features_VF, graph.labels_V, *(graph.public_split or ())]
    arrays += [coarse.membership_V, coarse.features_SF, coarse.indptr, coarse.indices, coarse.weights]
    total = hashlib.sha256()
    for array in arrays:
        total.update(repr((array.dtype.str, array.shape)).encode())
        total.update(np.ascontiguousarray(array).reshape(-1).data)
    return total.hexdigest()[:16]


def _digest_of_code() -> str:
    """A short hash of the source files that training runs."""
    total = hashlib.sha256()
    for path in sorted(path for room in _ROOMS for path in (Path(__file__).parents[1] / room).glob("*.py")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:16]


@dataclass
class Saver:
    """Saves the checkpoints of one run, and keeps the last of them."""

    folder: Path
    start: Start
    every_steps: int | None
    keep: int
    _own: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._own = list(self.start.checkpoints)

    def due(self, training: Training) -> bool:
        """Whether this is one of every so many steps of the run."""
        epoch, step = training.progress.position
        return self.every_steps is not None and (epoch * training.num_steps + step) % self.every_steps == 0

    def after_step(self, training: Training) -> None:
        """Save within an epoch, where it is due."""
        if self.due(training):
            self.save(training)

    def save(self, training: Training) -> None:
        """Save now; checkpoints that are not of this run go, and all but the last of its own."""
        engine, state = training.engine, {"identity": self.start.identity, **training.state()}
        older = self._own[max(0, len(self._own) - self.keep + 1) :]
        path = checkpoint.save(
            self.folder, training.progress.position, engine.model, engine.optimizer, state, keep=older
        )
        self._own = [*older, path]
