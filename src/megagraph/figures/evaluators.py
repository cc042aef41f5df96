"""What our results say of each claim: one function per claim, from the files to a `Finding`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from megagraph.artifacts import RunSummary
from megagraph.config import RunConfig
from megagraph.figures.claims import Claim, Finding, Scalar
from megagraph.figures.evaluators_table import (
    context_memory,
    context_slowdown,
    even_pipeline,
    speedup,
    uneven_pipeline,
)
from megagraph.figures.evidence import Evidence, describe, hardware, scale_of

Evaluator = Callable[[Evidence, Claim], Finding]
PAPER_BATCHES = (1024, 8192)
PAPER_GRID: Mapping[str, set[int]] = {
    "batch": {1, 2, 4, 8},
    "layers": {2, 4, 8, 16, 24, 32},
    "heads": {4, 8, 16},
    "hidden": {32, 64, 128},
}


def partitions(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 1: enumerate the ways to cut 24 layers into 4 non-empty stages."""
    count = sum(1 for _ in itertools.combinations(range(1, 24), 3))
    return Finding(f"{count} partitions, enumerated", {"partitions": count}, "exact, no scale")


def profiling(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 5: warm-ups and repeats of the profiles; we keep the median and its spread instead of the mean."""
    if not evidence.profiles:
        return Finding(missing="needs a profile: no search/*/profile.json")
    warmup = min(profile.warmup for profile in evidence.profiles.values())
    repeats = min(row.layer_forward.repeats for profile in evidence.profiles.values() for row in profile.compute)
    ours = f"{warmup} warm-up(s), then median and spread of {repeats} runs"
    origin = next(iter(evidence.profiles.values())).provenance
    return Finding(ours, {"warmup": warmup, "repeats": repeats}, hardware(origin))


def end_to_end(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 6: whether a trained MegaGraph run has the paper's configuration; the nearest run is named otherwise."""
    configs = {run: evidence.run_configs[run] for run in evidence.summaries if run in evidence.run_configs}
    runs = {run: config for run, config in configs.items() if config.system == "megagraph"}
    if not runs:
        return Finding(missing="needs a trained MegaGraph run with its file in config/run")
    wanted = {value.name: value.value for value in claim.values}

    def different(config: RunConfig) -> list[str]:
        have = {**config.model.model_dump(), **config.train.model_dump()}
        gaps = [f"{name} {have[name]:g} instead of {value:g}" for name, value in wanted.items() if have[name] != value]
        return gaps + [f"batch {config.train.batch}"] * (config.train.batch not in PAPER_BATCHES)

    name = min(runs, key=lambda run: len(different(runs[run])))
    gaps = different(runs[name])
    where = describe(evidence.summaries[name], runs[name])
    if gaps:
        ours = f"nearest run {name}: {', '.join(gaps)}"
        return Finding(ours, where=where, missing="needs the paper's model, batch and schedule")
    return Finding(f"run {name} has it", wanted, where, scale_of(evidence.summaries[name], runs[name]))


def rank_accuracy(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 8: the largest difference of test accuracy between one rank and several, everything else equal."""
    worst: tuple[float, RunSummary, RunSummary] | None = None
    for alone, several in _pairs(evidence):
        difference = abs(alone.test_accuracy - several.test_accuracy) * 100
        if worst is None or difference > worst[0]:
            worst = (difference, alone, several)
    if worst is None:
        return Finding(missing="needs the same run on one rank and on several")
    difference, alone, several = worst
    ours = (
        f"largest difference {difference:.2f} pp: {alone.run} {alone.test_accuracy:.2%}, "
        f"{several.run} {several.test_accuracy:.2%}, after {alone.epochs} epoch(s)"
    )
    config = evidence.run_configs.get(several.run)
    return Finding(ours, {"difference_pp": difference}, describe(several, config), scale_of(several, config))


def _pairs(evidence: Evidence) -> Iterator[tuple[RunSummary, RunSummary]]:
    """Runs on one rank, each with every run on several ranks that differs in nothing but the plan."""

    def setting(summary: RunSummary) -> tuple[Any, ...]:
        names = ("system", "dataset", "split", "sequences_per_step", "num_tokens", "samples_per_node", "epochs")
        config = evidence.run_configs.get(summary.run)
        rest = (config.model, config.train, config.sampling) if config else ()
        return (*(getattr(summary, name) for name in (*names, "num_parameters")), *rest)

    ok = [summary for summary in evidence.summaries.values() if summary.status == "ok"]
    for one, other in itertools.product(ok, ok):
        if one.plan.world_size == 1 < other.plan.world_size and setting(one) == setting(other):
            yield one, other


def convergence(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 11: without ANS-GT and TorchGT only the control can be set beside MegaGraph."""
    frame = evidence.figure("fig8b")
    if frame is None:
        return Finding(missing=f"needs {claim.needs}")
    ends = frame.groupby("run", sort=False).last()
    curves = ", ".join(f"{run} ({row['system']}) {row['smoothed_percent']:.1f} %" for run, row in ends.iterrows())
    run = str(ends.index[0])
    where = describe(evidence.summary(run), evidence.run_configs.get(run))
    return Finding(f"smoothed accuracy at the last epoch: {curves}", where=where, missing=f"needs {claim.needs}")


def grid_cells(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 17: the cells that were measured."""
    frame = _fitted(evidence.figure("fig9a"))
    if frame is None:
        return Finding(missing="needs fig9a")
    ours = f"{len(frame)} cells: " + ", ".join(f"{name} {sorted(frame[name].unique().tolist())}" for name in PAPER_GRID)
    if any(set(frame[name]) != wanted for name, wanted in PAPER_GRID.items()):
        return Finding(ours, where=_grid_where(frame), missing="needs the paper's grid")
    return Finding(ours, {"cells": len(frame)}, _grid_where(frame), _grid_scale(frame))


def memory_model(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 18: MAPE and R2 over all cells (in-sample), and held out where the fit reports it."""
    frame = _fitted(evidence.figure("fig9a"))
    if frame is None:
        return Finding(missing="needs fig9a")
    first = frame.iloc[0]
    ours = f"MAPE {first['mape_percent']:.2f} %, R2 {first['r2']:.4f} over {len(frame)} cells, in-sample"
    for cost in evidence.costs.values():
        quality = cost.quality.get("memory")
        if quality is not None and quality.held_out:
            ours += f"; held out {quality.mape_percent:.2f} %, R2 {quality.r2:.4f} ({quality.num_points} points)"
    values = {"mape_percent": float(first["mape_percent"]), "r2": float(first["r2"])}
    return Finding(ours, values, _grid_where(frame), _grid_scale(frame))


def depth_law(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 19: break point, penalty and R2 of the latency law."""
    frame = evidence.figure("fig9b")
    if frame is None:
        return Finding(missing="needs fig9b")
    cells, first = frame[frame["kind"] == "measured"], frame.iloc[0]
    depths = sorted(int(depth) for depth in cells["layers"].unique())
    law = f"{first['form']} at {first['l_break']:g} layers, gamma {first['gamma']:.2f}"
    ours = f"{'no break' if first['form'] == 'none' else law}; R2 {first['r2']:.3f} over depths {depths}"
    if max(depths) <= 8:
        return Finding(ours, where=_grid_where(frame), missing="needs depths beyond 8 layers")
    values = {name: float(first[name]) for name in ("l_break", "gamma", "r2")}
    return Finding(ours, values, _grid_where(frame), {"device": str(first["device"]), "cells": len(cells)})


def _fitted(frame: pd.DataFrame | None) -> pd.DataFrame | None:
    """The cells that served the fit."""
    return frame if frame is None or "held_out" not in frame else frame[~frame["held_out"]]


def _grid_where(frame: pd.DataFrame) -> str:
    """Hardware and sequence length of the grid."""
    first = frame.iloc[0]
    tokens = f", N={first['num_regular'] + first['num_super']}" if "num_regular" in frame else ""
    return f"grid{tokens}, one rank, {first['device']}, {first['threads']} thread(s)"


def _grid_scale(frame: pd.DataFrame) -> dict[str, Scalar]:
    return {"device": str(frame["device"].iloc[0]), "cells": len(frame)}


def plan_space(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 24: plans enumerated and the strategies among them."""
    frame = evidence.figure("fig10")
    if frame is None:
        return Finding(missing="needs fig10")
    plans = frame[frame["source"] == "estimated"]
    counts = ", ".join(f"{name} {count}" for name, count in plans["strategy"].value_counts().sort_index().items())
    total = int(frame["num_enumerated"].iloc[0])
    ours = f"{total} plans enumerated, {len(plans)} drawn: {counts}"
    missing = _needs_four(frame)
    values = {"configurations": total, "strategies": plans["strategy"].nunique()}
    return Finding(ours, values, _plans_where(frame), _plans_scale(frame), missing=missing)


def frontier(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 25, on the cost model's estimates: DP on the frontier, CP's memory, CP+DP against DP."""
    frame = evidence.figure("fig10")
    if frame is None:
        return Finding(missing="needs fig10")
    plans = frame[frame["source"] == "estimated"]
    fastest, least = plans.groupby("strategy")["seconds"].min(), plans.groupby("strategy")["peak_bytes"].min()
    values: dict[str, float] = {"dp_on_frontier": int((plans["frontier"] & (plans["strategy"] == "DP")).sum())}
    ours = f"{values['dp_on_frontier']:.0f} pure DP plan(s) on the frontier"
    if "CP" in least:
        values["cp_over_least_memory"] = least["CP"] / least.min()
        ours += f"; CP needs {values['cp_over_least_memory']:.2f}x the least memory"
    if {"CP+DP", "DP"} <= set(fastest.index):
        values["cpdp_over_dp_time"] = fastest["CP+DP"] / fastest["DP"]
        values["cpdp_over_dp_memory"] = least["CP+DP"] / least["DP"]
        ours += f"; CP+DP against DP: time {values['cpdp_over_dp_time']:.2f}x"
        ours += f", memory {values['cpdp_over_dp_memory']:.2f}x"
    else:
        ours += "; no CP+DP plan at this number of ranks"
    return Finding(ours, values, _plans_where(frame), _plans_scale(frame), estimated=True)


def search_time(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 26: seconds of the search, and its pick against the fastest measured plan."""
    frame = evidence.figure("fig10")
    if frame is None:
        return Finding(missing="needs fig10")
    values = {"seconds": float(frame["search_seconds"].iloc[0])}
    ours = f"{values['seconds']:.2g} s for {frame['num_enumerated'].iloc[0]} plans"
    ran = frame[(frame["source"] == "measured") & (frame["status"] == "ok")]
    picked, best = ran[ran["pick"]], ran[ran["optimum"]]
    if len(picked) and len(best):
        values["pick_over_optimum"] = float(picked["seconds"].iloc[0] / best["seconds"].iloc[0])
        ours += f"; the pick takes {values['pick_over_optimum']:.2f}x the time of the best of {len(ran)} measured plans"
    return Finding(ours, values, _plans_where(frame), _plans_scale(frame))


def recommendation(evidence: Evidence, claim: Claim) -> Finding:
    """Claim 27: the strategy picked, and the measured memory of the plans that the search recommends."""
    frame = evidence.figure("fig10")
    if frame is None:
        return Finding(missing="needs fig10")
    pick = frame[(frame["source"] == "estimated") & frame["pick"]].iloc[0]
    limit = float(frame["limit_bytes"].iloc[0])
    plans = frame[frame["source"] == "estimated"]
    advised = set(plans.loc[plans["frontier"] | plans["pick"], "label"])
    ran = frame[(frame["source"] == "measured") & frame["label"].isin(advised)]
    values: dict[str, float] = {"pick_is_pp_dp": int(pick["strategy"] == "PP+DP")}
    ours = f"picks {pick['label']} ({pick['strategy']}) under {limit / 1e9:g} GB"
    if len(ran):
        lost = int((ran["status"] != "ok").sum())
        values["measured_over_limit"] = np.inf if lost else float(ran["peak_bytes"].max() / limit)
        fit = len(ran) - lost - int((ran["peak_bytes"][ran["status"] == "ok"] > limit).sum())
        ours += f"; {fit} of {len(ran)} measured recommendations fit"
    return Finding(ours, values, _plans_where(frame), _plans_scale(frame), missing=_needs_four(frame))


def _needs_four(frame: pd.DataFrame) -> str | None:
    """Fewer than four ranks have no hybrid of two strategies."""
    return None if frame["world_size"].iloc[0] >= 4 else f"needs 4 ranks, ours has {frame['world_size'].iloc[0]}"


def _plans_where(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    return (
        f"{first['dataset']}, L={first['model_layers']}, B={first['batch']}, N={first['num_tokens']}, "
        f"W={first['world_size']}, {first['device']}, {first['threads']} thread(s) per rank"
    )


def _plans_scale(frame: pd.DataFrame) -> dict[str, Scalar]:
    first = frame.iloc[0]
    return {"dataset": str(first["dataset"]), "device": str(first["device"]), "world_size": int(first["world_size"])}


EVALUATORS: Mapping[int, Evaluator] = MappingProxyType(
    {
        1: partitions,
        5: profiling,
        6: end_to_end,
        8: rank_accuracy,
        11: convergence,
        13: speedup,
        17: grid_cells,
        18: memory_model,
        19: depth_law,
        20: context_memory,
        21: context_slowdown,
        22: even_pipeline,
        23: uneven_pipeline,
        24: plan_space,
        25: frontier,
        26: search_time,
        27: recommendation,
    }
)


def evaluate(evidence: Evidence, claim: Claim) -> Finding:
    """Our finding for a claim; not run if nothing of ours speaks of it yet."""
    evaluator = EVALUATORS.get(claim.id)
    return evaluator(evidence, claim) if evaluator else Finding(missing=f"needs {claim.needs or claim.source}")
