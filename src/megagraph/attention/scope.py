"""What the forward pass of one micro-batch needs beside its activations.

Shapes: B sequences, T local tokens without the global ones, S local tokens, N tokens of the whole sequence, D hidden,
U distinct rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megagraph.attention.dropout import AttentionDropout, add_dropout, fold, hidden_dropout
from megagraph.attention.slot import Attend

INPUT_SITE, ATTENTION_SITE, ATTENTION_OUT_SITE, FFN_OUT_SITE = range(4)


@dataclass(frozen=True)
class DistinctRows:
    """The rows of the feature table that a micro-batch names, each once and ascending; its ids are places in them.

    The first `num_nodes` of them are real nodes, super nodes follow.
    """

    rows_U: Tensor
    num_nodes: int

    @classmethod
    def of(cls, ids_BT: Tensor, num_nodes: int) -> tuple[Self, Tensor]:
        """The distinct rows of ids, and the place of every id in them [B, T]; rows below `num_nodes` are real nodes.

        Fake ids are taken to be all different, the most there can be: how many repeat depends on what they are.
        """
        if isinstance(ids_BT, FakeTensor):
            return cls(ids_BT.flatten(), ids_BT.numel() if num_nodes else 0), ids_BT
        rows_U, places_BT = torch.unique(ids_BT, return_inverse=True)
        return cls(rows_U, int((rows_U < num_nodes).sum())), places_BT

    def to(self, device: torch.device) -> Self:
        """The same rows on a device."""
        return type(self)(self.rows_U.to(device), self.num_nodes)


@dataclass(frozen=True)
class Scope:
    """Attention of a micro-batch, the global positions of its tokens, and the key of its randomness.

    `key` is None in evaluation: no dropout. `num_readout` counts the local rows that are read out (a prefix);
    `only_readout` lets the last layer compute these rows alone. With `distinct`, the ids that the first stage gets are
    places in these rows instead of rows of the feature table.
    """

    attend: Attend
    sequence_B: Tensor
    rows_S: Tensor
    columns_N: Tensor
    num_readout: int
    key: int | None = None
    only_readout: bool = True
    distinct: DistinctRows | None = None

    def dropout(self, x_BSD: Tensor, rate: float, layer: int, site: int) -> Tensor:
        """Hidden dropout at a place of the model; `x` holds the first of the local rows."""
        if self.key is None:
            return x_BSD
        return hidden_dropout(x_BSD, rate, fold(self.key, layer, site), self.sequence_B, self.rows_S[: x_BSD.shape[1]])

    def add_dropout(self, x_BSD: Tensor, y_BSD: Tensor, rate: float, layer: int, site: int) -> Tensor:
        """x + dropout(y): a residual connection."""
        if self.key is None:
            return x_BSD + y_BSD
        key, rows_S = fold(self.key, layer, site), self.rows_S[: y_BSD.shape[1]]
        return add_dropout(x_BSD, y_BSD, rate, key, self.sequence_B, rows_S)

    def attention_dropout(self, rate: float, layer: int) -> AttentionDropout | None:
        """The dropout of a layer's attention probabilities."""
        if self.key is None or rate == 0.0:
            return None
        key = fold(self.key, layer, ATTENTION_SITE)
        return AttentionDropout(rate, key, self.sequence_B, self.rows_S, self.columns_N)
