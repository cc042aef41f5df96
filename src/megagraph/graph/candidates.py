"""The candidates of a batch of centres: rows of several heuristics, normalised and merged into one pool per centre.

Shapes: V nodes, T centres, E entries of their rows, H heuristics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megagraph.config import SamplingConfig
from megagraph.graph.heuristics import Heuristic, Nearest, OneHop, PageRank, Rows, TwoHop
from megagraph.graph.jit import kernel
from megagraph.graph.pagerank import find
from megagraph.graph.store import Graph

MIN_ENTRIES = 32
ENTRIES_PER_DRAW = 8


@dataclass(frozen=True)
class Candidates:
    """The nodes that may stand beside each of T centres, in CSR form; a centre is never among its own.

    `indptr` [T+1] and `indices` [E] are the union of the heuristics' supports, in no order. Row h of `values_HE` is
    heuristic h, each centre's values summing to 1 (0 where the heuristic knows no node): s_h / sum(s_h) of ans-gt 1.4.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values_HE: NDArray[np.float32]

    def mixture(self, weights_H: NDArray[np.float64]) -> NDArray[np.float32]:
        """The sampling weight s = sum_h p_h s_h / sum(s_h) [E] of every candidate, for p = `weights_H`."""
        return (weights_H.astype(np.float32) @ self.values_HE).astype(np.float32, copy=False)


class CandidateSource(Protocol):
    """Makes candidates when they are needed."""

    names: tuple[str, ...]

    def of(self, centres_T: NDArray[np.int64]) -> Candidates:
        """Candidates of centres; those of a centre are a pure function of it."""


class HeuristicSource:
    """Candidates from named heuristics of a graph; nothing is computed before a centre is asked for."""

    def __init__(self, heuristics: dict[str, Heuristic]) -> None:
        self.names = tuple(heuristics)
        self._heuristics = heuristics

    @classmethod
    def from_config(cls, graph: Graph, sampling: SamplingConfig, *, by_column: bool = False) -> HeuristicSource:
        """The heuristics that `sampling.heuristics` names, in its order; `by_column`: see `PageRank`.

        PageRank and k-NN keep `ENTRIES_PER_DRAW` nodes per sampled node, at least `MIN_ENTRIES`.
        """
        top_k = max(MIN_ENTRIES, ENTRIES_PER_DRAW * sampling.num_sampled)
        rule = {"restart": sampling.ppr_restart, "epsilon": sampling.ppr_epsilon}
        makers: dict[str, Callable[[], Heuristic]] = {
            "ppr": lambda: PageRank(graph, **rule, top_k=top_k, by_column=by_column),
            "one_hop": lambda: OneHop(graph),
            "two_hop": lambda: TwoHop(graph),
            "knn": lambda: Nearest(graph, top_k),
        }
        return cls({name: makers[name]() for name in sampling.heuristics})

    def of(self, centres_T: NDArray[np.int64]) -> Candidates:
        """See `CandidateSource.of`."""
        centres_T = np.ascontiguousarray(centres_T, np.int64)
        return merge([heuristic.rows(centres_T) for heuristic in self._heuristics.values()], centres_T)


def merge(rows: Sequence[Rows], centres_T: NDArray[np.int64]) -> Candidates:
    """`Candidates` from the rows of each heuristic for the same centres."""
    offsets_H = np.cumsum([0] + [len(columns) for _, columns, _ in rows])
    starts_HT = np.stack([starts + offset for (starts, _, _), offset in zip(rows, offsets_H, strict=False)])
    columns = np.concatenate([columns for _, columns, _ in rows])
    values = np.concatenate([values for _, _, values in rows])
    indices = np.empty(len(columns), np.int32)
    values_HE = np.zeros((len(rows), len(columns)), np.float32)
    indptr = np.zeros(len(centres_T) + 1, np.int64)
    widest = int(np.diff(starts_HT).sum(axis=0).max(initial=0))
    table = np.full(1 << (2 * widest).bit_length(), -1, np.int64)
    _merge(centres_T, starts_HT, columns, values, table, indptr, indices, values_HE)
    return Candidates(indptr, indices[: indptr[-1]], values_HE[:, : indptr[-1]])


@kernel()
def _merge(
    centres_T: NDArray,
    starts_HT: NDArray,
    columns: NDArray,
    values: NDArray,
    table: NDArray,
    indptr: NDArray,
    indices: NDArray,
    values_HE: NDArray,
) -> None:
    """Unite the rows (int32 `columns`, float64 `values`, int64 `starts_HT`) of each centre, each scaled to sum 1.

    Values of zero and the centre itself are dropped; the outputs have room for every entry, and the int64 `table`
    (see `find`), free on entry and on return, for twice those of a centre.
    """
    num_heuristics = len(starts_HT)
    for row in range(len(centres_T)):
        start = end = indptr[row]
        for h in range(num_heuristics):
            total = 0.0
            for entry in range(starts_HT[h, row], starts_HT[h, row + 1]):
                if columns[entry] != centres_T[row]:
                    total += values[entry]
            for entry in range(starts_HT[h, row], starts_HT[h, row + 1]):
                if columns[entry] == centres_T[row] or values[entry] <= 0:
                    continue
                place = find(table, np.int64(columns[entry]))
                if table[place] == -1:
                    table[place] = np.int64(columns[entry]) << 32 | (end - start)
                    indices[end] = columns[entry]
                    end += 1
                values_HE[h, start + (table[place] & 0xFFFFFFFF)] = values[entry] / total
        for entry in range(end - 1, start - 1, -1):
            table[find(table, np.int64(indices[entry]))] = -1
        indptr[row + 1] = end
