"""Control models without attention: what a graph transformer has to beat under the same split and selection rule.

Shapes: V nodes, F features, D hidden, C classes, E edges.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv

from megagraph.config import ModelConfig


class GCN(nn.Module):
    """Graph convolutions over the whole graph (Kipf and Welling 2017), dropout before each layer."""

    def __init__(self, config: ModelConfig, num_features: int, num_classes: int) -> None:
        super().__init__()
        widths = [num_features, *[config.hidden] * (config.layers - 1), num_classes]
        self.convolutions = nn.ModuleList(GCNConv(wide, narrow, cached=True) for wide, narrow in pairwise(widths))
        self.dropout = config.residual_dropout

    def forward(self, x_VF: Tensor, edges_2E: Tensor) -> Tensor:
        """Logits [V, C] of every node."""
        for number, convolution in enumerate(self.convolutions):
            if number:
                x_VF = functional.relu(x_VF)
            x_VF = functional.dropout(x_VF, self.dropout, self.training)
            x_VF = convolution(x_VF, edges_2E)
        return x_VF
