"""How honest the cost model is on this machine: errors of cells, data sets and plans that it was not fitted to.

    python benchmarks/cost_model.py --out cost_model.json
    python benchmarks/cost_model.py --ranks 2 --repeats 9 --out two_ranks.json

For each number of ranks: profile a planted graph, fit the cost model to the profile and to a grid of whole models,
then predict a second grid (other depths, widths and batches), the profile of another graph with other features, and
the plans of a search, which are then measured. The grids are measured once, on one rank. Every step is a verb of the
command line. A quality is of predictions of points without a part in the fit, unless its name ends in `_in_sample`;
`targets` says which hold. `margin` is planned over predicted memory, `exceeded_percent` the share of points whose
measured peak is above the planned one, `false_feasible_percent` that of wrong answers "it fits".
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagraph import cli
from megagraph.artifacts import CostModel
from megagraph.artifacts_quality import Quality
from megagraph.config import RunConfig
from megagraph.files import git_commit, read_json
from megagraph.profile.profiler import device_name
from megagraph.search.quality import assess

TARGETS = {
    "heldout_memory": {"mape_percent": 3.0, "r2": 0.995, "false_feasible_percent": 0.0},
    "heldout_latency": {"mape_percent": 10.0, "r2": 0.97},
}
AT_LEAST = ("r2",)


def verb(*words: Any, ranks: int = 1) -> None:
    """Run a verb on so many ranks of one thread: one is this process."""
    command = list(map(str, words))
    if ranks == 1:
        if cli.main(command):
            raise SystemExit(f"megagraph {command[0]} failed, see above")
    else:
        launch = [sys.executable, "-m", "megagraph", "launch", "--nodes", "1", "--tasks", str(ranks), "--"]
        subprocess.run(launch + command, check=True)


def workload(options: argparse.Namespace, name: str, ranks: int, folder: Path) -> Path:
    """The configuration of a graph on so many ranks, written."""
    run = RunConfig.model_validate(
        {
            "id": f"{name}-{ranks}",
            "dataset": name,
            "sampling": {"num_sampled": options.sampled},
            "model": {
                "layers": options.layers,
                "heads": options.heads[0],
                "hidden": options.hidden[0],
                "ffn": options.hidden[0],
            },
            "train": {"batch": options.batch},
            "parallel": {"world_size": ranks, "plan": "search", "memory_limit_gb": options.memory_limit_gb},
            "profile": {
                "warmup": 1,
                "repeats": options.repeats,
                "measured_steps": options.repeats,
                "microbatch_sizes": options.microbatches,
                "measured_plans": options.plans,
                "grid": grid(options, ""),
                "heldout": grid(options, "heldout_"),
            },
        }
    )
    path = folder / f"{run.id}.json"
    path.write_text(run.workload.model_dump_json())
    return path


def grid(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The fitted grid or the held-out one."""
    sizes = {name: getattr(options, prefix + key) for name, key in GRID.items()}
    return {**sizes, "tokens": options.tokens}


GRID = {"batch": "batches", "layers": "depths", "heads": "heads", "hidden": "hidden"}


def make_data(options: argparse.Namespace, folder: Path) -> None:
    """Two planted graphs, the second with other features and classes."""
    for name, features, communities in (("first", options.features, 10), ("other", 2 * options.features, 7)):
        spec = {"source": "planted", "nodes": options.nodes, "features": features, "communities": communities}
        verb("resolve", "dataset", name, "--spec", json.dumps(spec), "--out", folder / f"{name}.dataset.json")
        verb("download", folder / f"{name}.dataset.json", name, "--out", folder / name)
        verb("resolve", "coarsening", "default", "--spec", "{}", "--out", folder / "coarsening.json")
        coarse = folder / name / "default.safetensors"
        verb("coarsen", folder / name / "graph.safetensors", folder / "coarsening.json", "--out", coarse)


def measure_grids(options: argparse.Namespace, folder: Path) -> None:
    """Both grids, on one rank."""
    file = workload(options, "first", 1, folder)
    for name in ("grid", "heldout"):
        verb("profile", file, "--data", folder / "first", f"--{name}", "0/1", "--out", folder / f"{name}.csv")


def of_ranks(options: argparse.Namespace, ranks: int, folder: Path) -> dict[str, Any]:
    """Profile, fit, search and measured plans on so many ranks."""
    files = {name: workload(options, name, ranks, folder) for name in ("first", "other")}
    profiles = {name: folder / f"{name}-{ranks}.profile.json" for name in files}
    for name, file in files.items():
        verb("profile", file, "--data", folder / name, "--out", profiles[name], ranks=ranks)
    cost, found = folder / f"{ranks}.cost.json", folder / f"{ranks}.search.json"
    words = ["fit", profiles["first"], folder / "grid.csv", "--heldout", folder / "heldout.csv"]
    verb(*words, "--heldout-profile", profiles["other"], "--quantile", options.quantile, "--out", cost)
    verb("search", files["first"], cost, "--out", found)
    plans = folder / f"{ranks}.plans.csv"
    verb("profile", files["first"], "--data", folder / "first", "--plans", found, "--out", plans, ranks=ranks)
    model = CostModel.load(cost)
    quality = {**model.quality, **plan_quality(plans, model.memory_margin)}
    return {
        "ranks": ranks,
        "margin": model.memory_margin,
        "quantile": options.quantile,
        "quality": {name: one.model_dump() for name, one in quality.items()},
        "depth": model.depth,
        "depth_readings": {name: one.model_dump() for name, one in model.depth_readings.items()},
        "targets": {name: reached(quality[name], limits) for name, limits in TARGETS.items()},
        "memory_source": read_json(profiles["first"])["memory_source"],
    }


def plan_quality(path: Path, margin: float) -> dict[str, Quality]:
    """Whole plans on all their ranks: predicted by the search, then measured."""
    with path.open(newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if row["status"] == "ok"]
    names = [row["label"] for row in rows]
    found = {}
    for name, measured, predicted in (
        ("plans_memory", "peak_bytes", "predicted_bytes"),
        ("plans_latency", "step_seconds", "predicted_seconds"),
    ):
        truth, guess = (np.array([float(row[key]) for row in rows]) for key in (measured, predicted))
        found[name] = assess(truth, guess, names, held_out=True, margin=margin if name == "plans_memory" else None)
    return found


def reached(quality: Quality, limits: dict[str, float]) -> dict[str, Any]:
    """Each target beside what was measured."""
    found = {}
    for name, limit in limits.items():
        value = float(getattr(quality, name))
        holds = value >= limit if name in AT_LEAST else value <= limit
        found[name] = {"target": limit, "measured": value, "holds": holds}
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5, help="timed steps; the median counts")
    parser.add_argument("--quantile", type=float, default=0.95, help="of the memory that plans reckon with")
    parser.add_argument("--plans", type=int, default=8, help="of the search, measured")
    numbers = {"batches": [8, 32, 128], "depths": [2, 4, 8, 12, 16], "heads": [4, 8], "hidden": [32, 64]}
    others = {"batches": [16, 64], "depths": [3, 6, 10, 20], "heads": [4], "hidden": [48]}
    for prefix, sizes in (("", numbers), ("heldout-", others)):
        for name, values in sizes.items():
            parser.add_argument(f"--{prefix}{name}", type=int, nargs="+", default=values)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 64, 256], help="of the profile")
    parser.add_argument("--tokens", type=int, default=32, help="N of the grids")
    single = {"batch": 256, "layers": 8, "sampled": 14, "nodes": 4000, "features": 64}
    for name, value in single.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--memory-limit-gb", type=float, default=4.0)
    return parser.parse_args()


def main() -> None:
    """Measure and write one JSON."""
    options = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(options, folder)
        measure_grids(options, folder)
        rows = [of_ranks(options, ranks, folder) for ranks in options.ranks]
    config = {name: value for name, value in vars(options).items() if name != "out"}
    where = {"device": device_name("cpu"), "threads": 1, "torch": torch.__version__, "commit": git_commit()}
    body = {"benchmark": "cost_model", "config": {**config, "dtype": "float32"}, "where": where, "rows": rows}
    options.out.write_text(json.dumps(body, indent=1) + "\n")
    for row in rows:
        for name, one in row["quality"].items():
            risk = "" if one["exceeded_percent"] is None else f"  false feasible {one['false_feasible_percent']:.2f} %"
            print(
                f"{row['ranks']} rank(s)  {name:34} MAPE {one['mape_percent']:6.2f} %  bias {one['bias_percent']:+7.2f}"
                f" %  R2 {one['r2']:.4f}  {one['num_points']:3} points  worst {one['worst_percent']:+.1f} %{risk}"
            )


if __name__ == "__main__":
    main()
