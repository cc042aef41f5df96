"""Dropout from a hash of coordinates: the same mask in every layout and in the backward pass, nothing stored.

The mask of an element depends on (key, sequence, head or feature, global row, global column) only, so splitting a
batch, a sequence or a model over ranks changes no bit of it (`parallel-runtime.md` 2.5). A key folds together
everything that must give a fresh mask: seed, step, layer, place in the layer.

Shapes: B sequences, H heads, S local tokens (rows), N columns, D features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

_UINT32 = (1 << 32) - 1
_SEQUENCE, _ROW, _COLUMN, _HEAD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None))


def fold(*parts: int) -> int:
    """One 32-bit key from any number of integers (splitmix64 finaliser, order matters)."""
    state = 0
    for part in parts:
        state = (state ^ (part & (2**64 - 1))) + 0x9E3779B97F4A7C15 & (2**64 - 1)
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (2**64 - 1)
        state ^= state >> 31
    return state & _UINT32


def _signed(value: int) -> int:
    """The int32 with the same bits as an unsigned 32-bit number."""
    return (value & _UINT32) - ((value & 0x80000000) << 1)


def _spread(index: Tensor, multiplier: int) -> Tensor:
    """Indices times an odd constant, wrapped to int32."""
    return index.to(torch.int32) * _signed(multiplier)


def _mix_(x: Tensor) -> Tensor:
    """Avalanche the bits of an int32 tensor in place (xor-shift-multiply rounds)."""
    shifted = torch.empty_like(x)
    for shift, multiplier in _ROUNDS:
        torch.bitwise_right_shift(x, shift, out=shifted).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(shifted)
        if multiplier is not None:
            x.mul_(_signed(multiplier))
    return x


def _keep(hashed: Tensor, rate: float, out: Tensor | None = None) -> Tensor:
    """True (1 in `out`) with probability 1 - rate."""
    return torch.ge(hashed, _threshold(rate), out=out)


def _threshold(rate: float) -> int:
    return int((rate - 0.5) * 2**32)


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout on attention probabilities [B, H, S, N] of given global rows and columns, heads from `first_head` on."""

    rate: float
    key: int
    sequence_B: Tensor
    rows_S: Tensor
    columns_N: Tensor
    first_head: int = 0

    def columns(self, start: int, stop: int) -> AttentionDropout:
        """The same dropout restricted to columns start..stop."""
        return replace(self, columns_N=self.columns_N[start:stop])

    @property
    def scale(self) -> float:
        """What a kept probability is multiplied by."""
        return 1.0 / (1.0 - self.rate)

    @property
    def threshold(self) -> int:
        """The int32 hash from which on a probability is kept."""
        return _threshold(self.rate)

    @cached_property
    def _codes(self) -> tuple[Tensor, Tensor, Tensor]:
        return _spread(self.sequence_B, _SEQUENCE), _spread(self.rows_S, _ROW), _spread(self.columns_N, _COLUMN)

    def codes(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """int32 parts of sequences, heads, rows and columns; their sum is what is hashed."""
        sequence, row, column = self._codes
        heads = torch.arange(self.first_head, self.first_head + num_heads, device=row.device)
        return sequence, _spread(heads, _HEAD) + _signed(self.key), row, column

    def keep(self, num_heads: int, batch: slice, rows: slice, out: Tensor | None = None) -> Tensor:
        """Mask [b, H, s, N] of the probabilities that stay: boolean, or ones and zeros of the type of `out`.

        Multiplying by a mask of the same type is several times faster than by a boolean one.
        """
        sequence, head, row, column = self.codes(num_heads)
        x = (sequence[batch, None] + head)[:, :, None, None] + (row[rows, None] + column)
        return _keep(_mix_(x), self.rate, out)


def hidden_dropout(x_BSD: Tensor, rate: float, key: int, sequence_B: Tensor, rows_S: Tensor) -> Tensor:
    """Dropout of a token tensor [B, S, D], keyed by (key, sequence, global row, feature)."""
    if rate == 0.0:
        return x_BSD
    feature = _spread(torch.arange(x_BSD.shape[-1], device=x_BSD.device), _COLUMN) + _signed(key)
    token = _spread(sequence_B, _SEQUENCE)[:, None] + _spread(rows_S, _ROW)
    keep = _keep(_mix_(token[:, :, None] + feature), rate)
    return x_BSD * keep * (1.0 / (1.0 - rate))
