"""What each verb of the command line does: read files, call one function of the package, write files.

Heavy imports stay inside the verbs, so that light ones start at once and never load torch.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from megagraph.artifacts import CostModel, HardwareProfile
from megagraph.artifacts_search import SearchResult
from megagraph.config import (
    CoarseningConfig,
    DatasetConfig,
    Experiment,
    FigureConfig,
    ParallelPlan,
    RunConfig,
    UserError,
    WorkloadConfig,
    load_experiment,
    validated,
)
from megagraph.files import read_json, read_yaml, write_text

KINDS: dict[str, Any] = {
    "dataset": DatasetConfig,
    "coarsening": CoarseningConfig,
    "workload": WorkloadConfig,
    "run": RunConfig,
    "figure": FigureConfig,
}


def resolve(arguments: Namespace) -> None:
    """Validate one piece of the configuration and write it."""
    body = _parsed(arguments.spec, "--spec")
    value = validated(KINDS[arguments.kind], body, f"{arguments.kind} {arguments.id}")
    write_text(arguments.out, json.dumps(value.model_dump(mode="json"), indent=2) + "\n")


def download(arguments: Namespace) -> None:
    """Fetch or build a data set; writes graph.safetensors and manifest.json."""
    from megagraph.graph.datasets import download as fetch

    mirror = os.environ.get("MEGAGRAPH_MIRROR")
    fetch(arguments.name, _load("dataset", arguments.dataset), arguments.out, Path(mirror) if mirror else None)


def coarsen(arguments: Namespace) -> None:
    """Make the coarse graph."""
    from megagraph.graph.coarsen import coarsen as make
    from megagraph.graph.store import load_graph, save_coarsening

    save_coarsening(make(load_graph(arguments.graph), _load("coarsening", arguments.coarsening)), arguments.out)


def profile(arguments: Namespace) -> None:
    """Measure: layers and messages, one shard of the grid, or whole plans."""
    from megagraph.profile import profiler

    workload = _load("workload", arguments.workload)
    if arguments.grid or arguments.heldout:
        shard = arguments.grid or arguments.heldout
        profiler.profile_grid(workload, arguments.data, arguments.out, shard, heldout=bool(arguments.heldout))
    elif arguments.plans:
        profiler.profile_plans(workload, arguments.data, arguments.out, search=arguments.plans)
    else:
        profiler.profile_workload(workload, arguments.data, arguments.out)


def memory(arguments: Namespace) -> None:
    """Predict the peak memory of every rank of a plan, or of the plans of a search, on no hardware."""
    from megagraph.profile.predict import predict
    from megagraph.profile.profiler import choose_plans

    workload = _load("workload", arguments.workload)
    plans = [workload.parallel.plan]
    if arguments.plan:
        plans = [ParallelPlan.model_validate(_parsed(arguments.plan, "--plan"))]
    elif arguments.plans:
        chosen = choose_plans(SearchResult.load(arguments.plans), workload.profile.measured_plans)
        plans = [candidate.plan for candidate in chosen]
    elif plans == ["search"]:
        raise UserError(f"workload {workload.id} has plan: search: give --plan, or the search result with --plans")
    predict(workload, arguments.data, plans).save(arguments.out)


def fit(arguments: Namespace) -> None:
    """Fit the cost model to a profile and, where there is one, to the grid; say how well it predicts."""
    from megagraph.search.fit import fit as fit_model
    from megagraph.search.heldout import held_out
    from megagraph.search.refit import refit

    profile, grid = HardwareProfile.load(arguments.profile), _rows(arguments.grid)
    if arguments.base:
        if arguments.grid or arguments.heldout or arguments.heldout_profile:
            raise UserError("--from takes a profile alone: leave out the grids, or fit without --from")
        refit(CostModel.load(arguments.base), profile).save(arguments.out)
        return
    cost = fit_model(profile, grid if arguments.grid else None, arguments.quantile)
    others = [HardwareProfile.load(path) for path in arguments.heldout_profile]
    held_out(cost, profile, grid, _rows(arguments.heldout), others).save(arguments.out)


def search(arguments: Namespace) -> None:
    """Find the best plan within the memory limit of the workload's configuration, or of other hardware, and say why it
    is the best; where nothing fits, OUT.remedies.json says what would."""
    from megagraph.search.hardware import check_numbers, describing, estimate, limit_bytes, load_hardware
    from megagraph.search.plan import search as search_plan
    from megagraph.search.remedies import NothingFitsError
    from megagraph.search.table import table

    parallel = _load("workload", arguments.workload).parallel
    cost = CostModel.load(arguments.cost)
    check_numbers(cost)
    world_size, limit = parallel.world_size, parallel.memory_limit_gb * 1e9
    if arguments.hardware:
        if parallel.search.devices:
            raise UserError("parallel.search.devices and --hardware both describe the devices: leave out one of them")
        target = load_hardware(arguments.hardware)
        source = describing(cost.device, arguments.hardware.parent)
        world_size, limit = arguments.devices or world_size, limit_bytes(target)
        cost = estimate(cost, source, target, world_size, arguments.nodes or 1, allow_tf32=arguments.allow_tf32)
        sys.stdout.write(f"estimated: {cost.device}; extrapolated there: {', '.join(target.estimates) or 'nothing'}\n")
    elif arguments.devices or arguments.nodes or arguments.allow_tf32:
        raise UserError("--devices, --nodes and --allow-tf32 describe other hardware: name it with --hardware FILE")
    try:
        result = search_plan(cost.workload, world_size, limit, parallel.microbatches, cost, parallel.search)
    except NothingFitsError as error:
        error.remedies.save(arguments.out.with_suffix(".remedies.json"))
        raise
    result.model_copy(update={"estimated_from": cost.estimated_from}).save(arguments.out)
    sys.stdout.write(table(result) + "\n")


def train(arguments: Namespace) -> None:
    """Train one run; writes epochs.csv, checkpoint/ and summary.json."""
    from megagraph.train.trainer import train as train_run

    train_run(_load("run", arguments.run), arguments.data, arguments.out, arguments.plan, arguments.resume)


def export(arguments: Namespace) -> None:
    """Write a trained model as one safetensors file with its configuration."""
    from megagraph.train.export import export as export_run

    export_run(_load("run", arguments.run), arguments.data, arguments.trained, arguments.out)


def figure(arguments: Namespace) -> None:
    """Draw one figure or table from the results."""
    from megagraph.figures.registry import make

    make(arguments.name, arguments.results, arguments.out)


def report(arguments: Namespace) -> None:
    """Set the paper's numbers beside the results."""
    from megagraph.figures.report import report as write_report

    write_report(arguments.results, arguments.paper, arguments.out)


def check(arguments: Namespace) -> None:
    """Is the hardware here that the configuration needs?"""
    from megagraph.resources import check_gpus, gpu_memories

    gpus, size_gb = arguments.gpus or 0, arguments.gpu_memory_gb or 0.0
    if arguments.config:
        experiment = read_experiment(arguments.config)
        gpus = experiment.gpus if arguments.gpus is None else gpus
        size_gb = experiment.gpu_memory_gb if arguments.gpu_memory_gb is None else size_gb
    check_gpus(gpus, size_gb, gpu_memories() if gpus else [])


def schema(arguments: Namespace) -> None:
    """Write the JSON schema of config/*.yaml."""
    from megagraph.schema import experiment_schema

    write_text(arguments.out, json.dumps(experiment_schema(), indent=2) + "\n")


def _rows(paths: list[Path]) -> list[dict[str, str]]:
    """The rows of all tables."""
    rows: list[dict[str, str]] = []
    for path in paths:
        with path.open(newline="") as handle:
            rows.extend(csv.DictReader(handle))
    return rows


def read_experiment(path: Path) -> Experiment:
    """The experiment in a YAML file; `UserError` if it is missing, broken or invalid."""
    raw = read_yaml(path, "name a config, for example config/demo.yaml")
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds no mapping: see config/README.md")
    return load_experiment(raw, str(path))


def _parsed(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{option} is not JSON (column {error.colno}): give one JSON object") from None


def _load(kind: str, path: Path) -> Any:
    return validated(KINDS[kind], read_json(path), str(path))
