"""What figures and the report read: artifacts and CSV tables under ``results/``, with one-line errors.

A figure never recomputes a measurement; it reads the files of the other verbs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megagraph.artifacts import Artifact, CostModel, RunSummary
from megagraph.artifacts_search import SearchResult
from megagraph.config import FigureConfig, Strict, UserError, WorkloadConfig, validated
from megagraph.files import read_json

A = TypeVar("A", bound=Artifact)
C = TypeVar("C", bound=Strict)
E = TypeVar("E", CostModel, SearchResult)

EPOCH_COLUMNS = ("epoch", "loss", "seconds", "lr", "val_accuracy", "test_accuracy")
GRID_COLUMNS = (
    *("batch", "layers", "heads", "hidden", "ffn", "num_regular", "num_super", "bias_channels", "num_features"),
    *("num_classes", "peak_bytes", "forward_seconds", "backward_seconds", "step_seconds", "step_iqr", "repeats"),
    *("memory_source", "device", "threads", "commit"),
)
PLAN_COLUMNS = (
    *("strategy", "label", "pp", "cp", "dp", "layers", "microbatches", "step_seconds", "step_iqr", "repeats"),
    *("peak_bytes", "peak_bytes_by_rank", "predicted_seconds", "predicted_bytes", "status", "world_size", "cores"),
    *("device", "threads", "commit"),
)


def read_config(kind: type[C], path: Path) -> C:
    """A resolved piece of the configuration; `UserError` if it is not what `kind` asks for."""
    config: C = validated(kind, read_json(path), str(path), "make the file again")
    return config


def figure_config(results: Path, name: str) -> FigureConfig:
    """The runs that figure `name` draws, from ``config/figure/{name}.json``."""
    path = results / "config" / "figure" / f"{name}.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file: list {name} under figures in the config and run `megagraph resolve`")
    return read_config(FigureConfig, path)


def load_workload(results: Path, run: str) -> WorkloadConfig:
    """The workload that was profiled and searched for a run, from ``config/workload/{run}.json``."""
    path = results / "config" / "workload" / f"{run}.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file: make it with `megagraph resolve`")
    return read_config(WorkloadConfig, path)


def named_runs(spec: FigureConfig, name: str) -> tuple[str, ...]:
    """The runs of a figure; `UserError` if there are none."""
    if not spec.runs:
        raise UserError(f"figure {name}: runs is empty: name the runs to draw under figures.{name}.runs")
    return spec.runs


def searched_run(spec: FigureConfig, name: str) -> str:
    """The run whose profile and search a figure shows; `UserError` if none is named."""
    if spec.search is None:
        raise UserError(f"figure {name}: search is not set: name one run under figures.{name}.search")
    return spec.search


def load(kind: type[A], path: Path, verb: str) -> A:
    """An artifact of `kind`; if the file is missing the error names the verb that makes it."""
    if not path.is_file():
        raise UserError(f"{path}: no such file: make it with `megagraph {verb}`")
    return kind.load(path)


def load_summary(results: Path, run: str) -> RunSummary:
    """The outcome of a training run."""
    return load(RunSummary, results / "train" / run / "summary.json", "train")


def load_cost(results: Path, run: str) -> CostModel:
    """The fitted cost model of a run's workload; figures set it beside measurements, so an estimate is refused."""
    cost = load(CostModel, results / "search" / run / "cost.json", "fit")
    return _measured(cost, results / "search" / run / "cost.json", "fit")


def load_search(results: Path, run: str) -> SearchResult:
    """The plans that the search looked at for a run, on the device that was measured."""
    result = load(SearchResult, results / "search" / run / "search.json", "search")
    return _measured(result, results / "search" / run / "search.json", "search")


def _measured(artifact: E, path: Path, verb: str) -> E:
    if artifact.estimated_from:
        raise UserError(f"{path}: estimated from {artifact.estimated_from}: `megagraph {verb}` a measured one")
    return artifact


def load_epochs(results: Path, run: str) -> pd.DataFrame:
    """Loss, seconds, rate and accuracies by epoch; accuracy is NaN in epochs without evaluation."""
    return read_table(results / "train" / run / "epochs.csv", EPOCH_COLUMNS, "train")


def load_grid(results: Path, run: str) -> pd.DataFrame:
    """All cells of the validation grid, the shards put together and sorted by batch, layers, heads, hidden."""
    cells = _shards(results / "search" / run, "grid")
    if cells is None:
        raise UserError(f"{results}/search/{run}/grid-*.csv: no such files: make them with `megagraph profile --grid`")
    return cells


def load_cells(results: Path, run: str) -> pd.DataFrame:
    """The validation grid, then the held-out one if there is one; the column ``held_out`` says which."""
    fitted, others = load_grid(results, run), _shards(results / "search" / run, "heldout")
    if others is None:
        return fitted.assign(held_out=False)
    return pd.concat([fitted.assign(held_out=False), others.assign(held_out=True)], ignore_index=True)


def _shards(folder: Path, name: str) -> pd.DataFrame | None:
    """All shards of a grid put together, sorted; None if there are none."""
    shards = sorted(folder.glob(f"{name}-*.csv"))
    if not shards:
        return None
    cells = pd.concat([read_table(path, GRID_COLUMNS, f"profile --{name}") for path in shards], ignore_index=True)
    key = ["batch", "layers", "heads", "hidden"]
    twice = cells[cells.duplicated(key)]
    if len(twice):
        cell = " ".join(f"{size}={twice.iloc[0][size]}" for size in key)
        raise UserError(f"{folder}/{name}-*.csv: cell {cell} stands twice: remove the shards of another split")
    return cells.sort_values(key, ignore_index=True)


def load_plans(results: Path, run: str) -> pd.DataFrame:
    """Measured step time and memory of some plans of the search; ``status`` is ok or oom."""
    return read_table(results / "search" / run / "plans.csv", PLAN_COLUMNS, "profile --plans")


def read_table(path: Path, columns: tuple[str, ...], verb: str) -> pd.DataFrame:
    """A CSV with at least one row and the given columns; `UserError` naming the file and the verb otherwise."""
    if not path.is_file():
        raise UserError(f"{path}: no such file: make it with `megagraph {verb}`")
    try:
        table = pd.read_csv(path)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError):
        raise UserError(f"{path}: not a CSV table: make it again with `megagraph {verb}`") from None
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise UserError(f"{path}: lacks column {missing[0]}: make it again with `megagraph {verb}`")
    if table.empty:
        raise UserError(f"{path}: holds no rows: make it again with `megagraph {verb}`")
    return table


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dictionaries with string keys."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def strategy_of(pp: int, cp: int, dp: int) -> str:
    """The strategy of a layout by its degrees: PP, CP, DP, a sum of them such as PP+DP, or single."""
    return "+".join(name for name, degree in (("PP", pp), ("CP", cp), ("DP", dp)) if degree > 1) or "single"


def mape_percent(measured: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Mean absolute percentage error of predictions."""
    return float(np.mean(np.abs(predicted / measured - 1.0)) * 100.0)


def r_squared(measured: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Coefficient of determination; NaN if the measured values do not vary."""
    total = float(np.sum((measured - measured.mean()) ** 2))
    residual = float(np.sum((measured - predicted) ** 2))
    return 1.0 - residual / total if total > 0 else float("nan")
