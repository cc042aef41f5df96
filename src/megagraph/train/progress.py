"""What a run has done so far, and how a person hears of it.

A progress bar on a terminal, one line per epoch elsewhere; `epochs.csv` and `summary.json` at the end.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm import tqdm

log = logging.getLogger("megagraph.train")
Item = TypeVar("Item")

MEMORY_EPOCHS = 2
"""Peak memory is counted over the first epochs: from the second step on, the optimiser state is there too."""


@dataclass
class Epoch:
    """One row of `epochs.csv`; accuracies are None where the epoch was not evaluated."""

    epoch: int
    loss: float
    seconds: float
    lr: float
    val_accuracy: float | None = None
    test_accuracy: float | None = None


@dataclass
class Progress:
    """Finished epochs; JSON-able, so that it travels in checkpoints."""

    epochs: list[Epoch] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Finished epochs."""
        return len(self.epochs)

    @property
    def evaluated(self) -> list[Epoch]:
        """Epochs with accuracies."""
        return [epoch for epoch in self.epochs if epoch.val_accuracy is not None]

    @property
    def best(self) -> Epoch:
        """The selection rule of every system: best validation accuracy, the earliest if several."""
        return max(self.evaluated, key=lambda epoch: (epoch.val_accuracy or 0.0, -epoch.epoch))

    def steady_seconds(self) -> list[float]:
        """Training seconds per epoch without the first ones, which warm up and count memory."""
        seconds = [epoch.seconds for epoch in self.epochs]
        return seconds[MEMORY_EPOCHS:] or seconds

    def dump(self) -> list[dict[str, Any]]:
        """Rows as plain values."""
        return [asdict(epoch) for epoch in self.epochs]

    @classmethod
    def load(cls, rows: list[dict[str, Any]]) -> Progress:
        """The inverse of `dump`."""
        return cls([Epoch(**row) for row in rows])


def watched(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items of a long loop, with a bar on a terminal and a line each elsewhere; silent away from rank 0."""
    speaks = dist.get_rank() == 0
    terminal = speaks and sys.stderr.isatty()
    for number, item in enumerate(tqdm(items, desc=what, disable=not terminal), 1):
        if speaks and not terminal:
            log.info("%s %d/%d", what, number, len(items))
        yield item


class Reporter:
    """Tells of epochs: a bar on a terminal, a log line each elsewhere; silent away from rank 0."""

    def __init__(self, run: str, total: int, done: int, active: bool) -> None:
        self._run, self._total = run, total
        terminal = active and sys.stderr.isatty()
        self._lines = active and not terminal
        self._bar = tqdm(total=total, initial=done, desc=run, unit="epoch", disable=not terminal)

    def tell(self, epoch: Epoch) -> None:
        """One epoch is over."""
        accuracy = "" if epoch.val_accuracy is None else f" val {epoch.val_accuracy:.4f} test {epoch.test_accuracy:.4f}"
        if self._lines:
            log.info(
                "%s epoch %d/%d loss %.4f%s %.2f s",
                self._run,
                epoch.epoch,
                self._total,
                epoch.loss,
                accuracy,
                epoch.seconds,
            )
        self._bar.set_postfix_str(f"loss {epoch.loss:.4f}{accuracy}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        """The run is over."""
        self._bar.close()
