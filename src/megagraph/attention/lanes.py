"""Compiled loops of attention over short sequences: a vector lane for each of `LANES` sequences.

A block of sequences is worked through head by head. Its tiles have lanes as last axis and are flat arrays; lanes
beyond the last sequence repeat it. Every product is one contraction over an axis of two tiles, structure is projected
to heads here: scores, masks and bias exist for one head of a block, in a core's cache.

Shapes: B sequences, H heads, S query rows, N key columns, D features per head, M bias channels, L lanes.
"""

# Types are the compiler's: it infers them from a call.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False

from __future__ import annotations

import numpy as np

from megagraph.attention.vectors import LANES, contract, drop, exponentials, largest, score, softmax_backward
from megagraph.graph.jit import inner, kernel

SUMS = {"contract", "reassoc", "nsz"}
"""Sums may be regrouped; infinities and NaNs stay what they are."""


@inner()
def _gather(x, strides, first, live, head, count, width, factor, padding, tile):
    """tile[n, d, l] = factor * x[first + l, head, n, d]; other lanes than the first `live` repeat, times `padding`."""
    step = strides[0]
    for n in range(count):
        for d in range(width):
            start = first * step + head * strides[1] + n * strides[2] + d * strides[3]
            place = (n * width + d) * LANES
            for lane in range(live):
                tile[place + lane] = factor * x[start + lane * step]
            for lane in range(live, LANES):
                tile[place + lane] = padding * tile[place]


@inner()
def _scatter(tile, factor, x, strides, first, live, head, count, width):
    """x[first + l, head, n, d] = factor * tile[n, d, l] of lanes that do not repeat."""
    step = strides[0]
    for n in range(count):
        for d in range(width):
            start = first * step + head * strides[1] + n * strides[2] + d * strides[3]
            place = (n * width + d) * LANES
            for lane in range(live):
                x[start + lane * step] = factor * tile[place + lane]


@inner()
def _gather_structure(channels, strides, first, live, sizes, one, sequence_B, tile, lane_codes):
    """tile[m, s, n, l] of a block's sequences, and their hash codes."""
    S, N, _, M = sizes
    for m in range(M):
        within = strides[0], np.int64(0), strides[2], strides[3]
        place = m * S * N * LANES
        _gather(channels[m * strides[1] :], within, first, live, 0, S, N, one, one, tile[place:])
    for lane in range(LANES):
        lane_codes[lane] = sequence_B[first + lane if lane < live else first]


@kernel()
def forward(
    q, q_strides, k, k_strides, v, v_strides, channels, channel_strides, weight_HM, fixed_HSN,
    sequence_B, head_H, row_S, column_N, threshold, sizes, scalars, out, out_strides, largest_BHS, total_BHS,
    tiles, lane_codes,
):  # fmt: skip
    """Attention of all sequences; log-sum-exp is `largest` + log(`total`). `tiles` are scratch."""
    S, N, D, M = sizes
    B, H, _ = total_BHS.shape
    scale, times, one, zero = scalars
    q_tile, k_tile, v_tile, out_tile, structure, p, most, total = tiles
    for first in range(0, B, LANES):
        live = min(LANES, B - first)
        _gather_structure(channels, channel_strides, first, live, sizes, one, sequence_B, structure, lane_codes)
        for head in range(H):
            _gather(q, q_strides, first, live, head, S, D, scale, one, q_tile)
            _gather(k, k_strides, first, live, head, N, D, one, one, k_tile)
            _gather(v, v_strides, first, live, head, N, D, one, one, v_tile)
            for row in range(S):
                for n in range(N):
                    shared, place = fixed_HSN[head, row, n], row * N + n
                    score(q_tile, row * D, k_tile, n * D, D, structure, place, S * N, weight_HM, head, M, p, n, shared)
                largest(p, 0, N, most, 0)
                exponentials(p, 0, N, most, total, 0)
                for lane in range(live):
                    largest_BHS[first + lane, head, row] = most[lane]
                    total_BHS[first + lane, head, row] = total[lane]
                drop(p, 0, N, lane_codes, column_N, np.int32(head_H[head] + row_S[row]), threshold, times)
                for lane in range(LANES):
                    total[lane] = one / total[lane]
                for d in range(D):
                    contract(p, 0, 1, v_tile, d, D, N, out_tile, row * D + d, zero)
                    contract(out_tile, row * D + d, 0, total, 0, 0, 1, out_tile, row * D + d, zero)
            _scatter(out_tile, one, out, out_strides, first, live, head, S, D)


@inner(fastmath=SUMS)
def _collect(ds, structure, sizes, head, zero, dweight_HM, dfixed_HSN):
    """Gradients of the projection and of what sequences share, from one head of a block."""
    S, N, _, M = sizes
    for m in range(M):
        total = zero
        for i in range(S * N * LANES):
            total += ds[i] * structure[m * S * N * LANES + i]
        dweight_HM[head, m] += total
    for row in range(S):
        for n in range(N):
            total = zero
            for lane in range(LANES):
                total += ds[(row * N + n) * LANES + lane]
            dfixed_HSN[head, row, n] += total


@kernel()
def backward(
    dout, dout_strides, q, q_strides, k, k_strides, v, v_strides, channels, channel_strides, weight_HM, fixed_HSN,
    sequence_B, head_H, row_S, column_N, threshold, sizes, scalars, lse_BHS, delta_BHS,
    dq, dq_strides, dk, dk_strides, dv, dv_strides, dweight_HM, dfixed_HSN, tiles, lane_codes,
):  # fmt: skip
    """Gradients; those of the projection (`dweight`) and of what sequences share (`dfixed`) are added to."""
    S, N, D, M = sizes
    B, H, _ = lse_BHS.shape
    scale, times, one, zero = scalars
    q_tile, k_tile, v_tile, dout_tile, structure, p, ds, lse, delta, part, unused = tiles
    for first in range(0, B, LANES):
        live = min(LANES, B - first)
        _gather_structure(channels, channel_strides, first, live, sizes, one, sequence_B, structure, lane_codes)
        for head in range(H):
            _gather(q, q_strides, first, live, head, S, D, scale, one, q_tile)
            _gather(k, k_strides, first, live, head, N, D, one, one, k_tile)
            _gather(v, v_strides, first, live, head, N, D, one, one, v_tile)
            _gather(dout, dout_strides, first, live, head, S, D, one, zero, dout_tile)
            for row in range(S):
                for lane in range(LANES):
                    sequence = first + lane if lane < live else first
                    lse[lane] = lse_BHS[sequence, head, row]
                    delta[lane] = delta_BHS[sequence, head, row] if lane < live else zero
                start = row * N
                for n in range(N):
                    shared, place = fixed_HSN[head, row, n], start + n
                    score(
                        q_tile, row * D, k_tile, n * D, D, structure, place, S * N, weight_HM, head, M, p, place, shared
                    )
                    contract(dout_tile, row * D, 1, v_tile, n * D, 1, D, ds, place, zero)
                exponentials(p, start, N, lse, unused, 0)
                code = np.int32(head_H[head] + row_S[row])
                softmax_backward(p, ds, start, N, delta, lane_codes, column_N, code, threshold, times)
                for d in range(D):
                    contract(ds, start, 1, k_tile, d, D, N, part, row * D + d, zero)
            _scatter(part, scale, dq, dq_strides, first, live, head, S, D)
            _collect(ds, structure, sizes, head, zero, dweight_HM, dfixed_HSN)
            for n in range(N):
                for d in range(D):
                    contract(ds, n, N, q_tile, d, D, S, part, n * D + d, zero)
            _scatter(part, one, dk, dk_strides, first, live, head, N, D)
            for n in range(N):
                for d in range(D):
                    contract(p, n, N, dout_tile, d, D, S, part, n * D + d, zero)
            _scatter(part, one, dv, dv_strides, first, live, head, N, D)
