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

from megagraph.parallel.checkpoint import Position

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
    """How far a run is; JSON-able, so that it travels in checkpoints.

    `losses` and `seconds` are those of the finished steps of the epoch under way. `untimed` are epochs whose seconds
    say nothing about the run as it is now: the first after each start, and all before a change of layout. `start` is
    the first epoch since the last start.
    """

    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    untimed: list[int] = field(default_factory=lambda: list(range(1, 1 + MEMORY_EPOCHS)))
    start: int = 1

    @property
    def done(self) -> int:
        """Finished epochs."""
        return len(self.epochs)

    @property
    def position(self) -> Position:
        """Finished epochs and steps."""
        return Position(len(self.epochs), len(self.losses))

    @property
    def evaluated(self) -> list[Epoch]:
        """Epochs with accuracies."""
        return [epoch for epoch in self.epochs if epoch.val_accuracy is not None]

    @property
    def best(self) -> Epoch:
        """The selection rule of every system: best validation accuracy, the earliest if several."""
        return max(self.evaluated, key=lambda epoch: (epoch.val_accuracy or 0.0, -epoch.epoch))

    def add_step(self, loss: float, seconds: float) -> None:
        """One more step of the epoch under way is over."""
        self.losses.append(loss)
        self.seconds += seconds

    def close_epoch(self, lr: float) -> Epoch:
        """The row of the epoch under way, all of whose steps are over; its loss is their mean."""
        row = Epoch(self.done + 1, sum(self.losses) / len(self.losses), self.seconds, lr)
        self.losses, self.seconds = [], 0.0
        return row

    def restart(self, same_layout: bool) -> None:
        """The run goes on in another process: its next epochs warm up, those of another layout are not its own."""
        self.start = self.done + 1
        foreign = [] if same_layout else range(1, self.start)
        self.untimed = sorted({*self.untimed, *foreign, *range(self.start, self.start + MEMORY_EPOCHS)})

    def steady_seconds(self) -> list[float]:
        """Training seconds of the epochs that are timed; of all since the last start where none is."""
        timed = [epoch.seconds for epoch in self.epochs if epoch.epoch not in self.untimed]
        since = self.epochs[self.start - 1 :] or self.epochs
        return timed or [epoch.seconds for epoch in since]

    def rows(self) -> list[dict[str, Any]]:
        """Finished epochs as plain values."""
        return [asdict(epoch) for epoch in self.epochs]

    def dump(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    @classmethod
    def load(cls, state: dict[str, Any]) -> Progress:
        """The inverse of `dump`."""
        return cls(**state | {"epochs": [Epoch(**row) for row in state["epochs"]]})


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
