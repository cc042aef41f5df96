"""The data path at scale: load a planted graph, coarsen it, get the sampler ready, build ego sequences.

One measured process per size; the graph is made and written by another process before, so that only the data path is
in the peak. ``python benchmarks/data_path.py --nodes 2450000 --out results/data_path.json``; `--sizes` for growth.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megagraph.config import CoarseningConfig, PlantedConfig, SamplingConfig

COMMUNITIES, DEGREE, FEATURES = 47, 49.0, 100
SAMPLED, CHANNELS, CHUNK = 14, 4, 512


def main() -> None:
    """Run the benchmark at every size and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_450_000], help="nodes of the planted graphs")
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=1, help="sequences per centre")
    parser.add_argument("--epsilon", type=float, default=1e-3, help="sampling.ppr_epsilon")
    parser.add_argument("--method", default="partition", help="coarsening.method")
    parser.add_argument("--ratio", type=float, default=0.1, help="coarsening.ratio")
    parser.add_argument(
        "--kaminpar-above", type=int, default=20_000_000, help="coarsening.kaminpar_above; 0 for growth"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, required=True, help="folder for the graphs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=["make", "measure"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage == "make":
        make(arguments)
    elif arguments.stage == "measure":
        print(json.dumps(measure(arguments)))
    else:
        drive(arguments)


def drive(arguments: argparse.Namespace) -> None:
    """One child per stage and size; the fitted exponents of seconds and memory in edges."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for size in arguments.sizes:
        if not graph_path(arguments.work, size).exists():
            child(size, "make")
        rows.append(json.loads(child(size, "measure").strip().splitlines()[-1]))
        print(json.dumps(rows[-1], indent=1), file=sys.stderr, flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {"runs": rows}
        if len(rows) > 1:
            result["exponent_in_edges"] = {name: exponent(rows, name) for name in ("linear_cpu_seconds", "peak_bytes")}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def child(size: int, stage: str) -> str:
    """Run this file again for one stage of one size; its standard output."""
    command = [sys.executable, __file__, *sys.argv[1:], "--sizes", str(size), "--stage", stage]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def exponent(rows: list[dict[str, Any]], name: str) -> float:
    """Slope of log(value) over log(edges) by least squares."""
    edges = np.log([row["num_edges"] for row in rows])
    return float(np.polyfit(edges, np.log([row[name] for row in rows]), 1)[0])


def graph_path(work: Path, size: int) -> Path:
    return work / f"planted-{size}.safetensors"


def make(arguments: argparse.Namespace) -> None:
    """Generate and write the graph of the first size."""
    from megagraph.graph.planted import planted
    from megagraph.graph.store import save_graph

    size = arguments.sizes[0]
    shape = {"communities": COMMUNITIES, "average_degree": DEGREE, "features": FEATURES}
    save_graph(
        planted("planted", PlantedConfig(source="planted", nodes=size, **shape)), graph_path(arguments.work, size)
    )


class Stages:
    """Wall and CPU seconds and the peak so far of named stages."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        """A stage is over; the next begins."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.rows[name] = {"seconds": wall - self._wall, "cpu_seconds": cpu - self._cpu, "peak_bytes": peak_bytes()}
        self._wall, self._cpu = time.perf_counter(), time.process_time()


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load, coarsen, prepare and build at the first size; the first chunk, which compiles, is a stage of its own."""
    from megagraph.graph.batch import EgoBuilder
    from megagraph.graph.coarsen import coarsen
    from megagraph.graph.store import load_graph

    stages = Stages()
    graph = load_graph(graph_path(arguments.work, arguments.sizes[0]))
    stages.end("load")
    coarsening = coarsen(
        graph, CoarseningConfig(method=arguments.method, ratio=arguments.ratio, kaminpar_above=arguments.kaminpar_above)
    )
    stages.end("coarsen")
    sampling = SamplingConfig(num_sampled=SAMPLED, powers="induced", ppr_epsilon=arguments.epsilon)
    builder = EgoBuilder(graph, coarsening, sampling, bias_channels=CHANNELS, global_tokens=1, seed=0)
    stages.end("sampler_ready")
    num_centres = min(arguments.sequences // arguments.samples, graph.num_nodes)
    centres = np.random.default_rng(0).permutation(graph.num_nodes)[: num_centres + 8]
    builder.build(centres[num_centres:], stream=0, samples=1)
    stages.end("first_batch")
    chunk = max(1, CHUNK // arguments.samples)
    chunks = [centres[start : min(start + chunk, num_centres)] for start in range(0, num_centres, chunk)]

    def build(chosen: np.ndarray) -> int:
        return len(builder.build(chosen, stream=1, samples=arguments.samples).nodes_B)

    with ThreadPoolExecutor(arguments.threads) as pool:
        built = sum(pool.map(build, chunks))
    stages.end("build")
    rows = stages.rows
    return {
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "num_super": coarsening.num_super,
        "sequences": built,
        "sequences_per_second": built / rows["build"]["seconds"],
        "sequences_per_cpu_second": built / rows["build"]["cpu_seconds"],
        "linear_cpu_seconds": sum(rows[name]["cpu_seconds"] for name in ("load", "coarsen", "sampler_ready")),
        "peak_bytes": peak_bytes(),
        "stages": rows,
        "settings": {
            "num_regular": 1 + SAMPLED,
            "bias_channels": CHANNELS,
            "powers": "induced",
            "samples": arguments.samples,
            "ppr_epsilon": arguments.epsilon,
            "coarsening": arguments.method,
            "ratio": arguments.ratio,
            "threads": arguments.threads,
        },
    }


if __name__ == "__main__":
    main()
