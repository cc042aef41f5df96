"""Figure 9(b): step time against depth, measured and by the fitted piecewise linear law, with its break and slopes.

Cells that differ only in depth form a group. Each group is divided by its own predicted time at the shallowest
depth of the grid: groups of very different cost share one axis, and an error of the model stays visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megagraph.config import FigureConfig, UserError
from megagraph.figures.data import load_cells, load_cost, mape_percent, r_squared, records, searched_run
from megagraph.figures.style import legend, marks, new_figure

GROUP = ["batch", "heads", "hidden"]
HELD_OUT = marks("^", 3.5, "#009E73", edge=0.7, markerfacecolor="none")
MEASURED, FITTED, BREAK = "#0173B2", "#000000", "#D55E00"


def collect(results: Path, spec: FigureConfig) -> pd.DataFrame:
    """Rows of three kinds: ``measured`` and ``held-out``, one per cell of the fit's grid and of the held-out one, and
    ``fitted``, one per depth (median, low and high over groups).

    ``seconds`` is a training step (forward, backward, optimiser) of one micro-batch; ``relative`` is divided by the
    group's predicted time at the shallowest depth. Constant columns: the form of the law (none, hinge, jump), l_break,
    gamma, R2 and MAPE of the seconds of fitted and of held-out cells (empty without).
    """
    from megagraph.search.cost import predict_cell
    from megagraph.search.depth import Depth

    run = searched_run(spec, "fig9b")
    cells, cost = load_cells(results, run), load_cost(results, run)
    depths = sorted(cells.loc[~cells["held_out"], "layers"].unique())
    if len(depths) < 2:
        raise UserError(f"grid of {run} has the single depth {depths[0]}: give profile.grid.layers at least two depths")

    def seconds(row: Mapping[str, Any], layers: int) -> float:
        return predict_cell(cost, {**row, "layers": layers}).step_seconds

    rows = records(cells)
    reference = np.array([seconds(row, int(depths[0])) for row in rows])
    measured = cells["step_seconds"].to_numpy(np.float64)
    predicted = np.array([seconds(row, row["layers"]) for row in rows])
    frame = cells[[*GROUP, "layers"]].copy()
    frame.insert(0, "kind", np.where(cells["held_out"], "held-out", "measured"))
    frame["seconds"], frame["predicted_seconds"] = measured, predicted
    frame["relative"] = measured / reference
    frame = pd.concat([frame, _fitted(cells[~cells["held_out"]], seconds, depths)], ignore_index=True)
    law = Depth.read(cost.depth)
    frame["form"], frame["l_break"], frame["gamma"] = law.form, law.l_break, law.gamma
    for prefix, part in (("", ~cells["held_out"].to_numpy(bool)), ("heldout_", cells["held_out"].to_numpy(bool))):
        some = bool(part.any())
        frame[f"{prefix}r2"] = r_squared(measured[part], predicted[part]) if some else np.nan
        frame[f"{prefix}mape_percent"] = mape_percent(measured[part], predicted[part]) if some else np.nan
    frame["device"], frame["threads"] = cells["device"].iloc[0], cells["threads"].iloc[0]
    return frame


def _fitted(cells: pd.DataFrame, seconds: Callable[[Mapping[str, Any], int], float], depths: list[int]) -> pd.DataFrame:
    """The law at every whole depth: median over groups of the relative predicted time, and its range."""
    groups = records(cells.drop_duplicates(GROUP))
    layers = np.arange(int(depths[0]), int(depths[-1]) + 1)
    table = np.array([[seconds(row, int(layer)) for layer in layers] for row in groups])
    table /= table[:, :1]
    return pd.DataFrame(
        {
            "kind": "fitted",
            "layers": layers,
            "relative": np.median(table, axis=0),
            "low": table.min(axis=0),
            "high": table.max(axis=0),
        }
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Points per cell, the fitted law with its range over groups, the break and the slope before it continued."""
    figure, axes = new_figure(height=2.6)
    measured, fitted = frame[frame["kind"] == "measured"], frame[frame["kind"] == "fitted"]
    l_break, gamma, r2 = (float(frame[name].iloc[0]) for name in ("l_break", "gamma", "r2"))
    others = frame[frame["kind"] == "held-out"]
    groups = measured.drop_duplicates(GROUP)
    points = marks("o", 3, MEASURED)
    axes.fill_between(fitted["layers"], fitted["low"], fitted["high"], color="#DDDDDD", linewidth=0, zorder=0)
    axes.plot(measured["layers"], measured["relative"], alpha=0.5, zorder=2, **points)
    axes.plot(fitted["layers"], fitted["relative"], color=FITTED, zorder=3)
    handles = [
        Line2D([], [], label=f"measured ({len(measured)} cells, {len(groups)} groups)", **points),
        Line2D([], [], color=FITTED, label="fitted (median, range)"),
    ]
    if len(others):
        axes.plot(others["layers"], others["relative"], alpha=0.7, zorder=2, **HELD_OUT)
        handles.append(Line2D([], [], label=f"held out ({len(others)} cells)", **HELD_OUT))
    first, last = float(fitted["layers"].min()), float(fitted["layers"].max())
    inside = frame["form"].iloc[0] != "none" and first < l_break < last
    if inside:
        axes.axvline(l_break, color=BREAK, linewidth=0.8, linestyle="--", zorder=1)
        handles.append(Line2D([], [], color=BREAK, linewidth=0.8, linestyle="--", label="break"))
        shallow = fitted[fitted["layers"] <= max(l_break, first + 1)]
        slope = (shallow["relative"].iloc[-1] - 1.0) / (shallow["layers"].iloc[-1] - first)
        axes.plot([l_break, last], 1.0 + slope * (np.array([l_break, last]) - first), color=FITTED, lw=0.8, ls=":")
        handles.append(Line2D([], [], color=FITTED, linewidth=0.8, linestyle=":", label="slope before the break"))
    place = f"break at {l_break:.3g} layers" if inside else "no break found"
    text = f"{place}\nslope ratio \N{GREEK SMALL LETTER GAMMA} = {gamma:.2f}\nR² = {r2:.3f}"
    if len(others):
        mape, others_r2 = (float(frame[f"heldout_{name}"].iloc[0]) for name in ("mape_percent", "r2"))
        text += f"\nheld out: MAPE {mape:.1f} %, R² = {others_r2:.3f}"
    axes.text(0.98, 0.04, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=7)
    axes.set_xlabel("layers")
    axes.set_ylabel(f"step time / predicted at L={first:.0f}")
    axes.set_xlim(0, float(frame["layers"].max()) * 1.04)
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted(measured["layers"].unique()))
    legend(figure, handles, columns=2)
    return figure
