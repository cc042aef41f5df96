"""The state of a run on one rank: engine, node sets, learned shares, meters, finished epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

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
from megagraph.train.progress import Epoch, Progress
from megagraph.train.schedule import epoch_order, learning_rate

SAME_TRAINING = {"seed", "batch", "peak_lr", "weight_decay", "clip_norm", "dtype", "autocast"}
Facts = dict[str, Any]


class Training:
    """The state of a run on one rank: engine, node sets, finished epochs, meters."""

    def __init__(self, run: RunConfig, data: Data, mesh: Mesh) -> None:
        self.run = run
        self.mesh = mesh
        settings = run.train
        config = EngineConfig(
            model=run.model,
            sampling=run.sampling,
            attention=run.parallel.attention,
            dtype=settings.dtype,
            seed=settings.seed,
            peak_lr=settings.peak_lr,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
            exchange=run.parallel.exchange,
            backend=run.parallel.backend,
            node_table=run.parallel.node_table,
            autocast=settings.autocast,
            accumulate=settings.accumulate,
        )
        self.engine = Engine(config, data, mesh)
        self.labels_V = data.graph.labels_V
        self.train_nodes, self.val_nodes, self.test_nodes = split(data.graph, run.split)
        self.capacity = even_capacity(len(self.train_nodes), settings.batch)
        self.pass_capacity = pass_capacity(self.capacity, settings.accumulate, run.sampling.seeds)
        self.progress = Progress()
        self.memory = PeakMemory(mesh.device, self.engine.tensors())
        self.loader = Loader(settings.prefetch)
        configured_H = np.array(list(run.sampling.heuristics.values()), np.float64)
        self.bandit = Bandit.start(run.sampling.adaptive, configured_H)
        self._draw()
        self._epoch_seconds = 0.0

    def epoch(self, epoch: int) -> Epoch:
        """One pass over the training centres; the loss is the mean over its steps, the same on every rank."""
        run, begin = self.run, time.perf_counter()
        rate = learning_rate(run.train, epoch)
        self.engine.set_lr(rate)
        order = epoch_order(self.train_nodes, run.train.seed, epoch)
        chunks = [order[start : start + self.capacity] for start in range(0, len(order), self.capacity)]
        samples = run.sampling.samples
        steps = [
            self.engine.step_makers(centres, self.capacity, epoch, samples, fold(run.train.seed, epoch, step))
            for step, centres in enumerate(chunks)
        ]
        passes = map(self._hold, self.loader.run([make for makers in steps for make in makers]))
        losses = [
            self._step(islice(passes, len(makers)), len(centres), epoch, step)
            for step, (makers, centres) in enumerate(zip(steps, chunks, strict=True))
        ]
        seconds = time.perf_counter() - begin
        self._epoch_seconds += seconds
        return Epoch(epoch, sum(losses) / len(losses), seconds, rate)

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
        if not sampling.adapts or epoch % sampling.adaptive_period:
            return
        most = max(1, self.pass_capacity * sampling.samples // sampling.eval_samples)
        self.bandit.update(heuristic_rewards(self.engine, self.val_nodes, self.bandit.shares_H, most))
        self._draw()

    def _draw(self) -> None:
        """Give the builder the present shares."""
        if self.run.sampling.adapts:
            self.engine.builder.adapt(self.bandit.shares_H, self.bandit.updates)

    def restore(self, folder: Path) -> None:
        """Go on from the newest checkpoint, if there is one."""
        existing = checkpoint.checkpoints(folder)
        if not existing:
            return
        state = checkpoint.load(existing[-1], self.engine.model, self.engine.optimizer)
        known = {"autocast": "none", **state["identity"]}  # a checkpoint from before that key
        differing = [key for key, value in identity(self.run).items() if known.get(key) != value]
        if differing:
            raise UserError(
                f"{existing[-1]} was trained with other settings of {', '.join(differing)}: "
                f"restore them, or train into another folder"
            )
        self.progress = Progress.load(state["epochs"])
        if "sampling" in state:
            self.bandit.load(state["sampling"])
            self._draw()

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
            "peak_bytes": _gather(self.memory.bytes),
            "memory_source": self.memory.source,
            "heuristic_shares": dict(zip(engine.builder.source.names, engine.builder.weights_H.tolist(), strict=True)),
            "data_seconds_fraction": self.loader.waited / self._epoch_seconds if self._epoch_seconds else 0.0,
        }


def identity(run: RunConfig) -> dict[str, Any]:
    """Settings that make two runs the same training, whatever layout, device or length they have."""
    kept = run.model_dump(mode="json", include={"dataset", "coarsening", "split", "sampling", "model"})
    return kept | run.train.model_dump(mode="json", include=SAME_TRAINING)


def _gather(number: int) -> tuple[int, ...]:
    """The number of every rank, in rank order."""
    numbers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return tuple(numbers)
