"""Seconds of one layer, the embedding and the head, per context-parallel degree and micro-batch size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megagraph.artifacts import ComputeRow, Timing
from megagraph.config import ParallelPlan, WorkloadConfig
from megagraph.profile.bench import Bench, ModuleTimer, now
from megagraph.train.engine import Data
from megagraph.train.meters import timing
from megagraph.train.progress import watched

LAYERS, MIDDLE = 3, "1"
"""The middle layer is measured: the last one computes the read-out rows only."""


def compute_rows(config: WorkloadConfig, data: Data, world_size: int) -> list[ComputeRow]:
    """One row per cp degree (divisors of the world size) and micro-batch size; other ranks run replicas meanwhile."""
    cases = [(cp, sequences) for cp in degrees(config, world_size) for sequences in config.profile.microbatch_sizes]
    return [_measure(config, data, cp, world_size // cp, sequences) for cp, sequences in watched(cases, "compute case")]


def degrees(config: WorkloadConfig, world_size: int) -> list[int]:
    """Context-parallel degrees that the workload can run."""
    if config.parallel.attention != "tiled":
        return [1]
    return [cp for cp in range(1, world_size + 1) if world_size % cp == 0]


def _measure(config: WorkloadConfig, data: Data, cp: int, dp: int, sequences: int) -> ComputeRow:
    model = config.model.model_copy(update={"layers": LAYERS})
    plan = ParallelPlan(cp=cp, dp=dp, layers=(LAYERS,))
    centres = max(1, sequences // config.sampling.samples) * dp
    bench = Bench.build(config, data, plan, centres, model)
    profile = config.profile
    bench.steps(profile.warmup, 1)
    timer = ModuleTimer(bench.mesh.device)
    with timer.watching("layer", bench.engine.model.layers[MIDDLE]):
        for _ in range(profile.repeats):
            bench.step()
    parts = _alone(bench, profile.warmup, profile.repeats)
    return ComputeRow(
        cp=cp,
        sequences=bench.microbatches[0].ids_BT.shape[0],
        local_tokens=bench.engine.shard.num_local,
        layer_forward=slowest(timer.seconds["layer.forward"]),
        layer_backward=slowest(timer.seconds["layer.backward"]),
        **parts,
    )


def _alone(bench: Bench, warmup: int, repeats: int) -> dict[str, Timing]:
    """Embedding and head by themselves: a backward hook of a module without differentiable input fires too early."""
    engine, microbatch = bench.engine, bench.microbatches[0]
    scope, device = microbatch.scope, bench.mesh.device
    embed, head = engine.model.embed, engine.model.head
    assert embed is not None and head is not None, "profiling runs one stage"
    with engine.precision():
        tokens = embed(microbatch.ids_BT, scope).detach().requires_grad_()
    passes: dict[str, Callable[[], Tensor]] = {
        "embed": lambda: embed(microbatch.ids_BT, scope),
        "head": lambda: head(tokens, scope),
    }
    result = {}
    for name, run in passes.items():
        forward, backward = [], []
        for number in range(warmup + repeats):
            dist.barrier()
            begin = now(device)
            with engine.precision():
                out = run()
            middle = now(device)
            out.backward(torch.ones_like(out))
            end = now(device)
            if number >= warmup:
                forward.append(middle - begin)
                backward.append(end - middle)
        result[f"{name}_forward"], result[f"{name}_backward"] = slowest(forward), slowest(backward)
    return result


def slowest(seconds: list[float]) -> Timing:
    """The timing of the rank with the largest median: a step waits for it."""
    mine = timing(seconds)
    everyone: list[Timing] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return max(everyone, key=lambda one: one.median)
