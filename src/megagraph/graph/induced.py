"""Powers of each sequence's own block A[v, v]: no path leaves the sequence, nothing is prepared for the whole graph.

The entries of A = D^(-1/2) (X + I) D^(-1/2) between the tokens are read from the CSR rows of X; a row of a power is
the row before times the block, so memory is O(N) beside the block's own non-zeros and rows are independent.

Shapes: B sequences, M powers, L local rows and C columns of the bias, N tokens, U distinct tokens of a sequence,
V ids (nodes or super nodes).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def _search(values: NDArray, start: int, stop: int, wanted: int) -> int:
    """First place in ascending ``values[start:stop]`` whose value is not below int `wanted`."""
    while start < stop:
        middle = (start + stop) >> 1
        if values[middle] < wanted:
            start = middle + 1
        else:
            stop = middle
    return start


@njit(cache=True, nogil=True)
def _block(
    ids_U: NDArray,
    num_distinct: int,
    indptr: NDArray,
    indices: NDArray,
    weights: NDArray,
    scale_V: NDArray,
    starts_U: NDArray,
    columns: NDArray,
    values: NDArray,
) -> tuple[NDArray, NDArray]:
    """The block between ascending int64 `ids_U` as CSR: fills `starts_U`, returns int32 columns and float64 values.

    Of tokens and row the shorter one is walked, the other one searched. An empty `weights` means ones.
    """
    end = 0
    for row in range(num_distinct):
        here = ids_U[row]
        start, stop = indptr[here], indptr[here + 1]
        if end + num_distinct > len(columns):
            more_columns, more_values = np.empty(2 * (end + num_distinct), np.int32), np.empty(2 * (end + num_distinct))
            more_columns[:end], more_values[:end] = columns[:end], values[:end]
            columns, values = more_columns, more_values
        starts_U[row] = loop = end
        columns[end], values[end] = row, scale_V[here] * scale_V[here]
        end += 1
        walk_row = stop - start < num_distinct
        place, other = start, 0
        for step in range(stop - start if walk_row else num_distinct):
            if walk_row:
                place = start + step
                other = _search(ids_U, other, num_distinct, indices[place])
            else:
                other = step
                place = _search(indices, place, stop, ids_U[other])
            if other == num_distinct or place == stop or indices[place] != ids_U[other]:
                continue
            weight = 1.0 if len(weights) == 0 else np.float64(weights[place])
            value = weight * scale_V[here] * scale_V[ids_U[other]]
            if other == row:
                values[loop] += value
            else:
                columns[end], values[end] = other, value
                end += 1
    starts_U[num_distinct] = end
    return columns, values


@njit(cache=True, nogil=True)
def _fill_induced(
    indptr: NDArray,
    indices: NDArray,
    weights: NDArray,
    scale_V: NDArray,
    tokens_BN: NDArray,
    first: int,
    count: int,
    row: int,
    column: int,
    out_BMLC: NDArray,
) -> None:
    """Fill a block of float `out_BMLC` (see `Powers.fill`) from CSR `indptr`, `indices`, `weights`."""
    num_tokens, num_powers = tokens_BN.shape[1], out_BMLC.shape[1]
    starts_U = np.empty(num_tokens + 1, np.int64)
    columns, values = np.empty(4 * num_tokens, np.int32), np.empty(4 * num_tokens)
    now_U, next_U = np.zeros(num_tokens), np.zeros(num_tokens)
    place_N = np.empty(num_tokens, np.int64)
    for b in range(tokens_BN.shape[0]):
        if tokens_BN[b, 0] < 0:
            continue
        ids_U = np.sort(tokens_BN[b])
        distinct = 0
        for place in range(num_tokens):
            if place == 0 or ids_U[place] != ids_U[distinct - 1]:
                ids_U[distinct] = ids_U[place]
                distinct += 1
        for t in range(num_tokens):
            place_N[t] = _search(ids_U, 0, distinct, tokens_BN[b, t])
        columns, values = _block(ids_U, distinct, indptr, indices, weights, scale_V, starts_U, columns, values)
        for t in range(first, first + count):
            now_U[:distinct] = 0.0
            now_U[place_N[t]] = 1.0
            for m in range(num_powers):
                next_U[:distinct] = 0.0
                for middle in range(distinct):
                    amount = now_U[middle]
                    if amount != 0.0:
                        for entry in range(starts_U[middle], starts_U[middle + 1]):
                            next_U[columns[entry]] += amount * values[entry]
                now_U, next_U = next_U, now_U
                for c in range(num_tokens):
                    out_BMLC[b, m, row + t - first, column + c] = now_U[place_N[c]]


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
        _fill_induced(*self._rows, self._weights, self._scale_V, tokens_BN, first, count, row, column, out_BMLC)
