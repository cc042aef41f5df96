"""The best cut of L layers into the stages of one cell: labels, dominance and bounds, exact or with a proven gap.

Legend: P stages, L layers, n layers of a stage, M labels; seconds of a step throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megagraph.search.labels import GPipeRule, OneFOneBRule, Options, Rule
from megagraph.search.makespan import Schedule, makespan

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

MAX_LABELS = 2000
"""Labels of a stage; where there would be more, similar ones are merged, and the sweep gives a bound only."""
MAX_ROWS = 400_000
"""Labels times options of a stage in a list of cuts; where there would be more, there is no list."""
MERGE = 1e-4
"""Merged labels differ by at most this part of a step in any number, doubled until there is room."""
TOLERANCE = 1e-12
CHUNK = 512


@dataclass(frozen=True)
class Outcome:
    """The best cut found below the given bound (None: there is none), and `low`, which no cut of the cell is below.

    `finished`: listing all cuts (`list_cuts`) cannot find a better one.
    """

    layers: tuple[int, ...] | None
    seconds: float
    low: float
    finished: bool = True
    labels: int = 0
    simulated: int = 0


@dataclass(frozen=True)
class _Swept:
    """Complete cuts [R, P] with their bounds [R]; number of labels kept."""

    layers: Counts
    bounds: Array
    labels: int


def first_cut(options: Options, schedule: Schedule, num_layers: int) -> Outcome:
    """A good cut at once: the one whose slowest stage is fastest. It is the only one of a single stage."""
    cut = _bottleneck(options, num_layers)
    if cut is None:
        return Outcome(None, np.inf, np.inf)
    seconds = float(evaluate(options, schedule, cut[None])[0])
    alone = len(cut) == 1
    return Outcome(tuple(map(int, cut)), seconds, seconds if alone else 0.0, finished=alone, simulated=1)


def best_cut(options: Options, schedule: Schedule, num_layers: int, below: float) -> Outcome:
    """The fastest cut among those faster than `below`, by one sweep with dominance.

    GPipe labels give the length itself, so the answer is exact unless labels had to be merged. 1F1B labels give a lower
    bound: the cut of least bound is simulated and improved, and if its length is above its bound, `list_cuts` has to
    decide.
    """
    rule = GPipeRule(options) if schedule == "gpipe" else OneFOneBRule(options)
    swept = _sweep(rule, options, num_layers, below, dominance=True)
    assert swept is not None, "a sweep with dominance makes room for itself"
    low = float(min(swept.bounds.min(initial=np.inf), below))
    best, seconds, simulated = None, below, 0
    if len(swept.bounds):
        cut = swept.layers[int(np.argmin(swept.bounds))]
        best, seconds = _better(options, schedule, cut[None], None, below)
        simulated = 1
    if low < seconds * (1 - TOLERANCE) and best is not None:
        best, seconds, tried = _climb(options, schedule, best, seconds)
        simulated += tried
    proven = low > seconds * (1 - TOLERANCE)
    finished = proven or schedule == "gpipe"
    return Outcome(best, seconds if best else np.inf, min(low, seconds), finished, swept.labels, simulated)


def list_cuts(options: Options, num_layers: int, below: float) -> Outcome:
    """The fastest cut of a 1F1B cell among those faster than `below`: all whose bound is below it, simulated. Where
    they are too many nothing is found, and nothing new is known (`low` 0)."""
    swept = _sweep(OneFOneBRule(options), options, num_layers, below, dominance=False)
    if swept is None:
        return Outcome(None, np.inf, 0.0)
    best, seconds = _better(options, "1f1b", swept.layers, None, below)
    return Outcome(best, seconds if best else np.inf, seconds, True, swept.labels, len(swept.bounds))


def _climb(
    options: Options, schedule: Schedule, best: tuple[int, ...], seconds: float
) -> tuple[tuple[int, ...], float, int]:
    """Move one layer between any two stages as long as that helps; the number of cuts tried comes last."""
    num_stages, tried = len(best), 0
    moves = np.eye(num_stages, dtype=np.int64)[:, None] - np.eye(num_stages, dtype=np.int64)
    moves = moves[~np.eye(num_stages, dtype=bool)]
    while True:
        near = np.array(best) + moves
        near = near[((near >= 1) & (near < options.size.shape[1])).all(axis=1)]
        tried += len(near)
        found, value = _better(options, schedule, near, best, seconds)
        if found is None or value >= seconds:
            return best, seconds, tried
        best, seconds = found, value


def evaluate(options: Options, schedule: Schedule, layers: Counts) -> Array:
    """Seconds of a step [R] of cuts [R, P]."""
    at = options.kinds, layers
    parts = options.forward[at], options.backward[at], options.update[at]
    return makespan(schedule, *parts, microbatches=options.microbatches, link=options.link)


def _better(
    options: Options, schedule: Schedule, layers: Counts, best: tuple[int, ...] | None, seconds: float
) -> tuple[tuple[int, ...] | None, float]:
    """The fastest of some cuts, or `best` where none is faster."""
    for begin in range(0, len(layers), CHUNK * 8):
        part = layers[begin : begin + CHUNK * 8]
        found = evaluate(options, schedule, part)
        at = int(np.argmin(found))
        if found[at] < seconds:
            best, seconds = tuple(map(int, part[at])), float(found[at])
    return best, seconds


def _sweep(rule: Rule, options: Options, num_layers: int, below: float, *, dominance: bool) -> _Swept | None:
    """Labels from the last stage to the first; those whose bound is not below `below` are dropped. Without dominance
    None where they are too many."""
    labels, used = rule.start(), np.zeros(1, dtype=np.int64)
    chosen = np.zeros((1, 0), dtype=np.int64)
    kept, bounds = 0, np.zeros(1)
    for stage in reversed(range(len(options.kinds))):
        kind = options.kinds[stage]
        n = np.flatnonzero(np.isfinite(options.forward[kind]))
        if not dominance and len(labels) * len(n) > MAX_ROWS:
            return None
        total = used[:, None] + n
        row, column = np.nonzero(total == num_layers if stage == 0 else total <= num_layers - stage)
        count, total = n[column], total[row, column]
        grown = rule.extend(
            labels[row], stage, options.forward[kind, count], options.backward[kind, count], options.update[kind, count]
        )
        bounds = rule.bound(grown, stage, num_layers - total)
        keep = np.flatnonzero(bounds < below * (1 - TOLERANCE))
        if dominance:
            keep = keep[undominated(grown[keep], total[keep])]
            grown, keep = _merged(grown, total, bounds, keep)
            bounds = rule.bound(grown, stage, num_layers - total) if len(keep) else bounds
        labels, used, bounds = grown[keep], total[keep], bounds[keep]
        chosen = np.concatenate([count[keep][:, None], chosen[row[keep]]], axis=1)
        kept += len(keep)
    return _Swept(chosen, bounds, kept)


def _merged(labels: Array, groups: Counts, bounds: Array, keep: Counts) -> tuple[Array, Counts]:
    """At most `MAX_LABELS` of the rows `keep`: similar ones of a group become one, with the least of each number, so
    that what it promises holds for all of them. It stands for the cut of its least bound."""
    step, room = MERGE, max(MAX_LABELS, len(np.unique(groups[keep])))
    while len(keep) > room:
        keep = keep[np.argsort(bounds[keep], kind="stable")]
        width = step * float(bounds[keep].max())
        cells = np.column_stack([groups[keep], np.floor(labels[keep] / width)])
        _, first, inverse = np.unique(cells, axis=0, return_index=True, return_inverse=True)
        least = np.full((len(first), labels.shape[1]), np.inf)
        np.minimum.at(least, inverse.reshape(-1), labels[keep])
        labels = labels.copy()
        keep = keep[first]
        labels[keep] = least
        step *= 2
    return labels, keep


def undominated(labels: Array, groups: Counts) -> Counts:
    """Rows [R] that no other row of their group is at most in every number; of equal rows the first."""
    order = np.lexsort((*labels.T[::-1], groups))
    sorted_labels, sorted_groups = labels[order], groups[order]
    ends = np.flatnonzero(np.diff(sorted_groups)) + 1
    if len(order) <= CHUNK // 2:
        same = sorted_groups[:, None] == sorted_groups
        return order[~_dominated(sorted_labels, sorted_labels, same & _before(len(order)))]
    kept = [
        begin + _front(sorted_labels[begin:end])
        for begin, end in zip([0, *ends.tolist()], [*ends.tolist(), len(order)], strict=True)
    ]
    return order[np.concatenate(kept)]


def _front(labels: Array) -> Counts:
    """Rows of lexicographically sorted labels that no earlier one dominates, in chunks."""
    kept = np.zeros(0, dtype=np.int64)
    for begin in range(0, len(labels), CHUNK):
        rows = np.arange(begin, min(begin + CHUNK, len(labels)))
        own = rows[~_dominated(labels[kept], labels[rows], np.ones((len(kept), len(rows)), dtype=bool))]
        inside = ~_dominated(labels[own], labels[own], _before(len(own)))
        kept = np.concatenate([kept, own[inside]])
    return kept


def _before(count: int) -> Flags:
    """[i, j]: i stands before j."""
    return np.triu(np.ones((count, count), dtype=bool), 1)


def _dominated(by: Array, labels: Array, allowed: Flags) -> Flags:
    """Which of `labels` some row of `by` is at most in every number; sorted rows can only be dominated from before."""
    worse = allowed
    for own, other in zip(by.T, labels.T, strict=True):
        worse = worse & (own[:, None] <= other)
    return np.asarray(worse.any(axis=0))


def _bottleneck(options: Options, num_layers: int) -> Counts | None:
    """The cut [P] whose slowest stage (forward and backward) is fastest; None where no cut fits."""
    busy = options.forward + options.backward
    most, num_stages = busy.shape[1] - 1, len(options.kinds)
    at = np.arange(num_layers + 1)[:, None] - np.arange(1, most + 1)
    at[at < 0] = num_layers + 1
    least = np.where(np.arange(num_layers + 1) == 0, -np.inf, np.inf)
    choices = []
    for kind in options.kinds:
        slowest = np.maximum(np.append(least, np.inf)[at], busy[kind, 1:])
        choices.append(slowest.argmin(axis=1) + 1)
        least = slowest.min(axis=1)
    if not np.isfinite(least[num_layers]):
        return None
    layers, rest = np.zeros(num_stages, dtype=np.int64), num_layers
    for stage in reversed(range(num_stages)):
        layers[stage] = choices[stage][rest]
        rest -= layers[stage]
    return layers
