"""ANS-GT's way of training, for the benchmarks: sequences drawn once and kept, attention and dropout as it writes them.

Shapes: B sequences, N tokens, M bias channels, G global tokens, H heads, S local tokens, D features.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.scope import Scope
from megagraph.attention.slot import Attend
from megagraph.graph.batch import SequenceBatch, SequenceBuilder
from megagraph.parallel.stage import Microbatch
from megagraph.train.engine import Engine


class StoredSequences:
    """A builder that draws each node's one sequence once, keeps it and hands out copies: ANS-GT's data set."""

    def __init__(self, builder: SequenceBuilder, num_nodes: int) -> None:
        self._builder = builder
        # The last row is padding: node -1 finds it.
        self._all = builder.build(np.append(np.arange(num_nodes), -1), stream=0, samples=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    @property
    def bytes(self) -> int:
        """What is kept."""
        return sum(getattr(self._all, field.name).nbytes for field in fields(self._all))

    def build(
        self,
        nodes: NDArray[np.int64],
        *,
        stream: int,
        samples: int,
        first_sequence: int = 0,
        regular: slice | None = None,
    ) -> SequenceBatch:
        """The kept sequences of `nodes`, whatever the stream."""
        assert samples == 1, "one sequence of each node is kept"
        rows = torch.from_numpy(np.where(nodes < 0, len(self._all.nodes_B) - 1, nodes))
        parts = {field.name: getattr(self._all, field.name)[rows] for field in fields(self._all)}
        batch = SequenceBatch(**parts)
        return replace(batch, sequence_B=torch.arange(first_sequence, first_sequence + len(rows)))


@dataclass(frozen=True)
class ShippedScope(Scope):
    """A scope whose dropout is torch's."""

    def dropout(self, x_BSD: Tensor, rate: float, layer: int, site: int) -> Tensor:
        """Hidden dropout at any place of the model."""
        return functional.dropout(x_BSD, rate, self.key is not None)

    def add_dropout(self, x_BSD: Tensor, y_BSD: Tensor, rate: float, layer: int, site: int) -> Tensor:
        """A residual connection."""
        return x_BSD + self.dropout(y_BSD, rate, layer, site)


def shipped_attention(channels_BMNN: Tensor, num_global: int) -> Attend:
    """ANS-GT's attention: bias channels last, projected to heads by a linear layer, everything materialised."""
    batch, _, tokens, _ = channels_BMNN.shape
    marks_BGNN = channels_BMNN.new_zeros(batch, num_global, tokens, tokens)
    for token in range(num_global):
        marks_BGNN[:, token, tokens - num_global + token, : tokens - num_global] = 1.0
        marks_BGNN[:, token, :, tokens - num_global + token] = 1.0
    bias_BNNM = torch.cat([channels_BMNN, marks_BGNN], 1).permute(0, 2, 3, 1).contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor, weight_HM: Tensor, dropout: AttentionDropout | None) -> Tensor:
        scores_BHNN = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3))
        scores_BHNN = scores_BHNN + functional.linear(bias_BNNM, weight_HM).permute(0, 3, 1, 2)
        p_BHNN = scores_BHNN.softmax(-1)
        if dropout is not None:
            p_BHNN = functional.dropout(p_BHNN, dropout.rate)
        return torch.matmul(p_BHNN, v)

    return attend


def ship(engine: Engine) -> None:
    """Let an engine attend, drop out and project features as ANS-GT does: every token by itself."""
    bind, num_global = engine.shard.microbatch, engine.layout.num_global

    def microbatch(batch: SequenceBatch, key: int | None) -> Microbatch:
        part = bind(batch, key)
        kept = {field.name: getattr(part.scope, field.name) for field in fields(Scope)}
        attend = shipped_attention(batch.bias_BMSN, num_global)
        scope = ShippedScope(**{**kept, "attend": attend, "only_readout": False, "distinct": None})
        return replace(part, ids_BT=batch.ids_BT, scope=scope)

    engine.shard.microbatch = microbatch  # type: ignore[method-assign, assignment]
