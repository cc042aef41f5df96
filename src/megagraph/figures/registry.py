"""Every figure and table by its name in the paper, and `make`, which writes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from megagraph.config import FigureConfig, UserError
from megagraph.figures import fig08b, fig09a, fig09b, fig10, style, table01
from megagraph.figures.data import figure_config


def _no_texts(frame: pd.DataFrame) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class FigureEntry:
    """How one figure is read (`collect`), drawn (`draw`), and what text files it has beside its CSV (`texts`)."""

    collect: Callable[[Path, FigureConfig], pd.DataFrame]
    draw: Callable[[pd.DataFrame], Figure]
    texts: Callable[[pd.DataFrame], dict[str, str]] = _no_texts


FIGURES: Mapping[str, FigureEntry] = {
    "fig8b": FigureEntry(fig08b.collect, fig08b.draw),
    "fig9a": FigureEntry(fig09a.collect, fig09a.draw),
    "fig9b": FigureEntry(fig09b.collect, fig09b.draw),
    "fig10": FigureEntry(fig10.collect, fig10.draw),
    "table1": FigureEntry(table01.collect, table01.draw, table01.texts),
}


def make(name: str, results: Path, out: Path) -> list[Path]:
    """Draw figure `name` from the files under `results` and write PDF, PNG, CSV (and texts) into `out`.

    The CSV holds exactly what is drawn. The same inputs give the same bytes. Returns the files written. Raises
    `UserError` for an unknown name or a missing or broken input; then nothing is written.
    """
    if name not in FIGURES:
        raise UserError(f"figure {name!r} is unknown: choose one of {', '.join(FIGURES)}")
    entry = FIGURES[name]
    frame = entry.collect(results, figure_config(results, name))
    texts = {".csv": frame.to_csv(index=False, lineterminator="\n"), **entry.texts(frame)}
    with style.style():
        return style.save(entry.draw(frame), out / name, texts)
