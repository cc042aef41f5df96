"""Attention, forward and backward with the gradient of the bias projection: CPU seconds and peak memory of every path.

    python benchmarks/attention.py --out attention.json
    python benchmarks/attention.py --shapes 1x1024 --paths tiled-dense sdpa --repeats 3 --out attention.json

Every (path, shape) runs in a fresh process on one thread. `growth_bytes` is the rise of the resident set over the first
run (VmHWM, reset through clear_refs; libraries loaded at first use are in it, the inputs are not), `live_bytes` the
peak of live tensor storages above the inputs, `cpu_seconds` the median process time of the later runs. A shape is BxN.

Shapes: B sequences, N tokens, M bias channels, H heads, D features per head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megagraph.attention.bias import DenseBias
from megagraph.attention.codes import CodeBias
from megagraph.attention.short import SHORT
from megagraph.attention.slot import tiled_attention
from megagraph.attention.sparse import SparseBias
from megagraph.train.meters import LiveBytes

HEADS, HEAD_DIM, CHANNELS = 8, 8, 4
SHAPES = ("1x1024", "1x2048", "1x4096", "1x8192", "1024x40")
NUM_CODES, NONZEROS_PER_ROW = 8, 64
MATERIALISED_LIMIT = 1 << 31
"""Paths that keep [B, H, N, N] are left out where it has more bytes than this."""

Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def naive(channels_BMNN: Tensor) -> Run:
    """Materialised scores, per-head bias and probabilities."""

    def run(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor) -> Tensor:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        return (scores + project(weight_HM, channels_BMNN)).softmax(-1) @ v

    return run


def project(weight_HM: Tensor, channels_BMNN: Tensor) -> Tensor:
    """Bias per head [B, H, N, N]."""
    batch, _, rows, columns = channels_BMNN.shape
    return (weight_HM @ channels_BMNN.flatten(2)).view(batch, -1, rows, columns)


def sdpa(_: Tensor) -> Run:
    """The library's attention without any bias: the reference of speed."""
    return lambda q, k, v, weight_HM: scaled_dot_product_attention(q, k, v) + 0 * weight_HM.sum()


def sdpa_mask(channels_BMNN: Tensor) -> Run:
    """The library's attention with the learned bias as its mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=project(weight_HM, channels_BMNN))

    return run


def tiled_dense(channels_BMNN: Tensor) -> Run:
    """Row tiles over dense channels; the store is new in every run, so that nothing cached in it flatters the time."""
    return lambda q, k, v, weight_HM: tiled_attention(DenseBias.full(channels_BMNN, 0))(q, k, v, weight_HM, None)


def short_dense(channels_BMNN: Tensor) -> Run:
    """What a CPU does by itself (`backend: auto`): compiled loops over short sequences, tiles over longer ones."""
    return lambda q, k, v, weight_HM: tiled_attention(DenseBias.full(channels_BMNN, 0), SHORT)(q, k, v, weight_HM, None)


def tiled_code(channels_BMNN: Tensor) -> Run:
    """Row tiles over one byte per pair; 8 codes at random."""
    batch, channels, tokens, _ = channels_BMNN.shape
    codes = torch.randint(0, NUM_CODES, (batch, tokens, tokens), dtype=torch.uint8)
    store = CodeBias.full(codes, torch.rand(NUM_CODES, channels), 0)
    return lambda q, k, v, weight_HM: tiled_attention(store)(q, k, v, weight_HM, None)


def tiled_sparse(channels_BMNN: Tensor) -> Run:
    """Row tiles over non-zeros; 64 of each row at random, a tenth of it where that is less."""
    batch, channels, tokens, _ = channels_BMNN.shape
    per_row = min(NONZEROS_PER_ROW, max(1, tokens // 10))
    starts = torch.arange(batch * tokens + 1) * per_row
    columns = torch.cat([torch.randperm(tokens)[:per_row].sort().values for _ in range(batch * tokens)])
    store = SparseBias.from_csr(starts, columns, torch.rand(channels, len(columns)), (batch, tokens, tokens), 0)
    return lambda q, k, v, weight_HM: tiled_attention(store)(q, k, v, weight_HM, None)


PATHS: dict[str, Callable[[Tensor], Run]] = {
    "naive": naive,
    "sdpa": sdpa,
    "sdpa-mask": sdpa_mask,
    "tiled-dense": tiled_dense,
    "short-dense": short_dense,
    "tiled-code": tiled_code,
    "tiled-sparse": tiled_sparse,
}
MATERIALISING = ("naive", "sdpa-mask")


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(path: str, batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """One path at one shape, in this process."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    channels = torch.rand(batch, CHANNELS, tokens, tokens, generator=generator)
    size = batch, HEADS, tokens, HEAD_DIM
    q, k, v, dout = (torch.randn(size, generator=generator) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v, torch.randn(HEADS, CHANNELS, generator=generator))]
    run = PATHS[path](channels)

    def step() -> None:
        torch.autograd.grad(run(*inputs), inputs, dout)

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    growth = resident("VmHWM") - before
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    with LiveBytes() as live:
        live.track([*inputs, channels, dout])
        held = live.current
        step()
    return {
        "path": path,
        "batch": batch,
        "tokens": tokens,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "channels": CHANNELS,
        "dtype": "float32",
        "threads": 1,
        "repeats": repeats,
        "cpu_seconds": statistics.median(seconds),
        "cpu_seconds_all": seconds,
        "growth_bytes": growth,
        "live_bytes": live.peak - held,
    }


def fresh(path: str, batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--case", path, str(batch), str(tokens), str(repeats)]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """CPU seconds of each row over those of the naive path and of SDPA without bias, at the same shape."""
    for reference in ("naive", "sdpa"):
        seconds = {(r["batch"], r["tokens"]): r["cpu_seconds"] for r in rows if r["path"] == reference}
        for row in rows:
            base = seconds.get((row["batch"], row["tokens"]))
            row[f"times_{reference}"] = None if base is None else row["cpu_seconds"] / base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="BxN")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=list(PATHS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        path, batch, tokens, repeats = options.case
        print(json.dumps(measure(path, int(batch), int(tokens), int(repeats))))
        return
    rows = []
    for shape in options.shapes:
        batch, tokens = map(int, shape.split("x"))
        materialised = batch * HEADS * tokens**2 * 4 > MATERIALISED_LIMIT
        rows += [
            fresh(path, batch, tokens, options.repeats)
            for path in options.paths
            if not (materialised and path in MATERIALISING)
        ]
    add_ratios(rows)
    for row in rows:
        ratios = "  ".join(f"{key} {row[key]:.2f}" for key in ("times_naive", "times_sdpa") if row[key] is not None)
        shape = f"{row['batch']}x{row['tokens']}"
        print(
            f"{row['path']:12} {shape:>8}  {row['cpu_seconds']:7.3f} s  growth {row['growth_bytes'] / 1e6:7.1f} MB  "
            f"live {row['live_bytes'] / 1e6:7.1f} MB  {ratios}"
        )
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
