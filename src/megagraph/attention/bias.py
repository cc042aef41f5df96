"""How structure is stored: channels shared by all heads, never one matrix per head.

A store writes the bias of a tile of scores and collects the gradient of the projection; only the store knows the
encoding: dense channels here, `codes` (a byte per pair) and `sparse` (non-zeros only) beside it. The projection has
M + g columns: M structural channels, then one column for each of the g global tokens, which carry a learned distance
instead of structure (`ans-gt.md` 2.1): it fills the token's column, and its row outside the global columns.

Shapes: B sequences, M structural channels, g global tokens, H heads, S local rows, N columns of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


def largest_magnitude(values: Tensor) -> float:
    """max(1, |values|)."""
    if values.numel() == 0:
        return 1.0
    low, high = values.aminmax()
    return max(1.0, -low.item(), high.item())


class BiasStore(Protocol):
    """What the kernels ask of a store."""

    def write(self, scores_BHSN: Tensor, weight_HM: Tensor, batch: slice, rows: slice) -> None:
        """Overwrite a tile of scores with the bias of its rows."""

    def collect(self, dweight_HM: Tensor, dscores_BHSN: Tensor, batch: slice, rows: slice) -> None:
        """Add the tile's part of the projection's gradient."""

    def columns(self, start: int, stop: int) -> BiasStore:
        """The store of a block of columns, sharing memory."""

    def tensors(self) -> list[Tensor]:
        """What the store keeps in memory."""

    @property
    def largest(self) -> float:
        """Bound of every channel's absolute value, at least 1 (a global token's own channel)."""


@dataclass(frozen=True)
class GlobalTokens:
    """Where the learned distances of g global tokens lie in a block of scores: the last g local rows and columns.

    `columns` is how many of them are among the block's columns (0 where another block holds them).
    """

    num_rows: int
    count: int
    columns: int

    def block(self, num_columns: int, start: int, stop: int) -> GlobalTokens:
        """Those of columns start..stop out of `num_columns`."""
        first = num_columns - self.columns
        return GlobalTokens(self.num_rows, self.count, max(0, stop - max(start, first)))

    def add(self, scores_BHSN: Tensor, weight_HM: Tensor, rows: slice) -> None:
        """Add each token's distance to its part of a tile."""
        for token, columns, row in self._regions(rows, *scores_BHSN.shape[2:]):
            scores_BHSN[:, :, row, columns] += weight_HM[:, token - self.count, None, None]

    def collect(self, dweight_HM: Tensor, dscores_BHSN: Tensor, rows: slice) -> None:
        """Add the gradient of the distances."""
        for token, columns, row in self._regions(rows, *dscores_BHSN.shape[2:]):
            dweight_HM[:, token - self.count] += dscores_BHSN[:, :, row, columns].sum((0, 2, 3))

    def _regions(self, rows: slice, s: int, n: int) -> list[tuple[int, slice, slice]]:
        """(token, columns, tile rows) that carry each global token's distance.

        A single global token's row and corner hold the same number, which the softmax ignores: its row stays zero.
        """
        first_column = n - self.columns
        last_rows = self.num_rows - self.count - rows.start
        filled = slice(0, max(0, min(s, last_rows)) if self.count == 1 else s)
        regions = [(t, slice(first_column + t, first_column + t + 1), filled) for t in range(self.columns)]
        if self.count > 1 and first_column > 0:
            for token in range(self.count):
                if 0 <= last_rows + token < s:
                    regions.append((token, slice(0, first_column), slice(last_rows + token, last_rows + token + 1)))
        return regions


@dataclass(frozen=True)
class DenseBias:
    """Float channels [B, M, S, N], zero in rows and columns of global tokens."""

    channels_BMSN: Tensor
    tokens: GlobalTokens

    @classmethod
    def full(cls, channels_BMSN: Tensor, num_global: int) -> DenseBias:
        """The store of local rows against all N columns; the last `num_global` of both are the global tokens."""
        return cls(channels_BMSN, GlobalTokens(channels_BMSN.shape[2], num_global, num_global))

    def columns(self, start: int, stop: int) -> DenseBias:
        """The store of columns start..stop, sharing memory."""
        tokens = self.tokens.block(self.channels_BMSN.shape[3], start, stop)
        return DenseBias(self.channels_BMSN[..., start:stop], tokens)

    def tensors(self) -> list[Tensor]:
        """What the store keeps in memory."""
        return [self.channels_BMSN]

    @cached_property
    def largest(self) -> float:
        """Bound of every channel's absolute value."""
        return largest_magnitude(self.channels_BMSN)

    def write(self, scores_BHSN: Tensor, weight_HM: Tensor, batch: slice, rows: slice) -> None:
        """Bias = structural channels projected to heads, plus the learned distances of global tokens."""
        b, h, s, n = scores_BHSN.shape
        tile = self.channels_BMSN[batch, :, rows].reshape(b, -1, s * n).to(scores_BHSN.dtype)
        structural = weight_HM[:, : tile.shape[1]].to(tile.dtype)
        torch.bmm(structural.expand(b, *structural.shape), tile, out=scores_BHSN.view(b, h, s * n))
        self.tokens.add(scores_BHSN, weight_HM, rows)

    def collect(self, dweight_HM: Tensor, dscores_BHSN: Tensor, batch: slice, rows: slice) -> None:
        """dweight[h, m] += sum over pairs of dscores[h] * channel[m]."""
        b, h, s, n = dscores_BHSN.shape
        tile = self.channels_BMSN[batch, :, rows].reshape(b, -1, s * n).to(dscores_BHSN.dtype)
        product_BHM = torch.bmm(dscores_BHSN.reshape(b, h, s * n), tile.transpose(1, 2))
        dweight_HM[:, : tile.shape[1]] += product_BHM.sum(0)
        self.tokens.collect(dweight_HM, dscores_BHSN, rows)
