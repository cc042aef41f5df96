"""The training loop: the same for every system that is a graph transformer, on any number of ranks."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megagraph.artifacts import Provenance, RunSummary
from megagraph.artifacts_search import SearchResult
from megagraph.config import ParallelPlan, RunConfig, UserError
from megagraph.files import write_csv
from megagraph.graph.store import load_graph
from megagraph.parallel import checkpoint
from megagraph.parallel.mesh import make_mesh, process_group
from megagraph.train.control import fit_control
from megagraph.train.engine import load_data
from megagraph.train.meters import is_out_of_memory, timing
from megagraph.train.progress import Epoch, Progress, Reporter
from megagraph.train.resume import Resume, Saver, choose_start
from megagraph.train.training import Facts, Training

log = logging.getLogger("megagraph.train")

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


def train(run: RunConfig, data: Path, out: Path, search: Path | None = None, resume: Resume = "no") -> None:
    """Train one run and write `summary.json` and `epochs.csv` to `out`.

    Args:
        run: the complete configuration.
        data: folder of the graph and its coarsening.
        out: folder of the run; checkpoints go to `out/checkpoint`.
        search: the search result, needed where the run's plan is "search".
        resume: whether to go on from the newest checkpoint in `out`, of whatever layout.
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
            for newest in checkpoint.checkpoints(out / "checkpoint")[-1:]:
                checkpoint.mark_finished(newest)
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


def _fit(run: RunConfig, plan: ParallelPlan, data: Path, out: Path, resume: Resume) -> tuple[Progress, Facts]:
    """Train a graph transformer; returns finished epochs and the facts of the summary."""
    settings = run.train
    mesh = make_mesh(plan, run.device, run.parallel.timeout_seconds)
    inputs, folder = load_data(data, run.coarsening), out / "checkpoint"
    start = choose_start(run, plan, inputs, folder, resume)
    training = Training(run, inputs, mesh)
    if start.checkpoints:
        training.restore(start.checkpoints[-1], start.same_layout)
    saver = Saver(folder, start, settings.checkpoint_steps, settings.keep_checkpoints)
    progress = training.progress
    reporter = Reporter(run.id, settings.epochs, progress.done, active=mesh.rank == 0)
    for epoch in range(progress.done + 1, settings.epochs + 1):
        last = epoch == settings.epochs
        row = training.epoch(epoch, partial(saver.after_step, training))
        if last or epoch % settings.eval_every == 0:
            row.val_accuracy, row.test_accuracy = training.accuracies()
        progress.epochs.append(row)
        reporter.tell(row)
        if not last:
            training.adapt(epoch)
        if last or epoch % settings.checkpoint_every == 0 or saver.due(training):
            saver.save(training)
    reporter.close()
    return progress, training.facts()


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
    write_csv(out / "epochs.csv", progress.rows() or [asdict(best)])
    summary.save(out / "summary.json")
    log.info(
        "%s: test %.4f at epoch %d (best validation %.4f)",
        run.id,
        summary.test_accuracy,
        best.epoch,
        summary.val_accuracy,
    )
