"""Dropout from a hash of coordinates: the same mask in every layout and in the backward pass, nothing stored.

The mask of an element depends on (key, sequence, head or feature, global row, global column) only, so splitting a
batch, a sequence or a model over ranks changes no bit of it (`parallel-runtime.md` 2.5). A key folds together
everything that must give a fresh mask: seed, step, layer, place in the layer. On the CPU one compiled pass makes a
mask, elsewhere a dozen torch operations do; the bits are the same.

Shapes: B sequences, H heads, S local tokens (rows), N columns, D features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megagraph.graph.jit import inner, kernel

_UINT32 = (1 << 32) - 1
_SEQUENCE, _ROW, _COLUMN, _HEAD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
ROUNDS = ((16, _FIRST), (15, _SECOND), (16, None))
"""Shifts and factors of the hash."""


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
    for shift, multiplier in ROUNDS:
        torch.bitwise_right_shift(x, shift, out=shifted).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(shifted)
        if multiplier is not None:
            x.mul_(_signed(multiplier))
    return x


def device_type(x: Tensor) -> str:
    """Where a tensor is computed; a fake one says which device it stands for."""
    return getattr(x.fake_mode, "stands_for", x.device.type) if isinstance(x, FakeTensor) else x.device.type


@inner()
def _mixed(code: Any) -> Any:
    """What `_mix_` makes of one int32."""
    x = np.uint32(code)
    x ^= x >> np.uint32(16)
    x = np.uint32(x * np.uint32(_FIRST))
    x ^= x >> np.uint32(15)
    x = np.uint32(x * np.uint32(_SECOND))
    x ^= x >> np.uint32(16)
    return np.int32(x)


@kernel()
def _fill_keep(
    sequence_B: NDArray, head_H: NDArray, row_S: NDArray, column_N: NDArray, threshold: int, keep_BHSN: NDArray
) -> None:
    """One pass of what `_mix_` and a comparison do in a dozen; the codes are int32, their sum wraps."""
    B, H, S, N = keep_BHSN.shape
    for b in range(B):
        for h in range(H):
            for s in range(S):
                code = np.int32(sequence_B[b] + head_H[h] + row_S[s])
                for n in range(N):
                    keep_BHSN[b, h, s, n] = _mixed(np.int32(code + column_N[n])) >= threshold


def _keep(codes: tuple[Tensor, Tensor, Tensor, Tensor], rate: float, out: Tensor | None = None) -> Tensor:
    """True (1 in `out`) with probability 1 - rate, [B, H, S, N] of the int32 codes of each."""
    sequence, head, row, column = codes
    if device_type(sequence) != "cpu":
        x = (sequence[:, None] + head)[:, :, None, None] + (row[:, None] + column)
        return torch.ge(_mix_(x), _threshold(rate), out=out)
    if out is None:
        out = torch.empty(len(sequence), len(head), len(row), len(column), dtype=torch.bool)
    if not isinstance(out, FakeTensor):
        _fill_keep(*(code.numpy() for code in codes), np.int32(_threshold(rate)), out.numpy())
    return out


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
        return _keep((sequence[batch], head, row[rows], column), self.rate, out)


@kernel()
def _fill_dropped(
    y_BSD: NDArray, sequence_B: NDArray, row_S: NDArray, column_D: NDArray, threshold: int, scale: float, out: NDArray
) -> None:
    """Add what is kept of y, times `scale`, to `out`; codes as in `_fill_keep`."""
    B, S, D = y_BSD.shape
    for b in range(B):
        for s in range(S):
            code = np.int32(sequence_B[b] + row_S[s])
            for d in range(D):
                kept = _mixed(np.int32(code + column_D[d])) >= threshold
                out[b, s, d] += y_BSD[b, s, d] * (scale if kept else scale - scale)


def _hidden_codes(x_BSD: Tensor, key: int, sequence_B: Tensor, rows_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int32 parts of sequences (with the key), rows and features."""
    feature = _spread(torch.arange(x_BSD.shape[-1], device=x_BSD.device), _COLUMN)
    return _spread(sequence_B, _SEQUENCE) + _signed(key), _spread(rows_S, _ROW), feature


def hidden_dropout(x_BSD: Tensor, rate: float, key: int, sequence_B: Tensor, rows_S: Tensor) -> Tensor:
    """Dropout of a token tensor [B, S, D], keyed by (key, sequence, global row, feature)."""
    if rate == 0.0:
        return x_BSD
    sequence, row, feature = _hidden_codes(x_BSD, key, sequence_B, rows_S)
    keep = _keep((sequence, torch.zeros_like(sequence[:1]), row, feature), rate).squeeze(1)
    return x_BSD * keep * (1.0 / (1.0 - rate))


def add_dropout(x_BSD: Tensor, y_BSD: Tensor, rate: float, key: int, sequence_B: Tensor, rows_S: Tensor) -> Tensor:
    """x + hidden_dropout(y), the same bits; on the CPU in one compiled pass that keeps nothing for backward."""
    if rate == 0.0:
        return x_BSD + y_BSD
    if device_type(y_BSD) != "cpu" or x_BSD.dtype != y_BSD.dtype:
        return x_BSD + hidden_dropout(y_BSD, rate, key, sequence_B, rows_S)
    out: Tensor = _AddDropout.apply(x_BSD, y_BSD, rate, _hidden_codes(y_BSD, key, sequence_B, rows_S))
    return out


class _AddDropout(torch.autograd.Function):
    """The mask is hashed again in backward."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, y_BSD: Tensor, rate: float, codes: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ctx.rest = rate, codes
        out_BSD = x_BSD.clone(memory_format=torch.contiguous_format)
        _add_dropped(out_BSD, y_BSD, rate, codes)
        return out_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dout_BSD,) = grads
        dy_BSD = torch.zeros_like(dout_BSD, memory_format=torch.contiguous_format)
        _add_dropped(dy_BSD, dout_BSD, *ctx.rest)
        return dout_BSD, dy_BSD, None, None


def _add_dropped(out_BSD: Tensor, y_BSD: Tensor, rate: float, codes: tuple[Tensor, Tensor, Tensor]) -> None:
    """out += dropout(y), in place; nothing where nothing is computed."""
    y_BSD = y_BSD.detach().contiguous()
    if not isinstance(out_BSD, FakeTensor):
        out, parts = out_BSD.numpy(), (code.numpy() for code in codes)
        scale = out.dtype.type(1 / (1 - rate))
        _fill_dropped(y_BSD.numpy(), *parts, np.int32(_threshold(rate)), scale, out)
