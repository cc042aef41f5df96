"""Figure 8(b): test accuracy against epoch, one curve per run: thin raw values, bold running mean."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megagraph.config import FigureConfig, UserError
from megagraph.figures.data import load_epochs, load_summary, named_runs
from megagraph.figures.style import CONTROLS, SYSTEM_COLORS, SYSTEM_NAMES, legend, new_figure

SMOOTHED_SHARE = 0.1
LEGEND_CHARACTERS = 60
Dash = Literal["-", "--", "-.", ":"]
DASHES: tuple[Dash, ...] = ("-", "-.", ":")
CONTROL_DASHES: tuple[Dash, ...] = ("--", "-.", ":")


def collect(results: Path, spec: FigureConfig) -> pd.DataFrame:
    """One row per run and evaluated epoch: accuracy in percent, raw and as a centred running mean.

    The window of the mean is a tenth of the evaluated epochs, odd, at least one (column ``window``).
    """
    curves = []
    for run in named_runs(spec, "fig8b"):
        summary = load_summary(results, run)
        if summary.status == "oom":
            raise UserError(f"run {run}: status is oom, so there is no curve: leave it out of figures.fig8b.runs")
        epochs = load_epochs(results, run).dropna(subset="test_accuracy")
        if epochs.empty:
            raise UserError(f"train/{run}/epochs.csv: no epoch has a test accuracy: lower train.eval_every")
        percent = epochs["test_accuracy"] * 100.0
        window = int(len(epochs) * SMOOTHED_SHARE) // 2 * 2 + 1
        curves.append(
            pd.DataFrame(
                {
                    "run": run,
                    "system": summary.system,
                    "dataset": summary.dataset,
                    "epoch": epochs["epoch"],
                    "test_percent": percent,
                    "smoothed_percent": percent.rolling(window, center=True, min_periods=1).mean(),
                    "window": window,
                }
            )
        )
    return pd.concat(curves, ignore_index=True)


def draw(frame: pd.DataFrame) -> Figure:
    """Accuracy in percent over epochs. Runs of one system share its colour and differ by line style."""
    figure, axes = new_figure()
    handles: list[Line2D] = []
    drawn: dict[str, int] = {}
    several = frame.groupby("system")["run"].nunique()
    for run, curve in frame.groupby("run", sort=False):
        system = str(curve["system"].iloc[0])
        order = drawn.get(system, 0)
        drawn[system] = order + 1
        color = SYSTEM_COLORS.get(system, "#000000")
        dashes = (CONTROL_DASHES if system in CONTROLS else DASHES)[order % 3]
        axes.plot(curve["epoch"], curve["test_percent"], color=color, linewidth=0.5, alpha=0.45)
        axes.plot(curve["epoch"], curve["smoothed_percent"], color=color, linewidth=1.5, linestyle=dashes)
        name = SYSTEM_NAMES.get(system, system)
        label = f"{name} ({run})" if several[system] > 1 else name
        handles.append(Line2D([], [], color=color, linewidth=1.5, linestyle=dashes, label=label))
    handles.append(Line2D([], [], color="#666666", linewidth=0.5, alpha=0.6, label="raw"))
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy (%)")
    axes.set_xlim(0, float(frame["epoch"].max()))
    longest = max(len(str(handle.get_label())) for handle in handles)
    legend(figure, handles, columns=max(1, min(4, LEGEND_CHARACTERS // (longest + 8))))
    return figure
