"""The look of every figure, and how one is saved: same sizes, colours and markers, bytes that repeat.

Figures are drawn with `Figure` and the Agg canvas only: no pyplot, so no state outlives a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from megagraph.files import atomic_path

COLUMN_INCHES = 3.4
PAGE_INCHES = 7.0
PNG_DPI = 300
GB = 1e9

SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.0,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
    "svg.hashsalt": "megagraph",
    "savefig.dpi": PNG_DPI,
}

# seaborn's `colorblind` palette. Controls are dark and dashed, so that no hue is spent on them.
SYSTEM_COLORS: Mapping[str, str] = {
    "megagraph": "#0173B2",
    "torchgt": "#DE8F05",
    "ansgt": "#949494",
    "gcn": "#444444",
    "sage": "#444444",
    "mlp": "#444444",
}
SYSTEM_NAMES: Mapping[str, str] = {
    "megagraph": "MegaGraph",
    "torchgt": "TorchGT",
    "ansgt": "ANS-GT",
    "gcn": "GCN",
    "sage": "GraphSAGE",
    "mlp": "MLP",
}
CONTROLS = ("gcn", "sage", "mlp")

# The two last colours are darkened: the palette's yellow and pale pink vanish as hollow markers.
STRATEGY_STYLES: Mapping[str, tuple[str, str]] = {
    "single": ("#000000", "o"),
    "PP": ("#029E73", "s"),
    "CP": ("#D55E00", "^"),
    "DP": ("#CC78BC", "D"),
    "PP+DP": ("#CA9161", "P"),
    "CP+DP": ("#56B4E9", "v"),
    "PP+CP": ("#8C8000", "X"),
    "PP+CP+DP": ("#A0527A", "h"),
}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's defaults plus `SETTINGS` inside the block; whatever the user's matplotlibrc says is ignored."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        yield


def new_figure(width: float = COLUMN_INCHES, height: float = 2.4) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` inches with one axes and constrained layout."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def legend(figure: Figure, handles: list[Line2D], columns: int) -> None:
    """The legend above the axes, outside of them: inside it collides with points."""
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)


def marks(shape: str, size: float, color: str, *, edge: float = 0.0, **other: Any) -> dict[str, Any]:
    """Arguments of `Axes.plot` and `Line2D` for points without a line; `edge` is the width of their outline."""
    look = {"marker": shape, "markersize": size, "color": color, "markeredgewidth": edge, "linestyle": "none"}
    return look | other


def memory_unit(largest_bytes: float) -> tuple[float, str]:
    """Divisor and name of the unit that keeps the largest value readable: GB (1e9), MB (1e6) or kB (1e3)."""
    for divisor, name in ((GB, "GB"), (1e6, "MB")):
        if largest_bytes >= 0.5 * divisor:
            return divisor, name
    return 1e3, "kB"


def time_unit(largest_seconds: float) -> tuple[float, str]:
    """Divisor and name of the unit that keeps the largest value readable: s, ms or µs."""
    for divisor, name in ((1.0, "s"), (1e-3, "ms")):
        if largest_seconds >= 0.5 * divisor:
            return divisor, name
    return 1e-6, "µs"


def log_scale(axes: Axes, name: Literal["x", "y"], low: float, high: float) -> None:
    """A logarithmic axis from `low` to `high` with plain numbers at few ticks; the default's collide below a decade."""
    axes.set(**{f"{name}scale": "log"})
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high < 100 * low else (1,)
    ticks = [step * 10.0**power for power in decades for step in steps if low <= step * 10.0**power <= high]
    if len(ticks) < 3:
        ticks = sorted({float(f"{low * (high / low) ** (index / 4):.2g}") for index in range(5)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def save(figure: Figure, stem: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write ``stem.pdf``, ``stem.png`` (300 dpi) and one text file per suffix in `texts`, all or none.

    Dates and software versions are left out of the files, so the same figure gives the same bytes.
    """
    targets = [stem.with_name(stem.name + suffix) for suffix in (".pdf", ".png", *texts)]
    with ExitStack() as stack:
        parts = [stack.enter_context(atomic_path(target)) for target in targets]
        figure.savefig(parts[0], format="pdf", metadata={"CreationDate": None})
        figure.set_layout_engine("none")  # both pictures keep the one layout
        figure.savefig(parts[1], format="png", dpi=PNG_DPI, metadata={"Software": None})
        for part, text in zip(parts[2:], texts.values(), strict=True):
            part.write_text(text)
    return targets
