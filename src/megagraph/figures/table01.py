"""Table I: the ablation of parallel strategies, as CSV, Markdown and LaTeX, and rendered for the HTML report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from megagraph.artifacts import RunSummary
from megagraph.config import FigureConfig, ParallelPlan
from megagraph.figures.data import load_summary, named_runs, strategy_of
from megagraph.figures.style import GB, PAGE_INCHES, new_figure

NO_VALUE = "-"


def collect(results: Path, spec: FigureConfig) -> pd.DataFrame:
    """One row per run in the order of the config: plan, seconds per epoch, peak GB (1e9 bytes) of each rank.

    ``time_ratio`` and ``memory_ratio`` (largest rank) are relative to row 1, NaN where a run or row 1 ran out of
    memory. ``best_time`` and ``best_memory`` mark the smallest values.
    """
    summaries = [load_summary(results, run) for run in named_runs(spec, "table1")]
    ranks = max(len(summary.peak_bytes) for summary in summaries)
    frame = pd.DataFrame([_row(summary, ranks) for summary in summaries])
    ok = frame["status"] == "ok"
    frame.loc[~ok, ["seconds_per_epoch", "peak_gb"]] = np.nan
    frame["time_ratio"] = frame["seconds_per_epoch"] / frame["seconds_per_epoch"].iloc[0]
    frame["memory_ratio"] = frame["peak_gb"] / frame["peak_gb"].iloc[0]
    frame["best_time"] = frame["seconds_per_epoch"] == frame["seconds_per_epoch"].min()
    frame["best_memory"] = frame["peak_gb"] == frame["peak_gb"].min()
    return frame


def _row(summary: RunSummary, ranks: int) -> dict[str, Any]:
    """Everything the table and the report say about one run."""
    plan = summary.plan
    memory = [peak / GB for peak in summary.peak_bytes] + [float("nan")] * (ranks - len(summary.peak_bytes))
    return {
        "run": summary.run,
        "strategy": strategy_name(plan),
        "pp": plan.pp,
        "cp": plan.cp,
        "dp": plan.dp,
        "layers": ";".join(map(str, plan.layers)),
        "microbatches": plan.microbatches,
        "attention": summary.attention,
        "status": summary.status,
        "seconds_per_epoch": summary.seconds_per_epoch.median,
        "peak_gb": max(summary.peak_bytes) / GB if summary.peak_bytes else float("nan"),
        **{f"mem{rank}_gb": value for rank, value in enumerate(memory)},
        "memory_source": summary.memory_source,
        "dataset": summary.dataset,
        "device": summary.provenance.device,
        "threads": summary.provenance.threads,
        "sequences_per_step": summary.sequences_per_step,
        "num_tokens": summary.num_tokens,
    }


def strategy_name(plan: ParallelPlan) -> str:
    """Strategy of a row: a pipeline says whether its stages have equal (even) or unequal numbers of layers.

    Counts that differ by at most one only because the sum does not divide are even.
    """
    name = strategy_of(plan.pp, plan.cp, plan.dp)
    if plan.pp == 1:
        return name
    return f"{name}, {'even' if max(plan.layers) - min(plan.layers) <= (sum(plan.layers) % plan.pp > 0) else 'uneven'}"


def cells(frame: pd.DataFrame, bold: Callable[[str], str]) -> pd.DataFrame:
    """The table as strings for a reader; `bold` marks the best time and memory."""
    memory = [name for name in frame.columns if name.startswith("mem") and name.endswith("_gb")]
    seconds = 2 if frame["seconds_per_epoch"].max() >= 1 else 4
    decimals = next(digits for digits in (2, 3, 4, 5) if frame["peak_gb"].max() * 10**digits >= 100 or digits == 5)

    def number(value: float, digits: int, best: bool = False) -> str:
        if np.isnan(value):
            return NO_VALUE
        return bold(f"{value:.{digits}f}") if best else f"{value:.{digits}f}"

    table = []
    for _, row in frame.iterrows():
        peak = row["peak_gb"]
        line = {
            "Strategy": row["strategy"],
            "(Ppp,Pcp,Pdp)": f"({row['pp']},{row['cp']},{row['dp']})",
            "Layers": "[" + str(row["layers"]).replace(";", ",") + "]",
            "K": str(row["microbatches"]),
            "s/epoch": "OOM" if row["status"] == "oom" else number(row["seconds_per_epoch"], seconds, row["best_time"]),
        }
        for rank, name in enumerate(memory):
            largest = row["best_memory"] and row[name] == peak
            line[f"Mem{rank} (GB)"] = number(row[name], decimals, largest)
        line["Time vs row 1"] = number(row["time_ratio"], 2)
        line["Memory vs row 1"] = number(row["memory_ratio"], 2)
        table.append(line)
    return pd.DataFrame(table)


def texts(frame: pd.DataFrame) -> dict[str, str]:
    """The table as Markdown (``.md``) and LaTeX with booktabs (``.tex``), the best values bold."""
    markdown = cells(frame, lambda text: f"**{text}**").to_markdown(index=False, disable_numparse=True) + "\n"
    table = cells(frame, lambda text: rf"\textbf{{{text}}}")
    names = [
        rf"$M_{{{name[3:-5]}}}$ (GB)" if name.startswith("Mem") and "GB" in name else name for name in table.columns
    ]
    names = [name.replace("(Ppp,Pcp,Pdp)", r"$(P_{pp},P_{cp},P_{dp})$") for name in names]
    table.columns = pd.Index(names)
    latex = table.to_latex(index=False, column_format="ll" + "r" * (len(names) - 2))
    return {".md": markdown, ".tex": latex}


def draw(frame: pd.DataFrame) -> Figure:
    """The table as a picture of page width; best values bold, runs out of memory in red."""
    plain = cells(frame, lambda text: text)
    marked = cells(frame, lambda text: f"**{text}**")
    figure, axes = new_figure(PAGE_INCHES, 0.25 * (len(plain) + 2))
    axes.set_axis_off()
    headers = [name.replace(" vs", "\nvs").replace(" (GB)", "\n(GB)") for name in plain.columns]
    widths = np.array(
        [
            max(len(text) for text in (*plain[name], *header.split("\n")))
            for name, header in zip(plain, headers, strict=True)
        ]
    )
    drawn = axes.table(
        cellText=plain.to_numpy().tolist(),
        colLabels=headers,
        colWidths=((widths + 2.0) / (widths + 2.0).sum()).tolist(),
        cellLoc="center",
        bbox=Bbox.unit(),
        edges="horizontal",
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7)
    for (row, column), cell in drawn.get_celld().items():
        cell.set_linewidth(0.5)
        cell.set_edgecolor("#888888")
        if row == 0:
            cell.set_height(cell.get_height() * 1.6)
        elif plain.iat[row - 1, column] == "OOM":
            cell.set_text_props(color="#D55E00", weight="bold")
        elif str(marked.iat[row - 1, column]).startswith("**"):
            cell.set_text_props(weight="bold")
    return figure
