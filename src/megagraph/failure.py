"""Why a job of several ranks ended: each rank leaves a word, the launcher reads them and names the cause.

A rank that raises leaves its traceback, one that is stopped from outside leaves where it stood; one that was killed
leaves nothing, which says it too. The peers of a lost or silent rank only report that they waited for it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_WAITED = ("timed out", "timeout", "connection closed", "connection reset", "connect failure", "broken pipe")


@dataclass(frozen=True)
class Report:
    """What one rank left: a traceback (`raised`), the stack where it was stopped (`stopped`), or neither."""

    rank: int
    raised: str = ""
    stopped: str = ""

    @property
    def only_waited(self) -> bool:
        """Whether the rank fell over another one that did not answer."""
        last = self.raised.strip().rsplit("\n", 1)[-1].lower()
        return any(word in last for word in _WAITED)


@contextmanager
def leaving_word(folder: Path) -> Iterator[None]:
    """In a rank: leave a traceback if the block raises, or the stack if the launcher stops the process."""
    rank = os.environ.get("RANK", "0")
    with (folder / f"{rank}.stopped").open("w") as stack:
        faulthandler.register(signal.SIGTERM, file=stack, chain=True)
        try:
            yield
        except Exception:
            (folder / f"{rank}.raised").write_text(traceback.format_exc())
            raise
        finally:
            faulthandler.unregister(signal.SIGTERM)


def read_reports(folder: Path, tasks: int) -> list[Report]:
    """The reports of all ranks, in rank order."""

    def text(rank: int, kind: str) -> str:
        path = folder / f"{rank}.{kind}"
        return path.read_text() if path.is_file() else ""

    return [Report(rank, text(rank, "raised"), text(rank, "stopped")) for rank in range(tasks)]


def cause(reports: list[Report]) -> str:
    """One line that names the rank the job failed of, and how."""
    for report in reports:
        if report.raised and not report.only_waited:
            return f"rank {report.rank} raised {report.raised.strip().rsplit(chr(10), 1)[-1]}"
    lost = [report for report in reports if not report.raised and not report.stopped]
    if lost:
        return f"rank {lost[0].rank} died without a word: it was killed, for example by the system for its memory"
    waiting = [report for report in reports if report.stopped]
    if waiting and any(report.raised for report in reports):
        return f"rank {waiting[0].rank} was silent: it stood at {_innermost(waiting[0].stopped)}"
    if any(report.raised for report in reports):
        return f"rank {reports[0].rank} raised {reports[0].raised.strip().rsplit(chr(10), 1)[-1]}"
    return "all ranks were stopped from outside"


def _innermost(stack: str) -> str:
    """The first frame of a faulthandler dump: ``file:line in function``."""
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File")]
    if not frames:
        return "an unknown place"
    name, _, place = frames[0].removeprefix("File ").partition(", line ")
    return f"{name.strip(chr(34))}:{place}"
