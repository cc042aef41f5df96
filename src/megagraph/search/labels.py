"""Labels of partial pipelines: what a step's length needs to know of the stages from s to the last.

A label is a row of numbers. Adding a stage in front never decreases any of them, and never makes a label that is at
most another in every number worse than it: so the larger one can be dropped. `GPipeRule` gives the exact length.
`OneFOneBRule` gives the longest of some paths through the events of a 1F1B step, a lower bound that is nearly always
the length.

Legend: P stages, L layers, K micro-batches, c seconds of a link, w = min(K, P - s); M labels, N options of a stage,
f, b, a seconds of forward, backward and update; v = f + b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megagraph.search.makespan import warm_up

Array = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Options:
    """What a stage of n layers costs, by kind of stage: arrays [kinds, n], infinite where it does not fit; `kinds` [P]
    says which kind each stage is."""

    forward: Array
    backward: Array
    update: Array
    recompute: Counts
    size: Array
    kinds: Counts
    link: float
    microbatches: int


class Rule(Protocol):
    """How labels grow, and what they promise."""

    def start(self) -> Array:
        """The label [1, width] of no stage."""
        ...

    def extend(self, labels: Array, stage: int, f: Array, b: Array, a: Array) -> Array:
        """Labels [R, width] with one more stage in front; f, b, a [R]."""
        ...

    def bound(self, labels: Array, stage: int, layers: Counts) -> Array:
        """At least the length of every pipeline that completes a label [R, width] of stages `stage` .. P-1 by putting
        `layers` [R] into the stages before."""
        ...


class GPipeRule:
    """Labels (U, V, f_max, b_max): V sum of v and links, U sum of f and links, then the latest end of a stage counted
    from the turn; the step takes U + (K-1) f_max."""

    def __init__(self, options: Options) -> None:
        self._link, self._repeats = options.link, options.microbatches - 1
        self._num_stages = len(options.kinds)
        self._least_update = float(np.min(options.update[options.kinds[0]]))
        c = self._link
        f, b = options.forward, options.backward
        self._path = prefix(options, f + b + 2 * c, np.add)
        self._ahead = prefix(options, f + c, np.add)
        self._slow_f = prefix(options, np.maximum(f, c), np.maximum)
        self._slow_b = prefix(options, np.maximum(b, c), np.maximum)

    def start(self) -> Array:
        """No stage; links bound the rate of forwards from the beginning."""
        return np.array([[0.0, 0.0, self._link, 0.0]])

    def extend(self, labels: Array, stage: int, f: Array, b: Array, a: Array) -> Array:
        """See `Rule`."""
        c = self._link if stage < self._num_stages - 1 else 0.0
        U, V, slow_f, slow_b = labels.T
        path = V + f + b + 2 * c
        slow = np.maximum(np.maximum(slow_b, b), c)
        end = np.maximum(U + f + c, path + self._repeats * slow + a)
        return np.stack([end, path, np.maximum(slow_f, f), slow], axis=1)

    def bound(self, labels: Array, stage: int, layers: Counts) -> Array:
        """See `Rule`; exact where no stage is left."""
        U, V, slow_f, slow_b = labels.T
        if stage == 0:
            return np.asarray(U + self._repeats * slow_f)
        path, ahead = V + self._path[stage][layers], U + self._ahead[stage][layers]
        slow_f, slow_b = (
            np.maximum(slow_f, self._slow_f[stage][layers]),
            np.maximum(slow_b, self._slow_b[stage][layers]),
        )
        with np.errstate(invalid="ignore"):  # one micro-batch, and no way to place the layers: 0 times infinity
            bound = np.maximum(ahead, path + self._repeats * slow_b + self._least_update) + self._repeats * slow_f
        return np.asarray(np.where(np.isfinite(path), bound, np.inf))


class OneFOneBRule:
    """Labels (U, Y, E, D, V) of stages s .. P-1, with V as in GPipe.

    E is a path from the first forward of stage s to its first backward, D one from the last forward to the last
    backward, Y the longest path found to the last backward of stage s, U as Y but with updates and, upstream, forwards
    alone. Between E and D a stage is busy with every backward and forward of its window; or round trips of a whole
    window of w micro-batches follow each other.
    """

    def __init__(self, options: Options) -> None:
        self._link, self._microbatches = options.link, options.microbatches
        self._num_stages = len(options.kinds)
        self._least_update = float(np.min(options.update[options.kinds[0]]))
        c, busy = self._link, options.forward + options.backward
        windows = [self._microbatches - self._window(stage) for stage in range(self._num_stages)]
        self._path = prefix(options, busy + 2 * c, np.add)
        self._ahead = prefix(options, options.forward + c, np.add)
        self._slow = prefix(options, busy, np.maximum, windows)

    def _window(self, stage: int) -> int:
        return warm_up(self._num_stages, stage, self._microbatches)

    def start(self) -> Array:
        """No stage."""
        return np.zeros((1, 5))

    def extend(self, labels: Array, stage: int, f: Array, b: Array, a: Array) -> Array:
        """See `Rule`."""
        c = self._link if stage < self._num_stages - 1 else 0.0
        K, w = self._microbatches, self._window(stage)
        U, Y, E, D, V = labels.T
        v = f + b
        entry = np.maximum(w * f, f + 2 * c + E) + b
        leave = np.maximum(w * b, b + 2 * c + D) + f
        path = V + v + 2 * c
        busy = entry + (K - 1 - w) * v + leave if w < K else np.maximum(entry + (w - 1) * b, leave + (w - 1) * f)
        trips = (K - 1) // w
        round_trips = (trips + 1) * path + ((K - 1) % w * v if trips else 0.0)
        longest = np.maximum(np.maximum(Y + v + 2 * c, busy), round_trips)
        return np.stack([np.maximum(U + f + c, longest + a), longest, entry, leave, path], axis=1)

    def bound(self, labels: Array, stage: int, layers: Counts) -> Array:
        """See `Rule`."""
        U, Y, _, _, V = labels.T
        if stage == 0:
            return np.asarray(U)
        ahead = self._path[stage][layers]
        upstream = 2 * V + ahead + self._slow[stage][layers]
        back = np.maximum(Y + ahead, upstream) + self._least_update
        return np.asarray(np.maximum(U + self._ahead[stage][layers], back))


def prefix(options: Options, values: Array, join: np.ufunc, weights: list[int] | None = None) -> list[Array]:
    """For every s the least join [L + 1] of `values` [kinds, n] over the stages before s, by layers that they hold;
    infinite where none is possible. `weights` multiply the values of each stage."""
    most = values.shape[1] - 1
    num_layers = most + len(options.kinds) - 1
    tables = [np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)]
    # row l of `at` holds l - n for n = 1 .. most; those below zero read the infinite entry that is appended
    at = np.arange(num_layers + 1)[:, None] - np.arange(1, most + 1)
    at[at < 0] = num_layers + 1
    for stage, kind in enumerate(options.kinds[:-1]):
        own = values[kind, 1:]
        if weights is not None:
            own = np.where(np.isfinite(own), weights[stage] * np.where(np.isfinite(own), own, 0.0), np.inf)
        tables.append(join(np.append(tables[-1], np.inf)[at], own).min(axis=1))
    return tables
