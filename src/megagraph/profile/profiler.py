"""What `megagraph profile` runs: a hardware profile, a shard of the validation grid, or a set of plans."""

from __future__ import annotations

import itertools
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megagraph.artifacts import HardwareProfile, Provenance
from megagraph.artifacts_search import Candidate, SearchResult
from megagraph.config import ModelConfig, ParallelPlan, SamplingConfig, UserError, WorkloadConfig
from megagraph.files import git_commit, write_csv
from megagraph.graph.sizes import GraphSizes
from megagraph.parallel.mesh import process_group, started_rank
from megagraph.profile.bench import Bench, workload_of
from megagraph.profile.comm import comm_rows
from megagraph.profile.compute import compute_rows
from megagraph.profile.memory import memory_rows
from megagraph.profile.predict import predict_rank
from megagraph.train.engine import Data, load_data
from megagraph.train.meters import timing
from megagraph.train.progress import watched


def device_name(device: str) -> str:
    """What the numbers were measured on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu {platform.machine()} {os.cpu_count()} cores"


def profile_workload(config: WorkloadConfig, data: Path, out: Path) -> None:
    """Measure compute, communication and memory on the ranks of the run; rank 0 writes `out`."""
    world_size = config.parallel.world_size
    loaded = _start(config, data)
    with process_group(world_size, config.device, config.parallel.timeout_seconds):
        memory, source = memory_rows(config, loaded, world_size)
        compute = compute_rows(config, loaded, world_size)
        comm = comm_rows(config, world_size)
        plan = ParallelPlan(dp=world_size, layers=(config.model.layers,))
        engine = Bench.build(config, loaded, plan, world_size).engine
        if dist.get_rank() == 0:
            HardwareProfile(
                device=device_name(config.device),
                world_size=world_size,
                warmup=config.profile.warmup,
                workload=workload_of(config, loaded, engine),
                compute=tuple(compute),
                comm=tuple(comm),
                memory=tuple(memory),
                memory_source=source,
                provenance=Provenance.collect(torch.__version__, config.device, torch.get_num_threads()),
            ).save(out)
        dist.barrier()


def profile_grid(
    config: WorkloadConfig, data: Path, out: Path, shard: tuple[int, int], *, heldout: bool = False
) -> None:
    """Measure every n-th cell of the validation grid, or of the held-out one, on one rank: whole model, one
    micro-batch, a full step."""
    name = "heldout" if heldout else "grid"
    grid = config.profile.heldout if heldout else config.profile.grid
    if grid is None:
        raise UserError(f"workload {config.id} has no profile.{name}: add one to the config")
    index, count = shard
    cells = list(itertools.product(grid.batch, grid.layers, grid.heads, grid.hidden))[index::count]
    supers = 1 + config.sampling.num_super + config.model.global_tokens
    if grid.tokens <= supers:
        raise UserError(
            f"profile.{name}.tokens={grid.tokens} leaves no regular node beside {supers} super nodes: raise it"
        )
    loaded = _start(config, data)
    sampling = config.sampling.model_copy(update={"num_sampled": grid.tokens - supers - 1, "samples": 1})
    rows = []
    with process_group(1, config.device, config.parallel.timeout_seconds):
        for batch, layers, heads, hidden in watched(cells, "grid cell"):
            shape = {"layers": layers, "heads": heads, "hidden": hidden, "ffn": hidden}
            model = config.model.model_copy(update=shape)
            rows.append(_cell(config, loaded, batch, model, sampling))
    write_csv(out, rows)


def _cell(
    config: WorkloadConfig, data: Data, batch: int, model: ModelConfig, sampling: SamplingConfig
) -> dict[str, Any]:
    profile = config.profile
    cell = config.model_copy(update={"model": model, "sampling": sampling})
    bench = Bench.build(cell, data, ParallelPlan(layers=(model.layers,)), batch)
    peak, source = bench.peak()
    steps = timing(bench.steps(profile.warmup, profile.repeats))
    forward, backward = map(timing, bench.passes(profile.warmup, profile.repeats))
    layout = bench.engine.layout
    return {
        "batch": batch,
        "layers": model.layers,
        "heads": model.heads,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "num_regular": layout.num_regular,
        "num_super": layout.num_super,
        "bias_channels": model.bias_channels,
        "num_features": data.graph.num_features,
        "num_classes": data.graph.num_classes,
        "peak_bytes": peak,
        "forward_seconds": forward.median,
        "backward_seconds": backward.median,
        "step_seconds": steps.median,
        "step_iqr": steps.iqr,
        "repeats": steps.repeats,
        "memory_source": source,
        **_where(config),
    }


def profile_plans(config: WorkloadConfig, data: Path, out: Path, search: Path) -> None:
    """Measure step time and memory of some plans of a search result; rank 0 writes `out`."""
    result = SearchResult.load(search)
    if result.estimated_from:
        raise UserError(f"{search}: estimated from {result.estimated_from}: search with a cost model of this device")
    chosen = choose_plans(result, config.profile.measured_plans)
    loaded = _start(config, data)
    sizes = GraphSizes.read(data, config.coarsening)
    # Before the job is joined: a process is in one group at a time.
    fake = [predict_rank(config, sizes, one.plan, started_rank()).peak_bytes for one in chosen]
    with process_group(config.parallel.world_size, config.device, config.parallel.timeout_seconds):
        rows = [_plan(config, loaded, *pair) for pair in watched(list(zip(chosen, fake, strict=True)), "plan")]
        if dist.get_rank() == 0:
            write_csv(out, rows)
        dist.barrier()


def choose_plans(result: SearchResult, most: int) -> list[Candidate]:
    """The pick, the fastest of every strategy, the frontier, then evenly through the ranking; at most `most`."""
    ranked = sorted(result.candidates, key=lambda one: one.step_seconds)
    first_of = {one.strategy: one for one in reversed(ranked)}
    spread = [ranked[index * (len(ranked) - 1) // max(1, most - 1)] for index in range(most)] if ranked else []
    ordered = [result.best, *sorted(first_of.values(), key=lambda one: one.step_seconds), *result.frontier, *spread]
    unique = {one.plan.label: one for one in reversed(ordered)}
    return [unique[label] for label in dict.fromkeys(one.plan.label for one in ordered)][:most]


def _plan(config: WorkloadConfig, data: Data, candidate: Candidate, fake: int) -> dict[str, Any]:
    plan = candidate.plan
    bench = Bench.build(config, data, plan, max(1, config.batch // config.sampling.samples))
    peak, _ = bench.peak()
    seconds = timing(bench.steps(config.profile.warmup, config.profile.measured_steps))
    everyone: list[tuple[int, int]] = [(0, 0)] * plan.world_size
    dist.all_gather_object(everyone, (peak, fake))
    peaks, fakes = zip(*everyone, strict=True)
    return {
        "strategy": candidate.strategy,
        "label": plan.label,
        "pp": plan.pp,
        "cp": plan.cp,
        "dp": plan.dp,
        "layers": ";".join(map(str, plan.layers)),
        "microbatches": plan.microbatches,
        "step_seconds": seconds.median,
        "step_iqr": seconds.iqr,
        "repeats": seconds.repeats,
        "peak_bytes": max(peaks),
        "peak_bytes_by_rank": ";".join(map(str, peaks)),
        "predicted_seconds": candidate.step_seconds,
        "predicted_bytes": candidate.peak_bytes,
        "fake_bytes": max(fakes),
        "status": "ok",
        "world_size": plan.world_size,
        "cores": os.cpu_count(),
        **_where(config),
    }


def _where(config: WorkloadConfig) -> dict[str, Any]:
    return {"device": device_name(config.device), "threads": torch.get_num_threads(), "commit": git_commit()}


def _start(config: WorkloadConfig, data: Path) -> Data:
    if config.device == "cpu":
        torch.set_num_threads(1)
    return load_data(data, config.coarsening)
