"""The plan search: CPU seconds to find the best plan and prove it, by ranks W and layers L, and of an exact frontier.

    python benchmarks/search.py --out search.json
    python benchmarks/search.py --ranks 4 --layers 8 --problems 2 --frontiers 1 --out search.json

Random problems with a fixed seed for each (W, L): batch 16 to 256, K all powers of two up to the batch, 127 to 1023
regular tokens, 12 to 80 GB a rank, GPipe and 1F1B, recompute in every other one. The prices are invented, of the order
of a fast device, so only relations count. One process, one thread, `time.process_time`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from megagraph.artifacts import CostModel, Workload
from megagraph.config_search import SearchConfig
from megagraph.search.cost import PARTS
from megagraph.search.depth import Depth
from megagraph.search.memory import PRIOR
from megagraph.search.plan import frontier
from megagraph.search.solver import Solver
from megagraph.search.space import num_partitions
from megagraph.search.tables import Limit, Problem

RANKS, LAYERS = (4, 8, 64, 1024), (24, 32, 64, 128)
DEGREES = (1, 2, 4, 8, 16)
FLOPS, MEMORY_RATE, LINK_RATE = 9e12, 1.5e12, 2e10
LAUNCH = 6e-5
TARGETS = {"few_ranks": 8, "few_ranks_seconds": 0.05, "seconds": 3.0, "frontier_seconds": 1.0}


def random_workload(rng: np.random.Generator, layers: int) -> Workload:
    hidden = int(rng.choice([64, 128]))
    return Workload(
        batch=int(rng.choice([16, 64, 256])),
        num_regular=int(rng.choice([127, 255, 1023])),
        num_super=4,
        num_readout=1,
        layers=layers,
        heads=int(rng.choice([8, 32])),
        hidden=hidden,
        ffn=hidden,
        bias_channels=4,
        global_tokens=1,
        num_features=int(rng.choice([100, 500, 8000])),
        num_classes=10,
    )


def part_laws(w: Workload, cp: int) -> dict[str, tuple[float, float]]:
    """Fixed seconds and seconds per sequence of each part: multiply-adds, moved bytes and a ring over cp ranks."""
    d, local = w.hidden, -(-w.num_regular // cp) + w.num_super
    block = local * local * (4 * d + 2 * w.bias_channels * w.heads) / FLOPS
    passes = (cp - 1) * max(block, 8 * local * d / LINK_RATE)
    layer = local * (8 * d * d + 4 * d * w.ffn) / FLOPS + block + passes
    embed = local * (24 * d + 16 * w.num_tokens * w.bias_channels) / MEMORY_RATE
    head = 2 * d * w.num_classes / FLOPS
    forward = {"layer": (LAUNCH * cp, layer), "embed": (2 * LAUNCH, embed), "head": (LAUNCH, head)}
    factor = {"forward": 1.0, "backward": 2.0}
    return {
        part: tuple(factor[direction] * value for value in forward[kind])
        for part, kind, direction in ((part, *part.split("_")) for part in PARTS)
    }


def random_problem(rng: np.random.Generator, ranks: int, layers: int, recompute: bool) -> Problem:
    w = random_workload(rng, layers)
    compute = {
        str(cp): {
            f"{part}_{name}": law[i]
            for part, law in part_laws(w, cp).items()
            for i, name in enumerate(("fixed", "slope"))
        }
        for cp in DEGREES
    }
    compute["update"] = {"fixed": 1e-4, "layer": 2e-5, "parameter": 1e-11}
    rate = float(rng.choice([2e9, 1e10, 1e11]))
    reduce = {f"all_reduce/{size}": ((1e3, 4e-5 * size), (1e9, 2e9 / rate)) for size in (2, 4, 8)}
    rows = float(rng.choice([1e4, 2e5, 2e6]))
    cost = CostModel(
        device="invented",
        world_size=ranks,
        workload=w,
        memory={**PRIOR, "constant": 3e8, "table_rows": rows, "eager_gradients": 0.0},
        compute=compute,
        comm={"p2p": ((1e3, 2e-5), (1e9, 1e9 / LINK_RATE)), **reduce},
        depth=Depth("hinge", 8.0, 1.68).stored(),
        quality={},
        valid={},
    )
    counts = tuple(2**power for power in range(w.batch.bit_length()) if 2**power <= min(w.batch, 64))
    limit = float(rng.choice([12e9, 24e9, 80e9]))
    return Problem(w, ranks, limit, counts, cost, SearchConfig(), recompute)


def measure(ranks: int, layers: int, problems: int) -> dict[str, Any]:
    """One cell of the table: milliseconds of CPU time, size of the space, and how much of it was looked into."""
    rng = np.random.default_rng(1000 * ranks + layers)
    rows = []
    for number in range(problems):
        problem = random_problem(rng, ranks, layers, recompute=number % 2 == 1)
        begin = time.process_time()
        solver = Solver(problem)
        found = solver.best(Limit())
        seconds = time.process_time() - begin
        plans = sum(num_partitions(layers, cell.pp) for cell in solver.cells)
        rows.append((seconds, plans, len(solver.cells), solver.solved, found))
    seconds = np.array([row[0] for row in rows])
    plans = [row[4] for row in rows if row[4] is not None]
    return {
        "ranks": ranks,
        "layers": layers,
        "problems": problems,
        "p50_ms": 1e3 * float(np.median(seconds)),
        "p90_ms": 1e3 * float(np.percentile(seconds, 90)),
        "max_ms": 1e3 * float(seconds.max()),
        "plans_median": float(np.median([float(row[1]) for row in rows])),
        "cells_median": float(np.median([row[2] for row in rows])),
        "solved_median": float(np.median([row[3] for row in rows])),
        "infeasible": problems - len(plans),
        "pipelines": sum(plan.cell.pp > 1 for plan in plans),
        "one_f_one_b": sum(plan.cell.schedule == "1f1b" for plan in plans),
        "proven": sum(plan.gap == 0.0 for plan in plans),
        "max_gap": max((plan.gap for plan in plans), default=0.0),
    }


def measure_frontier(ranks: int, layers: int, problems: int) -> dict[str, Any]:
    """Exact frontiers: CPU milliseconds and points."""
    rng = np.random.default_rng(7000 * ranks + layers)
    milliseconds, points, complete = [], [], 0
    for number in range(problems):
        problem = random_problem(rng, ranks, layers, recompute=number % 2 == 1)
        begin = time.process_time()
        found, whole = frontier(Solver(problem))
        milliseconds.append(1e3 * (time.process_time() - begin))
        points.append(len(found))
        complete += whole
    sizes = {"ranks": ranks, "layers": layers, "problems": problems, "complete": complete, "max_points": max(points)}
    return {**sizes, "p50_ms": float(np.median(milliseconds)), "max_ms": max(milliseconds)}


def verdict(rows: list[dict[str, Any]], frontiers: list[dict[str, Any]]) -> dict[str, bool]:
    """Which of the targets are met."""
    few = [row for row in rows if row["ranks"] <= TARGETS["few_ranks"]]
    return {
        "few_ranks": all(row["max_ms"] < 1e3 * TARGETS["few_ranks_seconds"] for row in few),
        "all": all(row["max_ms"] < 1e3 * TARGETS["seconds"] for row in rows),
        "frontier": all(row["max_ms"] < 1e3 * TARGETS["frontier_seconds"] for row in frontiers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--frontiers", type=int, default=6, help="problems of each frontier (W up to 8, L up to 32)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for ranks in arguments.ranks:
        for layers in arguments.layers:
            rows.append(measure(ranks, layers, arguments.problems))
            print(json.dumps(rows[-1]), flush=True)
    small = [(w, layers) for w in arguments.ranks if w <= 8 for layers in arguments.layers if layers <= 32]
    frontiers = [measure_frontier(*sizes, arguments.frontiers) for sizes in small if arguments.frontiers]
    body = {"searches": rows, "frontiers": frontiers, "targets": TARGETS, "met": verdict(rows, frontiers)}
    arguments.out.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
