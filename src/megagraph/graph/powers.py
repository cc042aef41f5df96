"""Exact powers of a normalised adjacency between the tokens of sequences (ans-gt 1.6): a protocol and two stores.

Shapes: B sequences, M powers, L local rows and C columns of the bias, N tokens, V ids of a matrix (nodes or super
nodes), P stored powers.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
from numpy.typing import DTypeLike, NDArray

from megagraph.config import UserError
from megagraph.graph.jit import inner, kernel

MAX_NONZEROS = 100_000_000


class Powers(Protocol):
    """Powers 1..M of a symmetric matrix, looked up between tokens."""

    def fill(
        self, out_BMLC: NDArray, tokens_BN: NDArray[np.int64], first: int, count: int, row: int, column: int
    ) -> None:
        """Write ``power_m[tokens[first : first + count], tokens]`` at (`row`, `column`) of `out_BMLC`.

        Sequences with token -1 are left as they are.
        """


def _bound_nonzeros(indptr: NDArray[np.int64], indices: NDArray[np.int32], num_powers: int) -> int:
    """At least the non-zeros of powers 1..num_powers together, from the numbers of paths; the diagonal is full."""
    num_ids = len(indptr) - 1
    within_V = np.ones(num_ids, np.int64)
    total = 0
    for _ in range(num_powers):
        within_V = np.minimum(np.add.reduceat(within_V[indices], indptr[:-1]), num_ids)
        total += int(within_V.sum())
    return total


@kernel()
def _count_nonzeros(indptr: NDArray, indices: NDArray, num_powers: int, limit: int) -> int:
    """Exact int64 number of non-zeros of powers 1..num_powers together, or the first number above `limit`.

    The matrix (CSR: int64 `indptr`, int32 `indices`) is non-negative with a full diagonal, so that row i of its m-th
    power holds the ids within distance m of i: a breadth-first search per row, in O(V) memory.
    """
    num_ids = len(indptr) - 1
    seen_V = np.full(num_ids, -1, np.int64)
    reached_V = np.empty(num_ids, np.int64)
    total = 0
    for source in range(num_ids):
        seen_V[source] = source
        reached_V[0] = source
        start, stop = 0, 1
        for _ in range(num_powers):
            end = stop
            for place in range(start, stop):
                node = reached_V[place]
                for entry in range(indptr[node], indptr[node + 1]):
                    other = indices[entry]
                    if seen_V[other] != source:
                        seen_V[other] = source
                        reached_V[end] = other
                        end += 1
            start, stop = stop, end
            total += stop
        if total > limit:
            return total
    return total


@inner(fastmath={"reassoc", "nsz", "contract"})
def _dot(buffer_V: NDArray, indices: NDArray, data: NDArray, start: int, stop: int) -> float:
    """Inner product, in float64, of a float buffer with CSR entries start..stop (int32 `indices`, float `data`)."""
    total = 0.0
    for entry in range(start, stop):
        total += float(buffer_V[indices[entry]]) * float(data[entry])
    return total


@kernel()
def _fill_powers(
    starts_PV: NDArray,
    indices: NDArray,
    data: NDArray,
    buffer_V: NDArray,
    tokens_BN: NDArray,
    first: int,
    count: int,
    row: int,
    column: int,
    num_powers: int,
    out_BMLC: NDArray,
) -> None:
    """Fill a block of float `out_BMLC` from the P stored powers (CSR: int64 `starts_PV` [P, V+1] into int32 `indices`).

    A row of a stored power is spread over `buffer_V`, zero on entry and on return; powers up to P are read from it,
    and power P+q is its inner product with row j of power q (meet in the middle). For power 2P the shorter of two rows
    is walked (ties: the smaller id), whichever rows are asked for, and both halves are written.
    """
    num_stored, num_tokens = starts_PV.shape[0], tokens_BN.shape[1]
    middle = num_powers == 2 * num_stored
    for b in range(tokens_BN.shape[0]):
        if tokens_BN[b, 0] < 0:
            continue
        for t in range(num_tokens):
            here = tokens_BN[b, t]
            own = first <= t < first + count
            for p in range(num_stored):
                last = p == num_stored - 1
                if not own and not (last and middle):
                    continue
                begin, end = starts_PV[p, here], starts_PV[p, here + 1]
                for entry in range(begin, end):
                    buffer_V[indices[entry]] = data[entry]
                for c in range(num_tokens):
                    there = tokens_BN[b, c]
                    if own:
                        out_BMLC[b, p, row + t - first, column + c] = buffer_V[there]
                    for q in range(num_stored if last else 0):
                        start, stop = starts_PV[q, there], starts_PV[q, there + 1]
                        mirrored = False
                        if q < num_stored - 1:
                            if not own:
                                continue
                        else:
                            mirrored = first <= c < first + count
                            shorter = stop - start < end - begin or (stop - start == end - begin and there <= here)
                            if not (middle and shorter and (own or mirrored)):
                                continue
                        value = _dot(buffer_V, indices, data, start, stop)
                        if own:
                            out_BMLC[b, num_stored + q, row + t - first, column + c] = value
                        if mirrored:
                            out_BMLC[b, num_stored + q, row + c - first, column + t] = value
                for entry in range(begin, end):
                    buffer_V[indices[entry]] = 0.0


class SparsePowers:
    """Exact powers 1..M of a symmetric sparse matrix with a full diagonal; only powers 1..ceil(M/2) are stored.

    Memory: 4 bytes of index and one value per non-zero of the stored powers (twice that while they are made), so at
    most about 0.8 GB in float32 at `MAX_NONZEROS`; the higher powers, often nearly dense, are never formed.
    """

    def __init__(
        self,
        matrix: sp.csr_array,
        num_powers: int,
        dtype: DTypeLike,
        *,
        remedy: str,
        max_nonzeros: int = MAX_NONZEROS,
    ) -> None:
        """Count the non-zeros, then multiply; `UserError` ending in `remedy` when there are more than allowed."""
        self.num_powers = num_powers
        num_stored = (num_powers + 1) // 2
        matrix = sp.csr_array(matrix)
        indptr, indices = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32)
        counted = _bound_nonzeros(indptr, indices, num_stored)
        if counted > max_nonzeros:
            counted = _count_nonzeros(indptr, indices, num_stored, max_nonzeros)
        if counted > max_nonzeros:
            raise UserError(
                f"bias_channels={num_powers} on a graph of {matrix.shape[0]} vertices needs adjacency powers "
                f"1..{num_stored} with more than {max_nonzeros} non-zeros: {remedy}"
            )
        powers: list[Any] = [matrix.astype(dtype)]
        while len(powers) < num_stored:
            powers.append(powers[-1] @ powers[0])
        for power in powers:
            power.sort_indices()
        offsets = np.cumsum([0] + [power.nnz for power in powers])
        self._starts_PV = np.stack(
            [power.indptr.astype(np.int64) + offset for power, offset in zip(powers, offsets, strict=False)]
        )
        self._indices = np.concatenate([power.indices.astype(np.int32, copy=False) for power in powers])
        self._data = np.concatenate([power.data for power in powers])

    def fill(
        self, out_BMLC: NDArray, tokens_BN: NDArray[np.int64], first: int, count: int, row: int, column: int
    ) -> None:
        """See `Powers.fill`."""
        buffer_V = np.zeros(self._starts_PV.shape[1] - 1, self._data.dtype)
        matrix = (self._starts_PV, self._indices, self._data, buffer_V)
        _fill_powers(*matrix, tokens_BN, first, count, row, column, self.num_powers, out_BMLC)


# Share of non-zeros above which multiplying dense matrices is the faster way (measured at 1500 rows).
DENSE_SHARE = 1 / 16


class DensePowers:
    """Exact powers 1..M of a sparse matrix, stored dense [M, V, V]: for small coarse graphs."""

    def __init__(self, matrix: sp.csr_array, num_powers: int, dtype: DTypeLike) -> None:
        size = matrix.shape[0]
        self._powers_MVV = np.empty((num_powers, size, size), dtype)
        power_VV = matrix.toarray()
        factor = power_VV if matrix.nnz > DENSE_SHARE * size * size else matrix
        for m in range(num_powers):
            self._powers_MVV[m] = power_VV
            if m + 1 < num_powers:
                power_VV = factor @ power_VV

    def fill(
        self, out_BMLC: NDArray, tokens_BN: NDArray[np.int64], first: int, count: int, row: int, column: int
    ) -> None:
        """See `Powers.fill`."""
        there = slice(column, column + tokens_BN.shape[1])
        real_B = np.flatnonzero(tokens_BN[:, 0] >= 0)
        tokens_BN = tokens_BN[real_B]
        rows_BL = tokens_BN[:, first : first + count]
        block_MBLC = self._powers_MVV[:, rows_BL[:, :, None], tokens_BN[:, None, :]]
        out_BMLC[real_B, :, row : row + count, there] = block_MBLC.swapaxes(0, 1)
