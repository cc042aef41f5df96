"""What `gpu_check.py` measures: the cases of each section, made one by one.

A section yields (what the case is, the function that measures it). Shapes: B sequences, N tokens, M bias channels,
H heads, D features per head.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megagraph.attention.backends import choose_kernel
from megagraph.attention.bias import DenseBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.slot import Attend, dense_attention, tiled_attention
from megagraph.config import CoarseningConfig, ParallelPlan, PlantedConfig, RunConfig
from megagraph.graph.coarsen import coarsen
from megagraph.graph.planted import planted
from megagraph.parallel.mesh import make_mesh, process_group
from megagraph.profile.bench import Bench, now, workload_of
from megagraph.search.memory import PRIOR, peak_bytes, stage_of
from megagraph.train.engine import Data
from megagraph.train.meters import PeakMemory
from megagraph.train.trainer import Training, resolve_plan

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest error over the largest value of the truth, which is computed in float64 from the same rounded inputs."""
NAMES = ("out", "dq", "dk", "dv", "dweight")
HEADS, CHANNELS, GLOBAL = 8, 4, 1
DROPOUT = 0.1
Row = dict[str, Any]
Cases = Iterator[tuple[Row, Callable[[], Row]]]


def inputs(batch: int, tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    """q, k, v, the projection [H, M + g] and dout; the channels, zero at the global token."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    channels = torch.rand(batch, CHANNELS, tokens, tokens, generator=generator, device=device)
    channels[..., -GLOBAL:] = 0
    channels[..., -GLOBAL:, :] = 0
    size = batch, HEADS, tokens, head_dim
    return [normal(*size), normal(*size), normal(*size), normal(HEADS, CHANNELS + GLOBAL), normal(*size)], channels


def run(attend: Attend, tensors: list[Tensor], dropout: AttentionDropout | None) -> list[Tensor]:
    """out, dq, dk, dv, dweight."""
    *leaves, dout = [tensor.detach().requires_grad_() for tensor in tensors]
    q, k, v, weight = leaves
    out = attend(q, k, v, weight, dropout)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sdpa(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor, dropout: AttentionDropout | None) -> Tensor:
    """The library's attention without any bias: the reference of speed."""
    return scaled_dot_product_attention(q, k, v) + 0 * weight_HM.sum()


def filled(backend: str, channels: Tensor, head_dim: int) -> Attend:
    """The slot, filled by a backend; raises what the backend raises."""
    if backend == "sdpa":
        return sdpa
    kernel = choose_kernel(backend, channels.device.type, head_dim)
    return tiled_attention(DenseBias.full(channels, GLOBAL), kernel)


def check(backend: str, dtype: str, head_dim: int, rate: float, options: argparse.Namespace) -> Row:
    """One case of `correct`: errors relative to the largest value, and whether all are within the tolerance."""
    batch, tokens, device = 2, options.check_tokens, options.device
    tensors, channels = inputs(batch, tokens, head_dim, getattr(torch, dtype), device)
    places = torch.arange(tokens, device=device)
    dropout = AttentionDropout(rate, 7, places[:batch], places, places) if rate else None
    truth = run(dense_attention(DenseBias.full(channels.double(), GLOBAL)), [t.double() for t in tensors], dropout)
    found = run(filled(backend, channels, head_dim), tensors, dropout)
    pairs = zip(NAMES, found, truth, strict=True)
    errors = {name: ((a.double() - b).abs().max() / b.abs().max()).item() for name, a, b in pairs}
    right = all(error <= TOLERANCE[dtype] for error in errors.values())
    return {"batch": batch, "tokens": tokens, "errors": errors, "tolerance": TOLERANCE[dtype], "ok": right}


def correct(options: argparse.Namespace, backend: str) -> Cases:
    """The cases of one backend."""
    for dtype in TOLERANCE:
        for head_dim in options.head_dims:
            for rate in (0.0, DROPOUT):
                case = {"backend": backend, "dtype": dtype, "head_dim": head_dim, "dropout": rate}
                yield case, partial(check, backend, dtype, head_dim, rate, options)


def clock(backend: str, dtype: str, head_dim: int, tokens: int, options: argparse.Namespace) -> Row:
    """One case of `speed`: the median of repeats after a warm-up, forward alone and with backward."""
    device = torch.device(options.device)
    tensors, channels = inputs(1, tokens, head_dim, getattr(torch, dtype), options.device)
    attend = filled(backend, channels, head_dim)
    q, k, v, weight, _ = tensors
    both, forward = [], []
    run(attend, tensors, None)
    for _ in range(options.repeats):
        begin = now(device)
        with torch.no_grad():
            attend(q, k, v, weight, None)
        middle = now(device)
        run(attend, tensors, None)
        forward.append(middle - begin)
        both.append(now(device) - middle)
    held = [*tensors, channels]
    memory = PeakMemory(device, held)
    with memory:
        run(attend, tensors, None)
    above = memory.bytes - sum(tensor.nbytes for tensor in held)
    return {
        "batch": 1,
        "forward_seconds": statistics.median(forward),
        "seconds": statistics.median(both),
        "seconds_all": both,
        "bytes_above_inputs": above,
        "memory_source": memory.source,
    }


def speed(options: argparse.Namespace, backend: str) -> Cases:
    """The cases of one backend, short sequences first."""
    for tokens in sorted(options.tokens):
        for dtype in TOLERANCE:
            for head_dim in options.head_dims:
                case = {"backend": backend, "tokens": tokens, "dtype": dtype, "head_dim": head_dim}
                yield case, partial(clock, backend, dtype, head_dim, tokens, options)


def paper_run(options: argparse.Namespace, batch: int, layers: int, attention: str) -> RunConfig:
    """The paper's end-to-end shape, or another batch and depth of it."""
    shape = {"layers": layers, "heads": HEADS, "hidden": 8 * HEADS, "ffn": 8 * HEADS, "bias_channels": CHANNELS}
    return RunConfig.model_validate(
        {
            "id": "paper",
            "dataset": "planted",
            "device": options.device,
            "sampling": {"powers": "induced", "num_sampled": 14},
            "model": shape,
            "train": {"batch": batch, "epochs": 10},
            "parallel": {"attention": attention, "plan": {"layers": [layers]}},
        }
    )


def planted_data(options: argparse.Namespace) -> Data:
    graph = planted("planted", PlantedConfig(source="planted", nodes=options.nodes, features=options.features))
    return Data(graph, coarsen(graph, CoarseningConfig(ratio=0.1)))


def train_epoch(options: argparse.Namespace, data: Data, attention: str) -> Row:
    """A warm-up epoch that counts memory, then a timed one."""
    config = paper_run(options, options.batch, options.layers, attention)
    plan, _ = resolve_plan(config, None)
    training = Training(config, data, make_mesh(plan, options.device, 300.0))
    training.progress.epochs.append(training.epoch(1))
    training.loader.waited = 0.0
    row = training.epoch(2)
    return {
        "batch": training.capacity,
        "tokens": training.engine.layout.num_tokens,
        "samples": 1,
        "layers": options.layers,
        "num_nodes": options.nodes,
        "seconds": row.seconds,
        "data_wait_seconds": training.loader.waited,
        "loss": row.loss,
        "peak_bytes": training.memory.bytes,
        "memory_source": training.memory.source,
    }


def epoch(options: argparse.Namespace, _: str) -> Cases:
    """Our path and the materialised one, on one rank."""
    with process_group(1, options.device, 300.0):
        data = planted_data(options)
        for attention in ("tiled", "dense"):
            yield {"attention": attention}, partial(train_epoch, options, data, attention)


def predict(options: argparse.Namespace, data: Data, batch: int, layers: int, attention: str) -> Row:
    """Predicted and allocated bytes of one step."""
    config = paper_run(options, batch, layers, attention).workload
    plan = ParallelPlan(layers=(layers,))
    bench = Bench.build(config, data, plan, batch)
    allocated, source = bench.peak()
    table = bench.engine.builder.features.shape[0]
    stage = stage_of(workload_of(config, data, bench.engine), plan, 0)
    # `constant` and `table_rows` have no expectation: the table's rows are known, the constant is left at zero.
    predicted = peak_bytes({**PRIOR, "table_rows": float(table), "eager_gradients": 0.0}, stage)
    return {
        "tokens": bench.engine.layout.num_tokens,
        "samples": 1,
        "predicted_bytes": predicted,
        "allocated_bytes": allocated,
        "predicted_over_allocated": predicted / allocated,
        "memory_source": source,
    }


def memory(options: argparse.Namespace, _: str) -> Cases:
    """Two batches, two depths, both attentions."""
    with process_group(1, options.device, 300.0):
        data = planted_data(options)
        for attention in ("tiled", "dense"):
            for batch in (max(1, options.batch // 4), options.batch):
                for layers in (max(1, options.layers // 4), options.layers):
                    case = {"attention": attention, "batch": batch, "layers": layers}
                    yield case, partial(predict, options, data, batch, layers, attention)


SECTIONS: dict[str, Callable[[argparse.Namespace, str], Cases]] = {
    "correct": correct,
    "speed": speed,
    "epoch": epoch,
    "memory": memory,
}
