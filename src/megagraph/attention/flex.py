"""FlexAttention forward with the structural bias captured by its score function; the backward pass is tiled.

Dropout acts on probabilities, which a score function cannot reach, and stores other than dense channels are not
captured: those calls are served by the tiled forward.

Shapes: B sequences, H heads, S query rows, N key columns, D features per head, M bias channels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from megagraph.attention.bias import BiasStore, DenseBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import Kernel, block_backward, block_forward, compute_dtype


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def flex_forward(
    q_BHSD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    weight_HM: Tensor,
    bias: BiasStore,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `block_forward`: (out, log-sum-exp) of `compute_dtype`; not compiled on the CPU, where it only checks."""
    if dropout is not None or not isinstance(bias, DenseBias) or q_BHSD.shape[2] == 0:
        return block_forward(q_BHSD, k_BHND, v_BHND, weight_HM, bias, dropout)
    tokens, channels_BMSN = bias.tokens, bias.channels_BMSN
    weight = weight_HM.to(compute_dtype(q_BHSD.dtype))
    num_channels, count = channels_BMSN.shape[1], tokens.count
    first_row = tokens.num_rows - count
    first_column = k_BHND.shape[2] - tokens.columns

    def score(value: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        for channel in range(num_channels):
            value = value + weight[h, channel] * channels_BMSN[b, channel, row, column]
        for token in range(count):
            in_column = column == first_column + token
            in_row = (row == first_row + token) & (column < first_column) & (count > 1)
            distance = weight[h, num_channels + token]
            # The only global token's own row is constant, so the softmax ignores it; it stays zero in every backend.
            here = in_column & (row < first_row) if count == 1 else in_column | in_row
            value = value + torch.where(here, distance, torch.zeros_like(distance))
        return value

    attention = _compiled() if q_BHSD.is_cuda else flex_attention
    out, auxiliary = attention(q_BHSD, k_BHND, v_BHND, score_mod=score, return_aux=AuxRequest(lse=True))
    return out.to(weight.dtype), auxiliary.lse.to(weight.dtype)


FLEX = Kernel(flex_forward, block_backward)
