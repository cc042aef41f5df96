"""Powers of each sequence's own block A[v, v]: no path leaves the sequence, nothing is prepared for the whole graph.

The entries of A = D^(-1/2) (X + I) D^(-1/2) between the tokens are read from the CSR rows of X; a row of a power is
the row before times the block, so memory is O(N) beside the block's own non-zeros and rows are independent.

Shapes: B sequences, M powers, L local rows and C columns of the bias, N tokens, U distinct tokens of a sequence,
V ids (nodes or super nodes).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph.graph.jit import inner, kernel

_ID, _PLACE, _START = 0, 1, 2
_SEARCH_FROM = 16
"""A row this many times longer than the tokens is searched, a shorter one walked."""


@inner()
def _block(
    distinct: int,
    indptr: NDArray,
    indices: NDArray,
    weights: NDArray,
    scale_V: NDArray,
    names_XN: NDArray,
    columns: NDArray,
    values: NDArray,
) -> None:
    """The block between the first int `distinct` ids of `names_XN`, ascending, as CSR: row starts are noted there."""
    end = 0
    for here in range(distinct):
        place = indptr[names_XN[_ID, here]]
        stop = indptr[names_XN[_ID, here] + 1]
        long = stop - place > _SEARCH_FROM * distinct
        scale = scale_V[names_XN[_ID, here]]
        loop = end
        names_XN[_START, here] = loop
        columns[loop] = here
        values[loop] = scale * scale
        end += 1
        for there in range(distinct):
            wanted = names_XN[_ID, there]
            if long:
                last = stop
                while place < last:
                    middle = (place + last) >> 1
                    if indices[middle] < wanted:
                        place = middle + 1
                    else:
                        last = middle
            while place < stop and indices[place] < wanted:
                place += 1
            if place == stop:
                break
            if indices[place] == wanted:
                value = scale * scale_V[wanted]
                if len(weights) > 0:
                    value = weights[place] * scale * scale_V[wanted]
                if there == here:
                    values[loop] += value
                else:
                    columns[end] = there
                    values[end] = value
                    end += 1
    names_XN[_START, distinct] = end


@kernel()
def _fill_induced(
    indptr: NDArray,
    indices: NDArray,
    weights: NDArray,
    scale_V: NDArray,
    tokens_BN: NDArray,
    order_BN: NDArray,
    first: int,
    count: int,
    row: int,
    column: int,
    names_XN: NDArray,
    amounts_XN: NDArray,
    columns: NDArray,
    values: NDArray,
    out_BMLC: NDArray,
) -> None:
    """Fill a block of float `out_BMLC` (see `Powers.fill`) from CSR `indptr`, `indices`, `weights` (empty means ones).

    int64 `order_BN` sorts the tokens. int64 `names_XN` [3, N+1] and float64 `amounts_XN` [2, N] are for work, int32
    `columns` and float64 `values` for the non-zeros of one block.
    """
    num_tokens, num_powers = tokens_BN.shape[1], out_BMLC.shape[1]
    for b in range(tokens_BN.shape[0]):
        if tokens_BN[b, 0] < 0:
            continue
        distinct: Any = np.int64(0)
        for place in range(num_tokens):
            token = tokens_BN[b, order_BN[b, place]]
            if place == 0 or token != names_XN[_ID, distinct - 1]:
                names_XN[_ID, distinct] = token
                distinct += 1
            names_XN[_PLACE, order_BN[b, place]] = distinct - 1
        _block(distinct, indptr, indices, weights, scale_V, names_XN, columns, values)
        for t in range(count):
            now = 0
            for c in range(distinct):
                amounts_XN[0, c] = 0.0
            amounts_XN[0, names_XN[_PLACE, first + t]] = 1.0
            for m in range(num_powers):
                for c in range(distinct):
                    amounts_XN[1 - now, c] = 0.0
                for middle in range(distinct):
                    amount = amounts_XN[now, middle]
                    if amount != 0.0:
                        for entry in range(names_XN[_START, middle], names_XN[_START, middle + 1]):
                            amounts_XN[1 - now, columns[entry]] += amount * values[entry]
                now = 1 - now
                for c in range(num_tokens):
                    out_BMLC[b, m, row + t, column + c] = amounts_XN[now, names_XN[_PLACE, c]]


class InducedPowers:
    """Powers 1..M of the block between the distinct tokens of each sequence, in float64; memory O(V)."""

    def __init__(self, indptr: NDArray, indices: NDArray, weights: NDArray | None) -> None:
        """The symmetric non-negative X in CSR form with ascending columns; `weights` None means ones."""
        self._rows = (np.ascontiguousarray(indptr, np.int64), np.ascontiguousarray(indices, np.int32))
        self._weights = np.empty(0, np.float32) if weights is None else np.ascontiguousarray(weights, np.float32)
        degrees_V = np.diff(self._rows[0]).astype(np.float64)
        if weights is not None:
            full = np.flatnonzero(degrees_V)
            degrees_V[full] = np.add.reduceat(self._weights, self._rows[0][full], dtype=np.float64) if len(full) else 0
        self._scale_V = 1.0 / np.sqrt(degrees_V + 1.0)

    def fill(
        self, out_BMLC: NDArray, tokens_BN: NDArray[np.int64], first: int, count: int, row: int, column: int
    ) -> None:
        """See `Powers.fill`."""
        num_tokens = tokens_BN.shape[1]
        degrees_BN = self._rows[0][tokens_BN + 1] - self._rows[0][tokens_BN]
        room = int((np.minimum(degrees_BN, num_tokens) + 1).sum(axis=1).max(initial=0))
        work = (np.empty((3, num_tokens + 1), np.int64), np.empty((2, num_tokens)))
        block = (np.empty(room, np.int32), np.empty(room))
        order_BN = np.argsort(tokens_BN, axis=1)
        matrix = (*self._rows, self._weights, self._scale_V)
        _fill_induced(*matrix, tokens_BN, order_BN, first, count, row, column, *work, *block, out_BMLC)
