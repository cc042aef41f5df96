"""The hierarchical graph transformer (ANS-GT's model), written so that a pipeline stage is the same class with fewer
children: `embed` None, some of `layers` absent, `head` None. Layer names stay global.

Shapes: B sequences, T local tokens without the global ones, S local tokens, D hidden, F features, C classes,
R read-out tokens, M bias channels, g global tokens, U distinct rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megagraph.attention.precision import full_precision
from megagraph.attention.scope import INPUT_SITE, DistinctRows, Scope
from megagraph.config import ModelConfig
from megagraph.model.layers import EncoderLayer
from megagraph.model.nodes import NodeTable


class TokenEmbedding(nn.Module):
    """Feature rows projected to hidden width, plus learned rows of real nodes where there is a table of them, then the
    learned global tokens (`ans-gt.md` 2.1)."""

    features: Tensor

    def __init__(self, config: ModelConfig, features: Tensor, nodes: NodeTable | None = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("features", features, persistent=False)
        self.project = nn.Linear(features.shape[1], config.hidden)
        self.global_tokens = nn.Parameter(torch.empty(config.global_tokens, config.hidden))
        self.nodes = nodes

    def forward(self, ids_BT: Tensor, scope: Scope) -> Tensor:
        """Tokens [B, S, D] of rows `ids` of the feature table, or of `scope.distinct`; S = T + g.

        Dropout acts on tokens, so the elements that it drops do not depend on how rows are named.
        """
        distinct = scope.distinct
        if distinct is None and self.nodes is not None:
            distinct, ids_BT = DistinctRows.of(ids_BT, self.nodes.store.num_rows)
        if distinct is None:
            x_BTD = self.project(self.features[ids_BT]).to(self.global_tokens.dtype)
        else:
            # Backward sums the tokens of a row: in the weights' type, whatever the projection was computed in.
            x_UD = self.project(self.features[distinct.rows_U]).to(self.global_tokens.dtype)
            x_BTD = functional.embedding(ids_BT, x_UD if self.nodes is None else self.nodes(x_UD, distinct))
        x_BSD = torch.cat([x_BTD, self.global_tokens.expand(len(ids_BT), -1, -1)], 1)
        return scope.dropout(x_BSD, self.config.input_dropout, 0, INPUT_SITE)


class ClassifierHead(nn.Module):
    """Final norm and class scores of the read-out tokens."""

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.classify = nn.Linear(config.hidden, num_classes)

    def forward(self, x_BSD: Tensor, scope: Scope) -> Tensor:
        """Logits [B, R, C] of the first R local tokens."""
        with full_precision(x_BSD):
            return self.classify(self.norm(x_BSD[:, : scope.num_readout]))


class HierarchicalGT(nn.Module):
    """Embedding, encoder layers first..last, classifier.

    `layers` chooses which layers this instance owns. The first `recompute` of them keep no activations: their forward
    runs again in backward, with the same dropout, which is a hash of coordinates. `nodes` is the table of a model with
    `node_embedding`, used by the first stage.
    """

    def __init__(
        self,
        config: ModelConfig,
        features: Tensor,
        num_classes: int,
        layers: range | None = None,
        recompute: int = 0,
        nodes: NodeTable | None = None,
    ) -> None:
        super().__init__()
        owned = range(config.layers) if layers is None else layers
        first, last = owned.start == 0, owned.stop == config.layers
        assert not first or config.node_embedding == (nodes is not None), "a node embedding needs its table"
        self.config = config
        self.recompute = recompute
        self.embed = TokenEmbedding(config, features, nodes) if first else None
        # Every stage keeps the global tokens' bias channels: all layers use them, and gradients are summed over stages.
        self.distance_gM = nn.Parameter(torch.empty(config.global_tokens, config.bias_channels))
        self.layers = nn.ModuleDict({str(index): EncoderLayer(config) for index in owned})
        self.head = ClassifierHead(config, num_classes) if last else None

    def forward(self, x: Tensor, scope: Scope) -> Tensor:
        """Ids [B, T] on the first stage, tokens [B, S, D] elsewhere; logits [B, R, C] on the last stage."""
        if self.embed is not None:
            x = self.embed(x, scope)
        for number, (index, layer) in enumerate(self.layers.items()):
            last = int(index) == self.config.layers - 1
            num_rows = scope.num_readout if last and scope.only_readout else None
            arguments = x, scope, self.distance_gM, int(index), num_rows
            if number < self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
        return x if self.head is None else self.head(x, scope)


STAGE_SHARED = ("distance_gM",)
"""Parameters that live on every pipeline stage; their gradients are summed over stages too."""
