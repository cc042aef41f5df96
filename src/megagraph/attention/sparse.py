"""Structure as its non-zeros, sorted by row (CSR): memory and work follow the graph, not N^2.

Shapes: B sequences, M structural channels, g global tokens, H heads, S local rows, N columns of the block, Z non-zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megagraph.attention.bias import GlobalTokens, largest_magnitude


@dataclass(frozen=True)
class SparseBias:
    """Non-zeros of rows b * S + i: `starts` [B*S + 1], `column_Z` (int32), `values_MZ`; none at global tokens.

    `row_Z` is the row of each non-zero (int64), `shape` (B, S, N).
    """

    starts: Tensor
    row_Z: Tensor
    column_Z: Tensor
    values_MZ: Tensor
    shape: tuple[int, int, int]
    tokens: GlobalTokens

    @classmethod
    def from_coo(
        cls, row_Z: Tensor, column_Z: Tensor, values_MZ: Tensor, shape: tuple[int, int, int], tokens: GlobalTokens
    ) -> SparseBias:
        """From non-zeros whose rows b * S + i are in ascending order."""
        numbers = torch.arange(shape[0] * shape[1] + 1, device=row_Z.device)
        starts = torch.searchsorted(row_Z, numbers)
        return cls(starts.cpu(), row_Z, column_Z.to(torch.int32), values_MZ, shape, tokens)

    @classmethod
    def from_csr(
        cls, starts: Tensor, column_Z: Tensor, values_MZ: Tensor, shape: tuple[int, int, int], num_global: int
    ) -> SparseBias:
        """From compressed rows b * S + i, local rows against all N columns; the last `num_global` are global tokens."""
        counts = starts.diff()
        row_Z = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        tokens = GlobalTokens(shape[1], num_global, num_global)
        return cls(starts.cpu(), row_Z, column_Z.to(torch.int32), values_MZ, shape, tokens)

    @classmethod
    def from_dense(cls, channels_BMSN: Tensor, num_global: int) -> SparseBias:
        """The same bias from dense channels."""
        B, _, S, N = channels_BMSN.shape
        batch, row, column = channels_BMSN.ne(0).any(1).nonzero(as_tuple=True)
        values_MZ = channels_BMSN[batch, :, row, column].T.contiguous()
        return cls.from_coo(batch * S + row, column, values_MZ, (B, S, N), GlobalTokens(S, num_global, num_global))

    def columns(self, start: int, stop: int) -> SparseBias:
        """The non-zeros of columns start..stop, copied: all blocks together are as large as the whole."""
        B, S, N = self.shape
        inside = (self.column_Z >= start) & (self.column_Z < stop)
        tokens = self.tokens.block(N, start, stop)
        shape = B, S, stop - start
        return self.from_coo(
            self.row_Z[inside], self.column_Z[inside] - start, self.values_MZ[:, inside], shape, tokens
        )

    def tensors(self) -> list[Tensor]:
        """What the store keeps in memory."""
        return [self.starts, self.row_Z, self.column_Z, self.values_MZ]

    @cached_property
    def largest(self) -> float:
        """Bound of every channel's absolute value."""
        return largest_magnitude(self.values_MZ)

    def write(self, scores_BHSN: Tensor, weight_HM: Tensor, batch: slice, rows: slice) -> None:
        """Zero, then the projected values at the non-zeros."""
        place_HZ, values_MZ = self._places(scores_BHSN.shape, batch, rows)
        projected_HZ = weight_HM[:, : len(values_MZ)] @ values_MZ.to(weight_HM.dtype)
        flat = scores_BHSN.view(-1).zero_()
        flat.index_add_(0, place_HZ.view(-1), projected_HZ.to(flat.dtype).view(-1))
        self.tokens.add(scores_BHSN, weight_HM, rows)

    def collect(self, dweight_HM: Tensor, dscores_BHSN: Tensor, batch: slice, rows: slice) -> None:
        """Gather at the non-zeros, multiply with the values."""
        place_HZ, values_MZ = self._places(dscores_BHSN.shape, batch, rows)
        dscores_HZ = dscores_BHSN.reshape(-1)[place_HZ]
        dweight_HM[:, : len(values_MZ)] += dscores_HZ @ values_MZ.T.to(dscores_HZ.dtype)
        self.tokens.collect(dweight_HM, dscores_BHSN, rows)

    def _places(self, shape: torch.Size, batch: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Flat places [H, Z] in a tile of scores of the tile's non-zeros, and their values."""
        _, h, s, n = shape
        S = self.shape[1]
        first = batch.start * S + rows.start
        start, stop = (int(self.starts[row]) for row in (first, (batch.stop - 1) * S + rows.stop))
        row, column, values_MZ = (
            self.row_Z[start:stop] - first,
            self.column_Z[start:stop],
            self.values_MZ[:, start:stop],
        )
        sequence, row = row // S, row % S
        if batch.stop - batch.start > 1 and s < S:  # a prefix of the rows of each sequence
            inside = row < s
            sequence, row, column, values_MZ = sequence[inside], row[inside], column[inside], values_MZ[:, inside]
        heads = torch.arange(h, device=row.device).unsqueeze(1) * (s * n)
        return sequence * (h * s * n) + row * n + column + heads, values_MZ
