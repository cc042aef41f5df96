"""Figure 10: memory against time per sequence of every plan of the search, estimated and (some) measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megagraph.artifacts_search import Candidate, SearchResult
from megagraph.config import FigureConfig
from megagraph.figures.data import load_plans, load_search, load_workload, records, searched_run, strategy_of
from megagraph.figures.style import STRATEGY_STYLES, legend, log_scale, marks, memory_unit, new_figure, time_unit

PICK = "#DE8F05"
LOG_RATIO = 5.0


def collect(results: Path, spec: FigureConfig) -> pd.DataFrame:
    """One row per candidate (``source`` estimated) and per measured plan (``source`` measured).

    ``seconds`` is step time over sequences per step, ``peak_bytes`` the largest rank. ``pick`` marks the search's
    choice, ``frontier`` its Pareto set, ``optimum`` the fastest measured plan within the limit. Constant columns:
    limit, search seconds, number of plans enumerated, ranks, device.
    """
    run = searched_run(spec, "fig10")
    search, plans = load_search(results, run), load_plans(results, run)
    frontier = {candidate.plan.label for candidate in search.frontier}
    # A large search keeps only some candidates; the frontier and the pick are always drawn.
    drawn = {item.plan.label: item for item in (*search.candidates, *search.frontier, search.best)}
    rows = [_estimated(candidate, search, frontier) for candidate in drawn.values()]
    rows += [_measured(plan, search) for plan in records(plans)]
    frame = pd.DataFrame(rows)
    usable = frame[(frame["source"] == "measured") & (frame["status"] == "ok") & frame["fits"]]
    frame["optimum"] = False
    if len(usable):
        frame.loc[usable["seconds"].idxmin(), "optimum"] = True
    frame["limit_bytes"], frame["search_seconds"] = search.limit_bytes, search.seconds
    frame["num_enumerated"], frame["batch"] = search.num_enumerated, search.workload.batch
    frame["model_layers"], frame["world_size"] = search.workload.layers, search.world_size
    frame["dataset"], frame["num_tokens"] = load_workload(results, run).dataset, search.workload.num_tokens
    frame["device"], frame["threads"] = plans["device"].iloc[0], plans["threads"].iloc[0]
    return frame


def _estimated(candidate: Candidate, search: SearchResult, frontier: set[str]) -> dict[str, Any]:
    """The row of a plan that only the cost model has seen."""
    plan = candidate.plan
    return {
        "source": "estimated",
        "strategy": strategy_of(plan.pp, plan.cp, plan.dp),
        "label": plan.label,
        "seconds": candidate.step_seconds / search.workload.batch,
        "peak_bytes": candidate.peak_bytes,
        "status": "ok",
        "fits": candidate.fits,
        "frontier": plan.label in frontier,
        "pick": plan.label == search.best.plan.label,
    }


def _measured(plan: dict[str, Any], search: SearchResult) -> dict[str, Any]:
    """The row of a plan that ran; one that ran out of memory stands at its estimate, marked by its status."""
    ok = plan["status"] == "ok"
    peak = plan["peak_bytes"] if ok else plan["predicted_bytes"]
    return {
        "source": "measured",
        "strategy": strategy_of(plan["pp"], plan["cp"], plan["dp"]),
        "label": plan["label"],
        "seconds": (plan["step_seconds"] if ok else plan["predicted_seconds"]) / search.workload.batch,
        "peak_bytes": peak,
        "status": plan["status"],
        "fits": bool(ok and peak <= search.limit_bytes),
        "frontier": False,
        "pick": plan["label"] == search.best.plan.label,
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Hollow markers are estimates, solid ones measurements; a grey line joins the two of one plan."""
    figure, axes = new_figure(height=3.5)
    time_divisor, time_name = time_unit(float(frame["seconds"].max()))
    memory_divisor, memory_name = memory_unit(float(frame["peak_bytes"].max()))
    frame = frame.assign(x=frame["seconds"] / time_divisor, y=frame["peak_bytes"] / memory_divisor)
    estimated, measured = frame[frame["source"] == "estimated"], frame[frame["source"] == "measured"]
    handles = _draw_points(axes, estimated, measured)
    front = estimated[estimated["frontier"]].sort_values("x")
    axes.plot(front["x"], front["y"], color="#000000", linewidth=0.8, drawstyle="steps-post", zorder=2)
    handles.append(Line2D([], [], color="#000000", linewidth=0.8, label=f"frontier ({len(front)})"))
    star = marks("*", 9, PICK, edge=0.4, markeredgecolor="black")
    axes.plot(estimated.loc[estimated["pick"], "x"], estimated.loc[estimated["pick"], "y"], zorder=6, **star)
    handles.append(Line2D([], [], label="search pick", **star))
    if measured["optimum"].any():
        ring = marks("o", 9, "black", edge=1.0, markerfacecolor="none")
        best = measured[measured["optimum"]]
        axes.plot(best["x"], best["y"], zorder=5, **ring)
        handles.append(Line2D([], [], label="measured optimum", **ring))
    axes.set_xlabel(f"time per sequence ({time_name})")
    axes.set_ylabel(f"peak memory per rank ({memory_name})")
    _scales(axes, frame)
    handles += _draw_limit(axes, frame, memory_divisor, memory_name)
    seconds = frame["search_seconds"].iloc[0]
    total = frame["num_enumerated"].iloc[0]
    plans = f"hollow: {len(estimated)} of {total} plans, estimated (search: {seconds:.2g} s)"
    axes.set_title(f"{plans}\nsolid: {len(measured)} plans, measured", fontsize=7, loc="left", pad=3)
    legend(figure, handles, columns=3)
    return figure


def _draw_points(axes: Axes, estimated: pd.DataFrame, measured: pd.DataFrame) -> list[Line2D]:
    """One colour and marker per strategy, with its number of plans; an out-of-memory plan is a cross."""
    handles = []
    present = set(estimated["strategy"]) | set(measured["strategy"])
    for strategy, (color, marker) in STRATEGY_STYLES.items():
        if strategy not in present:
            continue
        hollow, solid = marks(marker, 4, color, edge=0.7, markerfacecolor="none"), marks(marker, 5, color, edge=0.7)
        guess = estimated[estimated["strategy"] == strategy]
        real = measured[(measured["strategy"] == strategy) & (measured["status"] == "ok")]
        axes.plot(guess["x"], guess["y"], alpha=0.7, zorder=3, **hollow)
        axes.plot(real["x"], real["y"], zorder=4, **solid)
        handles.append(Line2D([], [], label=f"{strategy} ({len(guess)})", **hollow))
    places = estimated.drop_duplicates("label").set_index("label")
    for _, point in measured[measured["status"] == "ok"].iterrows():
        if point["label"] in places.index:
            guess = places.loc[point["label"]]
            axes.plot([guess["x"], point["x"]], [guess["y"], point["y"]], color="#AAAAAA", linewidth=0.6, zorder=1)
    lost = measured[measured["status"] != "ok"]
    if len(lost):
        cross = marks("x", 6, "black", edge=1.2)
        axes.plot(lost["x"], lost["y"], zorder=5, **cross)
        handles.append(Line2D([], [], label=f"out of memory ({len(lost)})", **cross))
    return handles


def _draw_limit(axes: Axes, frame: pd.DataFrame, divisor: float, unit: str) -> list[Line2D]:
    """The memory limit as a line; one far above every plan is named at the upper edge instead."""
    limit = float(frame["limit_bytes"].iloc[0]) / divisor
    if limit > 2.0 * frame["y"].max():
        axes.text(
            0.98, 0.98, f"limit {limit:,.4g} {unit} ↑", transform=axes.transAxes, ha="right", va="top", fontsize=7
        )
        return []
    axes.axhline(limit, color="#000000", linewidth=0.9, linestyle="--", zorder=1)
    return [Line2D([], [], color="#000000", linewidth=0.9, linestyle="--", label=f"limit {limit:.4g} {unit}")]


def _scales(axes: Axes, frame: pd.DataFrame) -> None:
    """Logarithmic where values spread over more than `LOG_RATIO`, linear elsewhere."""
    names: tuple[Literal["x", "y"], ...] = ("x", "y")
    for name in names:
        low, high = float(frame[name].min()), float(frame[name].max())
        if high > LOG_RATIO * low:
            log_scale(axes, name, low, high)
