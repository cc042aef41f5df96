"""Two ranks against one on the same global step: data, context and pipeline parallelism, in time and memory.

    python benchmarks/layouts.py --out layouts.json
    python benchmarks/layouts.py --cases cp2 --tokens 2048 --rounds 5 --out cp2.json

Two processes of one thread, each on a core of its own; in every round one takes the steps alone, then each takes the
steps of one rank with no link between them (apart), then both take them as two ranks (together), so that a busy minute
hits all three. A round begins with an engine made anew and a warm-up step. The graph is planted and the micro-batches
are made before: a step is forward, backward, exchange and optimiser.

`dp2` and `pp2`: `--batch` short sequences (ego). `cp2`: one long sequence (union) of `--tokens` tokens, of which the
super nodes and the global token are on both ranks. `speedup` is seconds of one rank over seconds of two, the median of
the rounds; `machine` is how much more work two processes apart do than the one alone in the same time: two cores that
share caches and memory allow no more, whatever connects them; `memory` is the peak of the fuller of two ranks over
the peak of the one. `cpu_seconds` are process time of the busier rank: what a step takes if waiting costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from megagraph.config import CoarseningConfig, ParallelPlan, PlantedConfig, WorkloadConfig
from megagraph.files import git_commit
from megagraph.graph.coarsen import coarsen
from megagraph.graph.planted import planted
from megagraph.parallel.mesh import process_group
from megagraph.profile.bench import Bench
from megagraph.profile.profiler import device_name
from megagraph.train.engine import Data

CASES = ("dp2", "cp2", "pp2")
# Of each round: how many processes work, and how many ranks a plan of theirs has.
SETTINGS = {"alone": (1, 1), "apart": (2, 1), "together": (2, 2)}
TARGETS = {"dp2": {"speedup": 1.85}, "cp2": {"speedup": 1.7, "memory": 0.6}, "pp2": {}}
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
TIMEOUT = 1800.0


def layers_of(options: argparse.Namespace, case: str) -> int:
    """Depth of the model of a case."""
    return int(options.cp_layers if case == "cp2" else options.layers)


def plan_of(options: argparse.Namespace, case: str, ranks: int) -> ParallelPlan:
    """The plan of a case on one rank or two."""
    layers = layers_of(options, case)
    if ranks == 1:
        return ParallelPlan(layers=(layers,))
    if case == "pp2":
        return ParallelPlan(pp=2, layers=(layers - layers // 2, layers // 2), microbatches=options.microbatches)
    return ParallelPlan(dp=2, layers=(layers,)) if case == "dp2" else ParallelPlan(cp=2, layers=(layers,))


def workload(options: argparse.Namespace, case: str, ranks: int) -> WorkloadConfig:
    """What a case runs, complete."""
    sampling: dict[str, Any] = {"powers": "induced", "num_sampled": options.sampled}
    if case == "cp2":
        regular = options.tokens - options.supers - 1
        union = {"builder": "union", "seeds_per_sequence": regular, "super_set": "top"}
        sampling |= {**union, "num_sampled": 0, "num_super": options.supers}
    model = {
        "layers": layers_of(options, case),
        "heads": options.heads,
        "hidden": options.hidden,
        "ffn": options.hidden,
    }
    return WorkloadConfig.model_validate(
        {
            "id": case,
            "dataset": "planted",
            "coarsening": "default",
            "device": "cpu",
            "sampling": sampling,
            "model": {**model, "bias_channels": options.channels},
            "parallel": {
                "world_size": ranks,
                "plan": plan_of(options, case, ranks).model_dump(),
                "timeout_seconds": TIMEOUT,
            },
            "profile": {},
            "batch": 1 if case == "cp2" else options.batch,
            "dtype": "float32",
        }
    )


def measure(config: WorkloadConfig, plan: ParallelPlan, data: Data, steps: int) -> dict[str, Any]:
    """Steps of a plan on this rank, in the process group of its ranks: seconds, CPU seconds, peak bytes, sizes."""
    with process_group(config.parallel.world_size, "cpu", TIMEOUT):
        bench = Bench.build(config, data, plan, config.batch)
        peak, source = bench.peak()
        walls, cpus = [], []
        for _ in range(steps):
            begin = time.process_time()
            walls.append(bench.step())
            cpus.append(time.process_time() - begin)
        dist.barrier()
        layout = bench.engine.layout
        return {
            "seconds": statistics.median(walls),
            "cpu_seconds": statistics.median(cpus),
            "peak_bytes": peak,
            "memory_source": source,
            "tokens": layout.num_tokens,
            "super_tokens": layout.num_super,
            "local_tokens": bench.engine.shard.num_local,
            "attention": bench.engine.shard.attention_path,
            "layout": plan.label,
        }


def planted_data(options: argparse.Namespace) -> Data:
    """The graph of all cases."""
    shape = {"communities": 10, "average_degree": options.degree, "features": options.features}
    graph = planted("planted", PlantedConfig(source="planted", nodes=options.nodes, **shape))
    return Data(graph, coarsen(graph, CoarseningConfig(ratio=0.1)))


def rank_main(rank: int, options: argparse.Namespace, data: Data, ports: list[int], barrier: Any, results: Any) -> None:
    """What a process does: the settings in turn, for every case and round; its number is its rank."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    together = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for case in options.cases:
        for number in range(options.rounds):
            for setting, (processes, ranks) in SETTINGS.items():
                for name in LAUNCHER:
                    os.environ.pop(name, None)
                if ranks == 2:
                    # A store of its own in each round: the last one's still knows addresses that are gone.
                    os.environ.update(together, MASTER_PORT=str(ports.pop()))
                barrier.wait()
                if rank < processes:
                    plan = plan_of(options, case, ranks)
                    measured = measure(workload(options, case, ranks), plan, data, options.steps)
                    results.put({"case": case, "round": number, "setting": setting, "rank": rank, **measured})
                barrier.wait()


def free_ports(count: int) -> list[int]:
    """Distinct ports that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def collect(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per case, round, setting and process; an error of a process is raised here."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    ports = free_ports(options.rounds * len(options.cases))
    arguments = (options, planted_data(options), ports, barrier, results)
    ranks = multiprocessing.spawn(rank_main, arguments, nprocs=2, join=False)
    rows: list[dict[str, Any]] = []
    expected = sum(processes for processes, _ in SETTINGS.values()) * options.rounds * len(options.cases)
    while len(rows) < expected and not ranks.join(timeout=0.2):
        while not results.empty():
            rows.append(results.get())
    while len(rows) < expected:
        rows.append(results.get(timeout=30))
    while not ranks.join(timeout=30):
        pass
    order, settings = options.cases.index, list(SETTINGS).index
    return sorted(rows, key=lambda row: (order(row["case"]), row["round"], settings(row["setting"]), row["rank"]))


def summarise(options: argparse.Namespace, case: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A case: its shape and its ratios."""

    def worst(setting: str, name: str) -> list[float]:
        return [
            max(row[name] for row in rows if (row["round"], row["setting"]) == (number, setting))
            for number in range(options.rounds)
        ]

    def ratio(over: str, under: str, name: str = "seconds") -> float:
        return statistics.median(one / two for one, two in zip(worst(over, name), worst(under, name), strict=True))

    first = [row for row in rows if row["setting"] == "together" and row["round"] == 0]
    two = first[0]
    config = workload(options, case, 2)
    return {
        "case": case,
        "batch": config.batch,
        "samples": 1,
        **{name: two[name] for name in ("tokens", "super_tokens", "attention", "layout", "memory_source")},
        "layers": config.model.layers,
        "local_tokens": [row["local_tokens"] for row in first],
        "seconds_one": statistics.median(worst("alone", "seconds")),
        "seconds_two": statistics.median(worst("together", "seconds")),
        "speedup": ratio("alone", "together"),
        "machine": 2 * ratio("alone", "apart"),
        "cpu_speedup": ratio("alone", "together", "cpu_seconds"),
        "peak_bytes_one": worst("alone", "peak_bytes")[0],
        "peak_bytes_two": [row["peak_bytes"] for row in first],
        "memory": worst("together", "peak_bytes")[0] / worst("alone", "peak_bytes")[0],
        "target": TARGETS[case],
        "rounds": rows,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=3, help="the three settings in turn, this often")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a round; the median counts")
    parser.add_argument("--batch", type=int, default=1024, help="sequences of a step of dp2 and pp2")
    parser.add_argument("--microbatches", type=int, default=8, help="of pp2")
    parser.add_argument("--sampled", type=int, default=14, help="sampled nodes of a short sequence")
    parser.add_argument("--tokens", type=int, default=4096, help="N of cp2")
    parser.add_argument("--supers", type=int, default=32, help="super nodes of cp2's sequence")
    parser.add_argument("--layers", type=int, default=8, help="of dp2 and pp2")
    parser.add_argument("--cp-layers", type=int, default=2)
    for name, value in {"heads": 8, "hidden": 64, "channels": 4, "features": 64, "nodes": 8000}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--degree", type=float, default=10.0)
    return parser.parse_args()


def main() -> None:
    """Measure and write one JSON."""
    options = arguments()
    rows = collect(options)
    cases = [summarise(options, case, [row for row in rows if row["case"] == case]) for case in options.cases]
    config = {name: value for name, value in vars(options).items() if name != "out"}
    cores = sorted(os.sched_getaffinity(0))
    where = {"device": device_name("cpu"), "threads": 1, "cores": cores[:2], "torch": torch.__version__}
    body = {
        "benchmark": "layouts",
        "config": {**config, "dtype": "float32"},
        "where": {**where, "commit": git_commit()},
    }
    options.out.write_text(json.dumps({**body, "cases": cases}, indent=1) + "\n")
    for case in cases:
        print(
            f"{case['case']}  {case['layout']}  B {case['batch']} N {case['tokens']}  {case['seconds_one']:.3f} s -> "
            f"{case['seconds_two']:.3f} s  speedup {case['speedup']:.2f} (machine {case['machine']:.2f}, "
            f"CPU {case['cpu_speedup']:.2f})  memory {case['memory']:.2f}"
        )


if __name__ == "__main__":
    main()
