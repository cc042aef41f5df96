"""Structure as one byte per pair: a code into a table of at most K channel vectors.

Fits structure that takes few values (hop distances, edge types, adjacency of an unweighted regular graph). The most
frequent code costs nothing to the softmax, which ignores what is constant along a row: its vector is subtracted from
the table, so that the code becomes zero and the rest can be kept as non-zeros (`sparse`).

Shapes: B sequences, M structural channels, g global tokens, H heads, S local rows, N columns of the block, K codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megagraph.attention.bias import GlobalTokens, largest_magnitude
from megagraph.attention.sparse import SparseBias
from megagraph.config import UserError

MAX_CODES = 256
CODES_AT_ONCE = 8


@dataclass(frozen=True)
class CodeBias:
    """Codes [B, S, N] (uint8) into channel vectors [K, M] relative to those of code `majority`.

    Rows and columns of global tokens hold the code of the zero vector.
    """

    codes_BSN: Tensor
    table_KM: Tensor
    tokens: GlobalTokens

    @classmethod
    def full(cls, codes_BSN: Tensor, table_KM: Tensor, num_global: int) -> CodeBias:
        """The store of local rows against all N columns.

        Args:
            codes_BSN: uint8, below K.
            table_KM: channel vector of each code.
            num_global: global tokens, the last rows and columns.
        """
        if len(table_KM) > MAX_CODES:
            raise UserError(f"{len(table_KM)} bias codes do not fit a byte: use at most {MAX_CODES}, or a sparse store")
        if codes_BSN.numel():
            counts = torch.bincount(codes_BSN.flatten().int(), minlength=len(table_KM))
            table_KM = table_KM - table_KM[counts.argmax()]
        return cls(codes_BSN.to(torch.uint8), table_KM, GlobalTokens(codes_BSN.shape[1], num_global, num_global))

    @classmethod
    def from_dense(cls, channels_BMSN: Tensor, num_global: int) -> CodeBias:
        """The same bias from dense channels; `UserError` where they hold more than 256 different vectors."""
        B, M, S, N = channels_BMSN.shape
        vectors = channels_BMSN.permute(0, 2, 3, 1).reshape(-1, M)
        table_KM, codes = torch.unique(vectors, dim=0, return_inverse=True)
        return cls.full(codes.view(B, S, N), table_KM, num_global)

    def sparse(self) -> SparseBias:
        """The non-zeros of the relative table: what remains when the most frequent code is free."""
        B, S, N = self.codes_BSN.shape
        nonzero_K = self.table_KM.ne(0).any(1)
        batch, row, column = nonzero_K[self.codes_BSN.int()].nonzero(as_tuple=True)
        values_MZ = self.table_KM[self.codes_BSN[batch, row, column].int()].T.contiguous()
        return SparseBias.from_coo(batch * S + row, column, values_MZ, (B, S, N), self.tokens)

    def columns(self, start: int, stop: int) -> CodeBias:
        """The store of columns start..stop, sharing memory."""
        tokens = self.tokens.block(self.codes_BSN.shape[2], start, stop)
        return CodeBias(self.codes_BSN[..., start:stop], self.table_KM, tokens)

    def tensors(self) -> list[Tensor]:
        """What the store keeps in memory."""
        return [self.codes_BSN, self.table_KM]

    @cached_property
    def largest(self) -> float:
        """Bound of every channel's absolute value."""
        return largest_magnitude(self.table_KM)

    def write(self, scores_BHSN: Tensor, weight_HM: Tensor, batch: slice, rows: slice) -> None:
        """Look up the projected table."""
        b, h, s, n = scores_BHSN.shape
        projected_HK = weight_HM[:, : self.table_KM.shape[1]] @ self.table_KM.T.to(weight_HM.dtype)
        codes = self.codes_BSN[batch, rows].reshape(-1).int()
        if b == 1:
            torch.index_select(projected_HK, 1, codes, out=scores_BHSN.view(h, s * n))
        else:
            looked_up = torch.index_select(projected_HK, 1, codes)
            scores_BHSN.copy_(looked_up.view(h, b, s, n).transpose(0, 1))
        self.tokens.add(scores_BHSN, weight_HM, rows)

    def collect(self, dweight_HM: Tensor, dscores_BHSN: Tensor, batch: slice, rows: slice) -> None:
        """Products with one-hot rows, a few codes at a time: several times faster than adding at indices."""
        h, num_codes = dscores_BHSN.shape[1], len(self.table_KM)
        dscores = dscores_BHSN.transpose(0, 1).reshape(h, -1)
        codes = self.codes_BSN[batch, rows].reshape(1, -1)
        numbers = torch.arange(num_codes, dtype=torch.uint8, device=codes.device).unsqueeze(1)
        one_hot = dscores.new_empty(min(CODES_AT_ONCE, num_codes), codes.shape[1])
        for start in range(0, num_codes, CODES_AT_ONCE):
            stop = min(start + CODES_AT_ONCE, num_codes)
            hot = torch.eq(codes, numbers[start:stop], out=one_hot[: stop - start])
            table = self.table_KM[start:stop].to(dscores.dtype)
            dweight_HM[:, : table.shape[1]] += dscores @ hot.T @ table
        self.tokens.collect(dweight_HM, dscores_BHSN, rows)
