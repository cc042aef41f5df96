"""Attention over short sequences on the CPU: one compiled pass forward, one backward, no intermediate tensor.

The tiles of `kernel` spend their time on copies and small products where a sequence has a few dozen tokens. Here
many sequences are worked through side by side (`lanes`). Whatever this does not serve goes to the tiled functions.

Shapes: B sequences, H heads, S query rows, N key columns, D features per head, M bias channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megagraph.attention import lanes
from megagraph.attention.bias import BiasStore, DenseBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import Kernel, block_backward, block_forward, compute_dtype
from megagraph.attention.vectors import LANES

MAX_TOKENS = 64


def serves(q_BHSD: Tensor, k_BHND: Tensor, bias: BiasStore) -> bool:
    """Whether the compiled loops compute this block: dense channels, few tokens, several sequences."""
    rows, columns = q_BHSD.shape[2], k_BHND.shape[2]
    return isinstance(bias, DenseBias) and 0 < rows <= MAX_TOKENS and 0 < columns <= MAX_TOKENS and len(q_BHSD) > 1


def _scalars(dtype: torch.dtype, head_dim: int, dropout: AttentionDropout | None) -> tuple[Any, ...]:
    """Numbers of one type: the scale of scores, that of what dropout keeps, one, zero."""
    real = np.float32 if dtype == torch.float32 else np.float64
    return real(head_dim**-0.5), real(1.0 if dropout is None else dropout.scale), real(1.0), real(0.0)


def _flat(x: Tensor) -> tuple[Any, tuple[int, ...]]:
    """A tensor as numbers in a row and its strides: one array type for every layout."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((extent,), (1,)).numpy(), x.stride()


def _scratch(counts: list[int], real: type) -> tuple[Any, ...]:
    """Tiles of so many vectors each, and the lanes' hash codes."""
    return tuple(np.empty(count * LANES, real) for count in counts), np.empty(LANES, np.int32)


@dataclass(frozen=True)
class _Shared:
    """What both passes need beside q, k and v, as tensors: fake ones cost what real ones do.

    `fixed_HSN` are the distances of global tokens. Without dropout all codes are 0 and every hash reaches `threshold`.
    """

    channels_BMSN: Tensor
    weight_HM: Tensor
    fixed_HSN: Tensor
    codes: tuple[Tensor, ...]
    threshold: int

    @classmethod
    def of(
        cls, bias: DenseBias, weight_HM: Tensor, dropout: AttentionDropout | None, sizes: tuple[int, int, int]
    ) -> Self:
        """For B sequences of S rows and N columns."""
        B, S, N = sizes
        H, dtype = len(weight_HM), weight_HM.dtype
        channels = bias.channels_BMSN[:, :, :S].to(dtype)
        fixed_BHSN = weight_HM.new_zeros(1, H, S, N)
        bias.tokens.add(fixed_BHSN, weight_HM, slice(0, S))
        weight_HM = weight_HM[:, : channels.shape[1]].contiguous()
        if dropout is not None:
            return cls(channels, weight_HM, fixed_BHSN[0], dropout.codes(H), dropout.threshold)
        zeros = tuple(torch.zeros(count, dtype=torch.int32, device=weight_HM.device) for count in (B, H, S, N))
        return cls(channels, weight_HM, fixed_BHSN[0], zeros, -(2**31))

    def arrays(self) -> tuple[Any, ...]:
        """In the order in which the loops take them."""
        codes = (code.numpy() for code in self.codes)
        structure = *_flat(self.channels_BMSN), self.weight_HM.numpy(), self.fixed_HSN.numpy()
        return *structure, *codes, np.int32(self.threshold)


def short_forward(
    q_BHSD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    weight_HM: Tensor,
    bias: BiasStore,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `block_forward`: (out, log-sum-exp) of `compute_dtype`; in memory, heads of a token are neighbours."""
    if not serves(q_BHSD, k_BHND, bias):
        return block_forward(q_BHSD, k_BHND, v_BHND, weight_HM, bias, dropout)
    assert isinstance(bias, DenseBias)
    B, H, S, D = q_BHSD.shape
    N, dtype = k_BHND.shape[2], compute_dtype(q_BHSD.dtype)
    q, k, v, weight = (x.detach().to(dtype) for x in (q_BHSD, k_BHND, v_BHND, weight_HM))
    out_BHSD = torch.empty(B, S, H, D, dtype=dtype, device=q.device).transpose(1, 2)
    lse_BHS = torch.empty(B, H, S, dtype=dtype, device=q.device)
    total_BHS = torch.empty_like(lse_BHS)
    shared = _Shared.of(bias, weight, dropout, (B, S, N))
    if not isinstance(q, FakeTensor):
        M, scalars = shared.weight_HM.shape[1], _scalars(dtype, D, dropout)
        tiles = [S * D, N * D, N * D, S * D, M * S * N, N, 1, 1]
        lanes.forward(
            *_flat(q), *_flat(k), *_flat(v), *shared.arrays(), (S, N, D, M), scalars, *_flat(out_BHSD),
            lse_BHS.numpy(), total_BHS.numpy(), *_scratch(tiles, type(scalars[0])),
        )  # fmt: skip
    lse_BHS += total_BHS.log_()
    return out_BHSD, lse_BHS


def short_backward(
    dout_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    weight_HM: Tensor,
    bias: BiasStore,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    dweight_HM: Tensor,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `block_backward`. Gradients lie side by side as in a projection [B, N, (q), k, v, H, D]."""
    if not serves(q_BHSD, k_BHND, bias):
        arguments = weight_HM, bias, lse_BHS, delta_BHS, dweight_HM, dropout
        return block_backward(dout_BHSD, q_BHSD, k_BHND, v_BHND, *arguments)
    assert isinstance(bias, DenseBias)
    B, H, S, D = q_BHSD.shape
    N, dtype = k_BHND.shape[2], compute_dtype(q_BHSD.dtype)
    dout, q, k, v, weight = (x.detach().to(dtype) for x in (dout_BHSD, q_BHSD, k_BHND, v_BHND, weight_HM))
    parts = torch.empty(B, N, 3 if S == N else 2, H, D, dtype=dtype, device=q.device).permute(2, 0, 3, 1, 4)
    dq_BHSD = parts[0] if S == N else torch.empty(B, S, H, D, dtype=dtype, device=q.device).transpose(1, 2)
    dk_BHND, dv_BHND = parts[-2], parts[-1]
    shared, lse, delta = _Shared.of(bias, weight, dropout, (B, S, N)), lse_BHS.contiguous(), delta_BHS.contiguous()
    structural_HM, fixed_BHSN = torch.zeros_like(shared.weight_HM), weight.new_zeros(1, H, S, N)
    if not isinstance(q, FakeTensor):
        M, scalars = structural_HM.shape[1], _scalars(dtype, D, dropout)
        tiles = [S * D, N * D, N * D, S * D, M * S * N, S * N, S * N, 1, 1, max(S, N) * D, 1]
        lanes.backward(
            *_flat(dout), *_flat(q), *_flat(k), *_flat(v), *shared.arrays(), (S, N, D, M), scalars,
            lse.numpy(), delta.numpy(), *_flat(dq_BHSD), *_flat(dk_BHND), *_flat(dv_BHND),
            structural_HM.numpy(), fixed_BHSN[0].numpy(), *_scratch(tiles, type(scalars[0])),
        )  # fmt: skip
    dweight_HM[:, : structural_HM.shape[1]] += structural_HM
    bias.tokens.collect(dweight_HM, fixed_BHSN, slice(0, S))
    return dq_BHSD, dk_BHND, dv_BHND


SHORT = Kernel(short_forward, short_backward)
