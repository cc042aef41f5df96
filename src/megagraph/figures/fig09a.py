"""Figure 9(a): predicted against measured peak memory over the cells of the validation grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megagraph.config import FigureConfig
from megagraph.figures.data import load_cells, load_cost, mape_percent, r_squared, records, searched_run
from megagraph.figures.style import legend, log_scale, marks, memory_unit, new_figure

BAND = 0.10
# Light to dark: the depth of the model is an ordered quantity, so it gets one hue.
HELD_OUT = marks("^", 3.5, "#009E73", edge=0.7, markerfacecolor="none")
DEPTH_COLORS = ("#9ECAE1", "#6BAED6", "#4292C6", "#2171B5", "#08519C", "#08306B")


def collect(results: Path, spec: FigureConfig) -> pd.DataFrame:
    """One row per grid cell: sizes, measured and predicted bytes, signed error in percent, source of the measurement.

    ``held_out`` cells had no part in the fit. Constant columns carry MAPE (percent) and R2 over the fitted cells and
    over the held-out ones (empty without), and the device.
    """
    from megagraph.search.cost import predict_cell

    run = searched_run(spec, "fig9a")
    cells, cost = load_cells(results, run), load_cost(results, run)
    measured = cells["peak_bytes"].to_numpy(np.float64)
    predicted = np.array([predict_cell(cost, row).peak_bytes for row in records(cells)], dtype=np.float64)
    frame = cells[["batch", "layers", "heads", "hidden", "num_regular", "num_super"]].copy()
    frame["measured_bytes"] = measured
    frame["predicted_bytes"] = predicted
    frame["error_percent"] = (predicted / measured - 1.0) * 100.0
    for prefix, part in (("", ~cells["held_out"].to_numpy(bool)), ("heldout_", cells["held_out"].to_numpy(bool))):
        some = bool(part.any())
        frame[f"{prefix}mape_percent"] = mape_percent(measured[part], predicted[part]) if some else np.nan
        frame[f"{prefix}r2"] = r_squared(measured[part], predicted[part]) if some else np.nan
    return pd.concat([frame, cells[["held_out", "memory_source", "device", "threads"]]], axis=1)


def draw(frame: pd.DataFrame) -> Figure:
    """Log-log scatter with y = x, a +-10 % band, MAPE, R2 and the worst cell by name."""
    figure, axes = new_figure(height=3.0)
    largest = float(frame[["measured_bytes", "predicted_bytes"]].max().max())
    smallest = float(frame[["measured_bytes", "predicted_bytes"]].min().min())
    divisor, unit = memory_unit(largest)
    ends = np.array([smallest / 1.3, largest * 1.3]) / divisor
    band = axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color="#DDDDDD", linewidth=0, zorder=0)
    band.set_label("±10 %")
    axes.plot(ends, ends, color="#666666", linewidth=0.6, zorder=1)
    depths = sorted(frame["layers"].unique())
    shades = np.linspace(0, len(DEPTH_COLORS) - 1, max(len(depths), 2)).round().astype(int)
    handles = [Line2D([], [], color="#666666", linewidth=0.6, label="y = x (±10 %)")]
    for depth, shade in zip(depths, shades, strict=False):
        cells = frame[frame["layers"] == depth]
        look = marks("o", 3, DEPTH_COLORS[shade])
        for held_out, own in cells.groupby("held_out"):
            points = HELD_OUT if held_out else look
            x, y = own["measured_bytes"] / divisor, own["predicted_bytes"] / divisor
            axes.plot(x, y, alpha=0.85, zorder=3 if held_out else 2, **points)
        if cells["held_out"].all():
            continue
        handles.append(Line2D([], [], label=f"L={depth}", **look))
    fitted, others = frame[~frame["held_out"]], frame[frame["held_out"]]
    if len(others):
        handles.append(Line2D([], [], label="held out", **HELD_OUT))
    worst = frame.iloc[int(frame["error_percent"].abs().to_numpy().argmax())]
    spot = (worst["measured_bytes"] / divisor, worst["predicted_bytes"] / divisor)
    axes.plot(*spot, **marks("o", 7, "#D55E00", edge=1.0, markerfacecolor="none"))
    cell = f"b={worst['batch']} L={worst['layers']} H={worst['heads']} D={worst['hidden']}"
    first = frame.iloc[0]
    text = f"MAPE {first['mape_percent']:.2f} %, R² {first['r2']:.4f}, {len(fitted)} cells\n"
    if len(others):
        text += f"held out {first['heldout_mape_percent']:.2f} %, R² {first['heldout_r2']:.4f}, {len(others)} cells\n"
    text += f"worst (ring) {worst['error_percent']:+.1f} %\n{cell}"
    axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=7)
    log_scale(axes, "x", *ends)
    log_scale(axes, "y", *ends)
    axes.set(xlim=tuple(ends), ylim=tuple(ends), aspect="equal")
    axes.set_xlabel(f"measured peak memory ({unit})")
    axes.set_ylabel(f"predicted peak memory ({unit})")
    legend(figure, handles, columns=4)
    return figure
