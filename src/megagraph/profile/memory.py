"""Peak bytes of pipeline stages of several sizes, to fit the memory model on."""

from __future__ import annotations

import torch.distributed as dist

from megagraph.artifacts import MemoryRow
from megagraph.config import ParallelPlan, WorkloadConfig
from megagraph.profile.bench import Bench
from megagraph.profile.compute import degrees
from megagraph.train.engine import Data
from megagraph.train.progress import watched


def memory_rows(config: WorkloadConfig, data: Data, world_size: int) -> tuple[list[MemoryRow], str]:
    """Measured peaks of all ranks of several plans, and how bytes were counted."""
    rows: dict[tuple[int | bool, ...], MemoryRow] = {}
    source = ""
    for plan in watched(_plans(config, world_size), "memory of plan"):
        for sequences in config.profile.microbatch_sizes[-2:]:
            per_replica = max(plan.microbatches, sequences // config.sampling.samples)
            model = config.model.model_copy(update={"layers": sum(plan.layers)})
            bench = Bench.build(config, data, plan, per_replica * plan.dp, model)
            peak, source = bench.peak()
            for row in _everyone(bench, plan, peak):
                key = (row.first, row.last, row.layers, row.cp, row.microbatches, row.sequences)
                if key not in rows or rows[key].peak_bytes < row.peak_bytes:
                    rows[key] = row
    return list(rows.values()), source


def _plans(config: WorkloadConfig, world_size: int) -> list[ParallelPlan]:
    """Whole models of two depths for each cp degree and micro-batch count, and uneven two-stage pipelines."""
    plans = [
        ParallelPlan(cp=cp, dp=world_size // cp, layers=(depth,), microbatches=count)
        for cp in degrees(config, world_size)
        for depth in (1, 3)
        for count in (1, 2)
    ]
    if world_size % 2 == 0:
        halves = world_size // 2
        plans += [
            ParallelPlan(pp=2, dp=halves, layers=layers, microbatches=count)
            for layers in ((1, 3), (3, 1))
            for count in (1, 2)
        ]
    return plans


def _everyone(bench: Bench, plan: ParallelPlan, peak: int) -> list[MemoryRow]:
    mesh = bench.mesh
    stage = mesh.index("pp")
    mine = MemoryRow(
        first=mesh.is_first_stage,
        last=mesh.is_last_stage,
        layers=plan.layers[stage],
        cp=plan.cp,
        microbatches=plan.microbatches,
        sequences=len(bench.microbatches) * bench.microbatches[0].ids_BT.shape[0],
        peak_bytes=peak,
    )
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
