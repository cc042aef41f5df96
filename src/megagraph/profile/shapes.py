"""A graph, a coarsening and batches that have shapes and no numbers: what an engine is built from to predict.

Shapes: V nodes, S super nodes, F features; B sequences, S local and N all tokens, T local tokens without the global
ones, M bias channels, R read-out tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megagraph.graph.batch import EgoBuilder, SequenceBatch, SequenceBuilder
from megagraph.graph.sizes import GraphSizes, count_tokens
from megagraph.graph.store import Coarsening, Graph
from megagraph.train.engine import DTYPES, Data, EngineConfig


@dataclass(frozen=True)
class ShapeData(Data):
    """What `Data` is to a run, without a byte of the graph."""

    @classmethod
    def of(cls, sizes: GraphSizes) -> ShapeData:
        """Arrays of the right shapes that are one repeated zero."""
        zero, integer, none = np.float32(0), np.int64(0), np.empty(0, np.int32)
        graph = Graph(
            name="shapes",
            indptr=np.broadcast_to(integer, sizes.num_nodes + 1),
            indices=none,
            features_VF=np.broadcast_to(zero, (sizes.num_nodes, sizes.num_features)),
            labels_V=np.broadcast_to(integer, sizes.num_nodes),
            num_classes=sizes.num_classes,
        )
        coarsening = Coarsening(
            membership_V=np.broadcast_to(integer, sizes.num_nodes),
            features_SF=np.broadcast_to(zero, (sizes.num_super, sizes.num_features)),
            indptr=np.broadcast_to(integer, sizes.num_super + 1),
            indices=none,
            weights=np.empty(0, np.float32),
        )
        return cls(graph, coarsening)

    def builder(self, config: EngineConfig) -> SequenceBuilder:
        """A builder of batches without numbers."""
        return ShapeBuilder(self, config)


class ShapeBuilder(EgoBuilder):
    """What an engine asks of a builder. Its tensors are made in the fake mode that is active when it is asked."""

    def __init__(self, data: Data, config: EngineConfig) -> None:
        graph, coarsening, model = data.graph, data.coarsening, config.model
        counts = count_tokens(config.sampling, model.global_tokens, graph.num_nodes, coarsening.num_super)
        self.num_regular, self.num_super, self.num_readout = counts.num_regular, counts.num_super, counts.num_readout
        self._rows = graph.num_nodes + coarsening.num_super, graph.num_features
        self._model = model
        self._tensor_dtype = DTYPES[config.dtype]

    @property
    def features(self) -> Tensor:  # type: ignore[override]
        """The feature table [V+S, F]."""
        return torch.empty(self._rows, dtype=self._tensor_dtype)

    def build(
        self,
        nodes: NDArray[np.int64],
        *,
        stream: int,
        samples: int,
        first_sequence: int = 0,
        regular: slice | None = None,
    ) -> SequenceBatch:
        """See `SequenceBuilder.build`."""
        B = len(nodes) // self.num_readout * samples
        own = self.num_regular if regular is None else regular.stop - regular.start
        S, N, M = own + self.num_super, self.num_regular + self.num_super, self._model.bias_channels
        return SequenceBatch(
            ids_BT=torch.empty(B, S - self._model.global_tokens, dtype=torch.int64),
            bias_BMSN=torch.empty(B, M, S, N, dtype=self._tensor_dtype),
            sequence_B=torch.arange(first_sequence, first_sequence + B),
            labels_BR=torch.empty(B, self.num_readout, dtype=torch.int64),
            weight_BR=torch.empty(B, self.num_readout, dtype=self._tensor_dtype),
            nodes_B=torch.empty(B, dtype=torch.int64),
        )
