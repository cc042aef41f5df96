"""An epoch of training on a real graph: our path against ANS-GT's, in time, memory and accuracy.

    MEGAGRAPH_MIRROR=/data/graphs python benchmarks/epoch.py --out epoch.json
    MEGAGRAPH_MIRROR=/data/graphs python benchmarks/epoch.py --accuracy --seeds 3 --out accuracy.json

Default: Cora, 16 layers, 8 heads, width 64, 4 bias channels, 1024 centres a step, one sequence a centre, one thread.
Three paths train the same model, one epoch of each in turn, so that a busy machine is busy for all of them:

- `tiled`: what `megagraph train` does: sequences drawn afresh in every epoch, tiled attention.
- `dense`: `attention: dense` with `sampling.compat: ansgt`, its sequences drawn once and kept, as ANS-GT keeps them.
- `ansgt`: the same, and attention and dropout as ANS-GT writes them: a linear layer over [B, N, N, M] in each layer,
  torch's own dropout, the features of every token projected, all rows in the last layer.

All three take even steps of at most `--batch` centres; ANS-GT takes full ones and a rest, so that its peak is higher.
An epoch is drawing or collating, steps and optimiser, without evaluation. Peak memory is live tensor storages;
sequences that a baseline keeps are in `stored_bytes` instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shipped import StoredSequences, ship

from megagraph.config import CoarseningConfig, DatasetConfig, PlantedConfig, PublicConfig, RunConfig
from megagraph.files import git_commit
from megagraph.graph.coarsen import coarsen
from megagraph.graph.datasets import make_graph
from megagraph.graph.store import Graph
from megagraph.parallel.mesh import make_mesh, process_group
from megagraph.profile.profiler import device_name
from megagraph.train.engine import Data
from megagraph.train.progress import MEMORY_EPOCHS
from megagraph.train.trainer import Training, resolve_plan

PATHS = ("tiled", "dense", "ansgt")
TARGETS = {"seconds": 0.5, "peak_bytes": 0.35, "accuracy_points": -1.0}
"""At most half the time and 0.35 of the memory, at most one percentage point less accurate."""


def run_config(options: argparse.Namespace, path: str, seed: int) -> RunConfig:
    """The run of a path: only attention, sampling and what an evaluation sees differ."""
    baseline = path != "tiled"
    sampling = {"compat": "ansgt", "eval_samples": 1} if baseline else {"eval_samples": options.eval_samples}
    model = {"layers": options.layers, "heads": options.heads, "hidden": options.hidden, "ffn": options.ffn}
    return RunConfig.model_validate(
        {
            "id": path,
            "dataset": options.source,
            "split": {"seed": seed},
            "sampling": {"num_sampled": options.sampled, "samples": 1, **sampling},
            "model": {**model, "bias_channels": options.channels},
            "train": {
                "batch": options.batch,
                "epochs": options.epochs,
                "seed": seed,
                "prefetch": options.prefetch,
                "accumulate": 1 if baseline else options.accumulate,
            },
            "parallel": {"attention": "dense" if baseline else "tiled", "plan": {"layers": [options.layers]}},
        }
    )


def start(options: argparse.Namespace, graph: Graph, path: str, seed: int) -> Training:
    """A path, ready to train; ANS-GT coarsens by another method."""
    coarsening = CoarseningConfig() if path == "tiled" else CoarseningConfig(method="algebraic_jc")
    data = Data(graph, coarsen(graph, coarsening))
    run = run_config(options, path, seed)
    plan, _ = resolve_plan(run, None)
    training = Training(run, data, make_mesh(plan, "cpu", 300.0))
    if path != "tiled":
        training.engine.builder = StoredSequences(training.engine.builder, graph.num_nodes)  # type: ignore[assignment]
    if path == "ansgt":
        ship(training.engine)
    return training


def timed_epoch(training: Training, epoch: int) -> tuple[float, float]:
    """Wall and CPU seconds of one epoch."""
    begin, cpu = time.perf_counter(), time.process_time()
    training.epoch(epoch)
    return time.perf_counter() - begin, time.process_time() - cpu


def measure_epochs(options: argparse.Namespace, graph: Graph) -> dict[str, Any]:
    """Seconds and peak bytes of every path, epochs in turn."""
    trainings = {path: start(options, graph, path, 0) for path in options.paths}
    for training in trainings.values():
        for epoch in range(1, MEMORY_EPOCHS + 1):
            training.progress.epochs.append(training.epoch(epoch))
    walls: dict[str, list[float]] = {path: [] for path in trainings}
    cpus: dict[str, list[float]] = {path: [] for path in trainings}
    for training in trainings.values():
        training.loader.waited = 0.0
    for repeat in range(options.repeats):
        for path, training in trainings.items():
            wall, cpu = timed_epoch(training, MEMORY_EPOCHS + 1 + repeat)
            walls[path].append(wall)
            cpus[path].append(cpu)
    rows = [describe(path, trainings[path], walls[path], cpus[path]) for path in trainings]
    return {"rows": rows, "ratios": ratios(rows)}


def describe(path: str, training: Training, walls: list[float], cpus: list[float]) -> dict[str, Any]:
    """One row: what was trained, how, and what it took."""
    engine, run = training.engine, training.run
    stored = engine.builder.bytes if isinstance(engine.builder, StoredSequences) else 0
    return {
        "path": path,
        "attention": run.parallel.attention,
        "compat": run.sampling.compat,
        "batch": training.capacity,
        "accumulate": run.train.accumulate,
        "steps_per_epoch": -(-len(training.train_nodes) // training.capacity),
        "tokens": engine.layout.num_tokens,
        "samples": run.sampling.samples,
        "seconds": statistics.median(walls),
        "seconds_all": walls,
        "cpu_seconds": statistics.median(cpus),
        "cpu_seconds_all": cpus,
        "data_wait_seconds": training.loader.waited / len(walls),
        "peak_bytes": training.memory.bytes,
        "memory_source": training.memory.source,
        "stored_bytes": stored,
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ours over each baseline; times are medians over epochs of the same round, so that a slow minute cancels."""
    by_path = {row["path"]: row for row in rows}
    ours = by_path.pop("tiled", None)
    if ours is None:
        return {}
    return {
        path: {
            **{name: paired(ours[f"{name}_all"], row[f"{name}_all"]) for name in ("seconds", "cpu_seconds")},
            "peak_bytes": ours["peak_bytes"] / row["peak_bytes"],
        }
        for path, row in by_path.items()
    }


def paired(ours: list[float], theirs: list[float]) -> float:
    """Median ratio of measurements made in turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def measure_accuracy(options: argparse.Namespace, graph: Graph) -> dict[str, Any]:
    """Test accuracy at the epoch of best validation accuracy, for several seeds of split, weights and sampling."""
    rows = []
    for seed in range(options.seeds):
        for path in options.paths:
            training = start(options, graph, path, seed)
            best = (-1.0, 0.0, 0)
            begin = time.perf_counter()
            for epoch in range(1, options.epochs + 1):
                training.epoch(epoch)
                if epoch % options.eval_every == 0 or epoch == options.epochs:
                    val, test = training.accuracies()
                    best = max(best, (val, test, epoch), key=lambda one: one[0])
                if epoch < options.epochs:
                    training.adapt(epoch)
            row = {"path": path, "seed": seed, "val_accuracy": best[0], "test_accuracy": best[1], "epoch": best[2]}
            rows.append(row | {"epochs": options.epochs, "seconds": time.perf_counter() - begin})
            print(json.dumps(rows[-1]), flush=True)
    means = {
        path: statistics.mean(row["test_accuracy"] for row in rows if row["path"] == path) for path in options.paths
    }
    points = {
        path: {"accuracy_points": 100 * (means["tiled"] - mean)}
        for path, mean in means.items()
        if "tiled" in means and path != "tiled"
    }
    return {"rows": rows, "mean_test_accuracy": means, "ratios": points}


def dataset(options: argparse.Namespace) -> DatasetConfig:
    """The public graph asked for, or a planted one."""
    if options.source == "planted":
        return PlantedConfig(source="planted", nodes=options.nodes, communities=7)
    return PublicConfig(source=options.source)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", choices=["cora", "citeseer", "planted"], default="cora")
    parser.add_argument("--nodes", type=int, default=2708, help="of the planted graph")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS)
    for name, value in {"layers": 16, "heads": 8, "hidden": 64, "ffn": 64, "channels": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=1024, help="centres a step, at most; steps of an epoch are even")
    parser.add_argument("--accumulate", type=int, default=4, help="passes of a step on our path")
    parser.add_argument("--sampled", type=int, default=14, help="sampled nodes of a sequence")
    parser.add_argument("--repeats", type=int, default=5, help="timed epochs of each path")
    parser.add_argument("--prefetch", action="store_true", help="make sequences in a second thread")
    parser.add_argument("--accuracy", action="store_true", help="train to the end instead of timing epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=2)
    parser.add_argument("--eval-samples", type=int, default=4, help="sequences a node in our evaluation")
    return parser.parse_args()


def main() -> None:
    """Measure and write one JSON."""
    options = arguments()
    torch.set_num_threads(1)
    mirror = os.environ.get("MEGAGRAPH_MIRROR")
    with tempfile.TemporaryDirectory() as scratch:
        graph, _ = make_graph(options.source, dataset(options), Path(scratch), Path(mirror) if mirror else None)
    with process_group(1, "cpu", 300.0):
        result = (measure_accuracy if options.accuracy else measure_epochs)(options, graph)
    configuration = {name: value for name, value in vars(options).items() if name != "out"}
    where = {"device": device_name("cpu"), "threads": 1, "torch": torch.__version__, "commit": git_commit()}
    layout = {"layout": "pp1 cp1 dp1", "dtype": "float32", "num_nodes": graph.num_nodes, "num_edges": graph.num_edges}
    body = {"benchmark": "epoch", "config": {**configuration, **layout}, "where": where, "targets": TARGETS, **result}
    options.out.write_text(json.dumps(body, indent=1) + "\n")
    for row in result["rows"]:
        print(json.dumps(row))
    print(json.dumps(result["ratios"]))


if __name__ == "__main__":
    main()
