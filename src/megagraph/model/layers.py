"""The encoder layer of the graph transformers; attention is a slot filled from outside.

Shapes: B sequences, S local tokens, D hidden, H heads, F FFN, M bias channels, g global tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

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

    def forward(self, x_BSD: Tensor, scope: Scope, distance_gM: Tensor, layer: int) -> Tensor:
        """One layer; `distance_gM` are the global tokens' learned channels, `layer` the global layer number."""
        B, S, D = x_BSD.shape
        config = self.config
        qkv_BSD = self.qkv(self.attention_norm(x_BSD)).view(B, S, 3, config.heads, D // config.heads)
        q_BHSD, k_BHSD, v_BHSD = qkv_BSD.permute(2, 0, 3, 1, 4)
        # The bias of bias_projection is constant along the keys, so the softmax ignores it: its gradient is zero.
        weight_HM = self.bias_projection.weight
        weight_HM = torch.cat([weight_HM, weight_HM @ distance_gM.T], 1)
        dropout = scope.attention_dropout(config.attention_dropout, layer)
        out_BHSD = scope.attend(q_BHSD, k_BHSD, v_BHSD, weight_HM, dropout)
        out_BSD = self.attention_out(out_BHSD.transpose(1, 2).reshape(B, S, D))
        x_BSD = x_BSD + scope.dropout(out_BSD, config.residual_dropout, layer, ATTENTION_OUT_SITE)
        hidden_BSF = functional.gelu(self.ffn_in(self.ffn_norm(x_BSD)))
        return x_BSD + scope.dropout(self.ffn_out(hidden_BSF), config.residual_dropout, layer, FFN_OUT_SITE)
