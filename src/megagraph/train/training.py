"""The state of a run on one rank: engine, node sets, learned shares, meters, finished epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megagraph.attention.dropout import fold
from megagraph.config import RunConfig, UserError
from megagraph.graph.adaptive import Bandit
from megagraph.graph.splits import split
from megagraph.parallel import checkpoint
from megagraph.parallel.mesh import Mesh
from megagraph.parallel.shard import pass_capacity
from megagraph.parallel.stage import Microbatch
from megagraph.train.adaptive import heuristic_rewards
from megagraph.train.engine import Data, Engine, EngineConfig
from megagraph.train.evaluate import accuracies, even_capacity
from megagraph.train.loader import Loader
from megagraph.train.meters import PeakMemory
from megagraph.train.progress import MEMORY_EPOCHS, Epoch, Progress
from megagraph.train.schedule import epoch_order, learning_rate

Facts = dict[str, Any]


class Training:
    """The state of a run on one rank: engine, node sets, finished epochs, meters."""

    def __init__(self, run: RunConfig, data: Data, mesh: Mesh) -> None:
        self.run = run
        self.mesh = mesh
        settings = run.train
        config = replace(
            EngineConfig.of(run.workload, settings.seed),
            peak_lr=settings.peak_lr,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
        )
        self.engine = Engine(config, data, mesh)
        self.labels_V = data.graph.labels_V
        self.train_nodes, self.val_nodes, self.test_nodes = split(data.graph, run.split)
        self.capacity = even_capacity(len(self.train_nodes), settings.batch)
        self.pass_capacity = pass_capacity(self.capacity, settings.accumulate, run.sampling.seeds)
        self.progress = Progress()
        self.memory = PeakMemory(mesh.device, self.engine.tensors())
        self.loader: Loader[list[Microbatch]] = Loader(settings.prefetch)
        configured_H = np.array(list(run.sampling.heuristics.values()), np.float64)
        self.bandit = Bandit.start(run.sampling.adaptive, configured_H)
        self._draw()
        self._own_seconds = 0.0
        self._peak_before = 0

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, the same in every layout."""
        return -(-len(self.train_nodes) // self.capacity)

    def epoch(self, epoch: int, after_step: Callable[[], None] = lambda: None) -> Epoch:
        """One pass over the training centres, or what is left of it; its row is the same on every rank.

        Args:
            epoch: 1-based, the one after the finished epochs of `progress`.
            after_step: called after each step but the last, when `progress` has it: the place for a checkpoint.
        """
        run, progress = self.run, self.progress
        rate = learning_rate(run.train, epoch)
        begin = time.perf_counter()
        self.engine.set_lr(rate)
        chunks, steps = self._steps(epoch)
        first = len(progress.losses)
        metered = epoch < progress.start + MEMORY_EPOCHS
        ended = epoch == run.train.epochs or self._adapts_after(epoch)
        following = None if ended else self._steps(epoch + 1)[1][0][0]
        passes = map(self._hold, self.loader.run([make for makers in steps[first:] for make in makers], following))
        for step in range(first, len(chunks)):
            with self.memory if metered else nullcontext():
                loss = self._step(islice(passes, len(steps[step])), len(chunks[step]), epoch, step)
            seconds = time.perf_counter() - begin
            progress.add_step(loss, seconds)
            self._own_seconds += seconds
            if step + 1 < len(chunks):
                after_step()
            begin = time.perf_counter()
        return progress.close_epoch(rate)

    def _steps(self, epoch: int) -> tuple[list[NDArray[np.int64]], list[list[Callable[[], list[Microbatch]]]]]:
        """The centres of each step of an epoch, and what makes the passes of each."""
        run = self.run
        order = epoch_order(self.train_nodes, run.train.seed, epoch)
        chunks = [order[start : start + self.capacity] for start in range(0, len(order), self.capacity)]
        keys = [fold(run.train.seed, epoch, step) for step in range(len(chunks))]
        samples = run.sampling.samples
        makers = [
            self.engine.step_makers(centres, self.capacity, epoch, samples, key)
            for centres, key in zip(chunks, keys, strict=True)
        ]
        return chunks, makers

    def _adapts_after(self, epoch: int) -> bool:
        """Whether shares are learned after an epoch: what is made before would be drawn by the old ones."""
        return self.run.sampling.adapts and epoch % self.run.sampling.adaptive_period == 0

    def _hold(self, parts: list[Microbatch]) -> list[Microbatch]:
        self.memory.hold(tensor for part in parts for tensor in part.tensors())
        return parts

    def _step(self, passes: Iterator[list[Microbatch]], num_centres: int, epoch: int, step: int) -> float:
        run = self.run
        loss = self.engine.train_step(passes, float(num_centres * run.sampling.samples))
        dist.all_reduce(loss)
        if not math.isfinite(value := loss.item()):
            raise UserError(
                f"loss is {value} at epoch {epoch} step {step + 1}: "
                f"lower train.peak_lr={run.train.peak_lr} or lengthen the warm-up"
            )
        return value

    def accuracies(self) -> tuple[float, float]:
        """Validation and test accuracy now; sequences per step stay those of a training pass."""
        sampling = self.run.sampling
        most = max(1, self.pass_capacity * sampling.samples // sampling.eval_samples)
        val, test = accuracies(self.engine, [self.val_nodes, self.test_nodes], self.labels_V, most)
        return val, test

    def adapt(self, epoch: int) -> None:
        """Learn the shares of the heuristics, if this is an epoch for it; the next draws are made with them."""
        sampling = self.run.sampling
        if not self._adapts_after(epoch):
            return
        most = max(1, self.pass_capacity * sampling.samples // sampling.eval_samples)
        self.bandit.update(heuristic_rewards(self.engine, self.val_nodes, self.bandit.shares_H, most))
        self._draw()

    def _draw(self) -> None:
        """Give the builder the present shares."""
        if self.run.sampling.adapts:
            self.engine.builder.adapt(self.bandit.shares_H, self.bandit.updates)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold beside model and optimiser, JSON-able; every rank takes part."""
        return {
            "progress": self.progress.dump(),
            "sampling": self.bandit.dump(),
            "peak_bytes": _gather(self.peak_bytes),
        }

    def restore(self, path: Path, same_layout: bool) -> None:
        """Go on from a checkpoint; what was measured under another layout is not carried on."""
        state = checkpoint.load(path, self.engine.model, self.engine.optimizer)
        self.progress = Progress.load(state["progress"])
        self.progress.restart(same_layout)
        self.bandit.load(state["sampling"])
        self._draw()
        self.memory = PeakMemory(self.mesh.device, self.engine.tensors())
        self._peak_before = state["peak_bytes"][self.mesh.rank] if same_layout else 0

    @property
    def peak_bytes(self) -> int:
        """Peak memory of this rank so far."""
        return max(self.memory.bytes, self._peak_before)

    def facts(self) -> Facts:
        """What the summary says beside accuracies."""
        run, engine = self.run, self.engine
        return {
            "sequences_per_step": -(-self.capacity // run.sampling.seeds) * run.sampling.samples,
            "num_tokens": engine.layout.num_tokens,
            "samples_per_node": run.sampling.samples,
            "attention": self.engine.shard.attention_path,
            "num_parameters": engine.num_parameters(),
            **run.train.model_dump(include={"accumulate", "dtype", "autocast"}),
            "peak_bytes": _gather(self.peak_bytes),
            "memory_source": self.memory.source,
            "heuristic_shares": dict(zip(engine.builder.source.names, engine.builder.weights_H.tolist(), strict=True)),
            "data_seconds_fraction": self.loader.waited / self._own_seconds if self._own_seconds else 0.0,
        }


def _gather(number: int) -> tuple[int, ...]:
    """The number of every rank, in rank order."""
    numbers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return tuple(numbers)
