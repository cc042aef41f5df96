"""The training loop: the same for every system that is a graph transformer, on any number of ranks."""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megagraph.artifacts import Provenance, RunSummary, SearchResult
from megagraph.attention.dropout import fold
from megagraph.config import ParallelPlan, RunConfig, UserError
from megagraph.files import write_csv
from megagraph.graph.adaptive import Bandit
from megagraph.graph.splits import split
from megagraph.graph.store import load_graph
from megagraph.parallel import checkpoint
from megagraph.parallel.mesh import Mesh, make_mesh, process_group
from megagraph.parallel.stage import Microbatch
from megagraph.train.adaptive import heuristic_rewards
from megagraph.train.control import fit_control
from megagraph.train.engine import Data, Engine, EngineConfig, load_data
from megagraph.train.evaluate import accuracies, even_capacity
from megagraph.train.loader import Loader
from megagraph.train.meters import PeakMemory, is_out_of_memory, timing
from megagraph.train.progress import MEMORY_EPOCHS, Epoch, Progress, Reporter
from megagraph.train.schedule import epoch_order, learning_rate

log = logging.getLogger("megagraph.train")

SAME_TRAINING = {"seed", "batch", "peak_lr", "weight_decay", "clip_norm", "dtype"}
Facts = dict[str, Any]
OUT_OF_MEMORY: Facts = {
    "sequences_per_step": 0,
    "num_tokens": 0,
    "samples_per_node": 0,
    "attention": "none",
    "num_parameters": 0,
    "peak_bytes": (0,),
    "memory_source": "out of memory",
}
"""The facts of a run that did not fit: nothing was measured."""
PlanSource = Literal["config", "search"]


def train(run: RunConfig, data: Path, out: Path, search: Path | None = None, resume: bool = False) -> None:
    """Train one run and write `summary.json` and `epochs.csv` to `out`.

    Args:
        run: the complete configuration.
        data: folder of the graph and its coarsening.
        out: folder of the run; checkpoints go to `out/checkpoint`.
        search: the search result, needed where the run's plan is "search".
        resume: go on from the newest checkpoint in `out`, of whatever layout.
    """
    if run.device == "cpu":
        torch.set_num_threads(1)
    plan, source = resolve_plan(run, search)
    parallel = run.parallel
    with process_group(plan.world_size, run.device, parallel.timeout_seconds):
        try:
            if run.system == "gcn":
                progress, facts = fit_control(run, load_graph(data / "graph.safetensors"))
            else:
                progress, facts = _fit(run, plan, data, out, resume)
        except RuntimeError as error:
            # Other ranks wait for the one that ran out: only a run of one rank can turn it into a result.
            if plan.world_size > 1 or not is_out_of_memory(error):
                raise
            log.info("%s: out of memory (%s)", run.id, str(error).splitlines()[0])
            progress, facts = Progress(), OUT_OF_MEMORY
        if dist.get_rank() == 0:
            _write(run, plan, source, out, progress, facts)
        dist.barrier()


def resolve_plan(run: RunConfig, search: Path | None) -> tuple[ParallelPlan, PlanSource]:
    """The plan of a run and where it comes from (`config` or `search`)."""
    source: PlanSource
    if isinstance(run.parallel.plan, ParallelPlan):
        plan, source = run.parallel.plan, "config"
    elif run.system == "gcn":
        plan, source = ParallelPlan(layers=(run.model.layers,)), "config"
    elif search is None:
        raise UserError(f"run {run.id} has plan: search: give the search result with --plan, or a plan in the config")
    else:
        plan, source = SearchResult.load(search).best.plan, "search"
    plan.check(run.model.layers)
    return plan, source


def _fit(run: RunConfig, plan: ParallelPlan, data: Path, out: Path, resume: bool) -> tuple[Progress, Facts]:
    """Train a graph transformer; returns finished epochs and the facts of the summary."""
    mesh = make_mesh(plan, run.device, run.parallel.timeout_seconds)
    training = Training(run, load_data(data, run.coarsening), mesh)
    folder = out / "checkpoint"
    if resume:
        training.restore(folder)
    progress = training.progress
    reporter = Reporter(run.id, run.train.epochs, progress.done, active=mesh.rank == 0)
    first = progress.done + 1
    for epoch in range(first, run.train.epochs + 1):
        last = epoch == run.train.epochs
        with training.memory if epoch < first + MEMORY_EPOCHS else nullcontext():
            row = training.epoch(epoch)
        if last or epoch % run.train.eval_every == 0:
            row.val_accuracy, row.test_accuracy = training.accuracies()
        progress.epochs.append(row)
        reporter.tell(row)
        if not last:
            training.adapt(epoch)
        if last or epoch % run.train.checkpoint_every == 0:
            state = {"identity": _identity(run), "epochs": progress.dump(), "sampling": training.bandit.dump()}
            checkpoint.save(folder, epoch, training.engine.model, training.engine.optimizer, state)
    reporter.close()
    return progress, training.facts()


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
        )
        self.engine = Engine(config, data, mesh)
        self.labels_V = data.graph.labels_V
        self.train_nodes, self.val_nodes, self.test_nodes = split(data.graph, run.split)
        self.capacity = even_capacity(len(self.train_nodes), settings.batch)
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
        makers = [
            partial(
                self.engine.microbatches,
                centres,
                self.capacity,
                epoch,
                run.sampling.samples,
                fold(run.train.seed, epoch, step),
            )
            for step, centres in enumerate(chunks)
        ]
        losses = [
            self._step(parts, len(centres), epoch, step)
            for step, (parts, centres) in enumerate(zip(self.loader.run(makers), chunks, strict=True))
        ]
        seconds = time.perf_counter() - begin
        self._epoch_seconds += seconds
        return Epoch(epoch, sum(losses) / len(losses), seconds, rate)

    def _step(self, parts: list[Microbatch], num_centres: int, epoch: int, step: int) -> float:
        run = self.run
        self.memory.hold(tensor for part in parts for tensor in part.tensors())
        loss = self.engine.train_step(parts, float(num_centres * run.sampling.samples))
        dist.all_reduce(loss)
        if not math.isfinite(value := loss.item()):
            raise UserError(
                f"loss is {value} at epoch {epoch} step {step + 1}: "
                f"lower train.peak_lr={run.train.peak_lr} or lengthen the warm-up"
            )
        return value

    def accuracies(self) -> tuple[float, float]:
        """Validation and test accuracy now; sequences per step stay those of training."""
        sampling = self.run.sampling
        most = max(1, self.capacity * sampling.samples // sampling.eval_samples)
        val, test = accuracies(self.engine, [self.val_nodes, self.test_nodes], self.labels_V, most)
        return val, test

    def adapt(self, epoch: int) -> None:
        """Learn the shares of the heuristics, if this is an epoch for it; the next draws are made with them."""
        sampling = self.run.sampling
        if not sampling.adapts or epoch % sampling.adaptive_period:
            return
        most = max(1, self.capacity * sampling.samples // sampling.eval_samples)
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
        differing = [key for key, value in _identity(self.run).items() if state["identity"].get(key) != value]
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
            "peak_bytes": _gather(self.memory.bytes),
            "memory_source": self.memory.source,
            "heuristic_shares": dict(zip(engine.builder.source.names, engine.builder.weights_H.tolist(), strict=True)),
            "data_seconds_fraction": self.loader.waited / self._epoch_seconds if self._epoch_seconds else 0.0,
        }


def _identity(run: RunConfig) -> dict[str, Any]:
    """Settings that make two runs the same training, whatever layout, device or length they have."""
    kept = run.model_dump(mode="json", include={"dataset", "coarsening", "split", "sampling", "model"})
    return kept | run.train.model_dump(mode="json", include=SAME_TRAINING)


def _gather(number: int) -> tuple[int, ...]:
    """The number of every rank, in rank order."""
    numbers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return tuple(numbers)


def _write(run: RunConfig, plan: ParallelPlan, source: PlanSource, out: Path, progress: Progress, facts: Facts) -> None:
    done = progress.evaluated
    best = progress.best if done else Epoch(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    last = progress.epochs[-1] if done else best
    summary = RunSummary(
        run=run.id,
        system=run.system,
        dataset=run.dataset,
        status="ok" if done else "oom",
        split=run.split,
        plan=plan,
        plan_source=source,
        epochs=last.epoch,
        best_epoch=best.epoch,
        val_accuracy=best.val_accuracy or 0.0,
        test_accuracy=best.test_accuracy or 0.0,
        final_test_accuracy=last.test_accuracy or 0.0,
        seconds_per_epoch=timing(progress.steady_seconds() or [0.0]),
        provenance=Provenance.collect(torch.__version__, run.device, torch.get_num_threads()),
        **facts,
    )
    write_csv(out / "epochs.csv", progress.dump() or [asdict(best)])
    summary.save(out / "summary.json")
    log.info(
        "%s: test %.4f at epoch %d (best validation %.4f)",
        run.id,
        summary.test_accuracy,
        best.epoch,
        summary.val_accuracy,
    )
