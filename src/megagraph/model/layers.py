"""The encoder layer of the graph transformers; attention is a slot filled from outside.

Shapes: B sequences, S local tokens, R rows computed, D hidden, H heads, F FFN, M bias channels, g global tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megagraph.attention.precision import full_precision
from megagraph.attention.scope import ATTENTION_OUT_SITE, FFN_OUT_SITE, Scope
from megagraph.config import ModelConfig


class EncoderLayer(nn.Module):
    """Pre-norm attention with projected structural bias, then a GELU feed-forward block (`ans-gt.md` 2.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.config = config
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.bias_projection = nn.Linear(config.bias_channels, config.heads)
        self.attention_out = nn.Linear(hidden, hidden)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.ffn_in = nn.Linear(hidden, config.ffn)
        self.ffn_out = nn.Linear(config.ffn, hidden)

    def forward(
        self, x_BSD: Tensor, scope: Scope, distance_gM: Tensor, layer: int, num_rows: int | None = None
    ) -> Tensor:
        """One layer; `distance_gM` are the global tokens' learned channels, `layer` the global layer number.

        With `num_rows` only the first R rows are computed, against the keys and values of all: [B, R, D].
        """
        config = self.config
        q_BHRD, k_BHSD, v_BHSD = self._project(self.attention_norm(x_BSD), num_rows)
        x_BSD = x_BSD[:, :num_rows]
        dropout = scope.attention_dropout(config.attention_dropout, layer)
        with full_precision(x_BSD):
            # The bias of bias_projection is constant along the keys, so the softmax ignores it: its gradient is zero.
            weight_HM = self.bias_projection.weight
            weight_HM = torch.cat([weight_HM, weight_HM @ distance_gM.T], 1)
            out_BHRD = scope.attend(q_BHRD, k_BHSD, v_BHSD, weight_HM, dropout)
        out_BSD = self.attention_out(out_BHRD.transpose(1, 2).reshape(x_BSD.shape))
        x_BSD = scope.add_dropout(x_BSD, out_BSD, config.residual_dropout, layer, ATTENTION_OUT_SITE)
        hidden_BSF = functional.gelu(self.ffn_in(self.ffn_norm(x_BSD)))
        return scope.add_dropout(x_BSD, self.ffn_out(hidden_BSF), config.residual_dropout, layer, FFN_OUT_SITE)

    def _project(self, x_BSD: Tensor, num_rows: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the first R rows, keys and values of all, per head [B, H, ., D/H]."""
        B, _, D = x_BSD.shape
        heads, width = self.config.heads, D // self.config.heads
        if num_rows is None:
            q_BHSD, k_BHSD, v_BHSD = _Heads.apply(self.qkv(x_BSD), 3, heads)
            return q_BHSD, k_BHSD, v_BHSD
        weight, bias = self.qkv.weight, self.qkv.bias
        q_BRD = functional.linear(x_BSD[:, :num_rows], weight[:D], bias[:D])
        k_BHSD, v_BHSD = _Heads.apply(functional.linear(x_BSD, weight[D:], bias[D:]), 2, heads)
        return q_BRD.view(B, q_BRD.shape[1], heads, width).transpose(1, 2), k_BHSD, v_BHSD


class _Heads(torch.autograd.Function):
    """A projection [B, S, P * D] as P parts per head [B, H, S, D/H], all views of it."""

    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, num_parts: int, heads: int) -> tuple[Tensor, ...]:
        B, S, C = x_BSC.shape
        ctx.shape = B, S, num_parts, heads, C // (num_parts * heads)
        return x_BSC.view(ctx.shape).permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """A kernel may have written the gradients side by side as the parts are: then nothing is copied."""
        B, S, _, heads, width = ctx.shape
        first, size = grads[0], heads * width
        strides = S * len(grads) * size, width, len(grads) * size, 1
        if all(
            grad.untyped_storage()._cdata == first.untyped_storage()._cdata
            and grad.storage_offset() == first.storage_offset() + part * size
            and grad.stride() == strides
            for part, grad in enumerate(grads)
        ):
            return first.as_strided((B, S, len(grads) * size), (strides[0], strides[2], 1)), None, None
        dx_BSPHD = first.new_empty(ctx.shape)
        for part, grad in zip(dx_BSPHD.permute(2, 0, 3, 1, 4), grads, strict=True):
            part.copy_(grad)
        return dx_BSPHD.view(B, S, -1), None, None
