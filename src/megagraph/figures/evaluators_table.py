"""Findings from Table I: speed-up, context parallelism against pipelines, even against uneven pipelines."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from megagraph.figures.claims import Claim, Finding
from megagraph.figures.evidence import Evidence, describe, is_estimated, scale_of

ROWS: Mapping[str, str] = {
    "single": "(1,1,1)",
    "CP": "GA-CP (1,2,1)",
    "PP, even": "even pipeline (2,1,1)",
    "PP, uneven": "uneven pipeline (2,1,1)",
}


class MissingRowError(Exception):
    """A row of Table I that a claim needs is not there or ran out of memory."""


def _row(frame: pd.DataFrame, strategy: str) -> pd.Series:
    """The fastest finished row of a strategy on at most two ranks."""
    rows = frame[(frame["strategy"] == strategy) & (frame["pp"] * frame["cp"] * frame["dp"] <= 2)]
    if rows.empty:
        raise MissingRowError(f"needs the row {ROWS[strategy]} in table1")
    done = rows[rows["status"] == "ok"]
    if done.empty:
        raise MissingRowError(f"the row {ROWS[strategy]} ran out of memory")
    return done.iloc[int(done["seconds_per_epoch"].to_numpy().argmin())]


def _finding(
    evidence: Evidence, rows: list[pd.Series], ours: str, values: dict[str, float], *, memory: bool = True
) -> Finding:
    """A finding at the scale of the last row. Predicted memory makes it an estimate."""
    run = str(rows[-1]["run"])
    summary, config = evidence.summary(run), evidence.run_configs.get(run)
    estimated = memory and is_estimated([str(row["memory_source"]) for row in rows])
    return Finding(ours, values, describe(summary, config), scale_of(summary, config), estimated=estimated)


def _table(evidence: Evidence) -> pd.DataFrame:
    """Table I as drawn."""
    frame = evidence.figure("table1")
    if frame is None:
        raise MissingRowError("needs table1")
    return frame


def _rows(evidence: Evidence, *strategies: str) -> list[pd.Series]:
    """The rows a claim compares."""
    return [_row(_table(evidence), strategy) for strategy in strategies]


def speedup(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 13: seconds per epoch of one rank over those of the fastest plan on two."""
    try:
        frame, (single,) = _table(evidence), _rows(evidence, "single")
    except MissingRowError as error:
        return Finding(missing=str(error))
    two = frame[(frame["pp"] * frame["cp"] * frame["dp"] == 2) & (frame["status"] == "ok")]
    if two.empty:
        return Finding(missing="needs a finished run on two ranks in table1")
    best = two.iloc[int(two["seconds_per_epoch"].to_numpy().argmin())]
    value = float(single["seconds_per_epoch"] / best["seconds_per_epoch"])
    change = f"{single['seconds_per_epoch']:.2f} to {best['seconds_per_epoch']:.2f} s/epoch"
    ours = f"{value:.2f}x: {change} with {best['strategy']}"
    return _finding(evidence, [single, best], ours, {"speedup": value}, memory=False)


def context_memory(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 20: peak memory of one rank over that of context parallelism on two."""
    try:
        single, cp = _rows(evidence, "single", "CP")
    except MissingRowError as error:
        return Finding(missing=str(error))
    ratio = float(single["peak_gb"] / cp["peak_gb"])
    ours = (
        f"{single['peak_gb']:.4g} GB to {cp['peak_gb']:.4g} GB, {ratio:.2f}x "
        f"(attention: {single['attention']} alone, {cp['attention']} with CP)"
    )
    values = {"single_gb": float(single["peak_gb"]), "cp_gb": float(cp["peak_gb"]), "reduction": ratio}
    return _finding(evidence, [single, cp], ours, values)


def context_slowdown(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 21: how much slower context parallelism is than the faster pipeline, in percent."""
    try:
        cp, even, uneven = _rows(evidence, "CP", "PP, even", "PP, uneven")
    except MissingRowError as error:
        return Finding(missing=str(error))
    best = min((even, uneven), key=lambda row: float(row["seconds_per_epoch"]))
    slower = float(cp["seconds_per_epoch"] / best["seconds_per_epoch"] - 1) * 100
    ours = (
        f"GA-CP takes {slower:+.1f} %: {cp['seconds_per_epoch']:.2f} s/epoch against "
        f"{best['seconds_per_epoch']:.2f} ({best['strategy']})"
    )
    return _finding(evidence, [best, cp], ours, {"slowdown": slower}, memory=False)


def even_pipeline(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 22: time and memory of the even pipeline over those of context parallelism."""
    try:
        cp, even = _rows(evidence, "CP", "PP, even")
    except MissingRowError as error:
        return Finding(missing=str(error))
    values = {
        "even_gb": float(even["peak_gb"]),
        "time_over_cp": float(even["seconds_per_epoch"] / cp["seconds_per_epoch"]),
        "memory_over_cp": float(even["peak_gb"] / cp["peak_gb"]),
    }
    ours = (
        f"{even['peak_gb']:.4g} GB, {values['memory_over_cp']:.2f}x GA-CP's; time {values['time_over_cp']:.2f}x GA-CP's"
    )
    return _finding(evidence, [cp, even], ours, values)


def uneven_pipeline(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 23: the uneven pipeline against context parallelism and the even pipeline."""
    try:
        cp, even, uneven = _rows(evidence, "CP", "PP, even", "PP, uneven")
    except MissingRowError as error:
        return Finding(missing=str(error))
    others = min(float(cp["seconds_per_epoch"]), float(even["seconds_per_epoch"]))
    values = {
        "seconds_per_epoch": float(uneven["seconds_per_epoch"]),
        "uneven_gb": float(uneven["peak_gb"]),
        "time_over_others": float(uneven["seconds_per_epoch"]) / others,
        "memory_over_cp": float(uneven["peak_gb"] / cp["peak_gb"]),
        "memory_over_even": float(uneven["peak_gb"] / even["peak_gb"]),
    }
    ours = (
        f"layers [{str(uneven['layers']).replace(';', ',')}]: {values['seconds_per_epoch']:.2f} s/epoch, "
        f"{values['time_over_others']:.2f}x the faster of GA-CP and even; {values['uneven_gb']:.4g} GB, "
        f"{values['memory_over_cp']:.2f}x GA-CP's and {values['memory_over_even']:.2f}x the even pipeline's"
    )
    return _finding(evidence, [cp, even, uneven], ours, values)
