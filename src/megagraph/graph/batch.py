"""Batches of sequences: what every builder shares, and `ego`, one centre per sequence.

Token order: N' regular nodes (those read out first), the super nodes, the global tokens; N_s = super nodes + globals.

Shapes: B sequences, N = N' + N_s tokens, S local tokens (rows of this rank), T = S without the global tokens,
M bias channels, R read-out tokens, V nodes, F features, H heuristics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from megagraph.config import SamplingConfig, UserError
from megagraph.graph.candidates import HeuristicSource
from megagraph.graph.sampling import Sampler
from megagraph.graph.sizes import count_tokens
from megagraph.graph.store import Coarsening, Graph
from megagraph.graph.structure import coarse_powers, fine_powers


@dataclass(frozen=True)
class SequenceBatch:
    """One batch, the rows of one rank.

    `ids_BT` rows of `SequenceBuilder.features` (long), local regular nodes then super nodes; `bias_BMSN` structural
    channels, local rows by all columns, zero in rows and columns of global tokens; `sequence_B` number of the sequence
    in the global step (long); `labels_BR` (long) and `weight_BR` (0 for padding), the same on every rank; `nodes_B`
    the first read-out node, -1 for padding.
    """

    ids_BT: Tensor
    bias_BMSN: Tensor
    sequence_B: Tensor
    labels_BR: Tensor
    weight_BR: Tensor
    nodes_B: Tensor


class SequenceBuilder(ABC):
    """What builders share: checks, features, structural bias. A builder chooses tokens (`_tokens`).

    `num_regular` is N', `num_super` is N_s (global tokens included), `num_readout` is R; `weights_H` are the shares of
    the heuristics in the draws, which adaptive sampling replaces between steps.
    """

    num_regular: int
    num_super: int
    num_readout: int

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        sampling: SamplingConfig,
        *,
        bias_channels: int,
        global_tokens: int,
        seed: int,
        dtype: DTypeLike = np.float32,
    ) -> None:
        """Nothing of a node is prepared before a batch asks for it, except `global` powers.

        `UserError` when the coarsening is of another graph, a sequence does not fit into it or the exact powers are too
        large.
        """
        if len(coarsening.membership_V) != graph.num_nodes:
            raise UserError(
                f"coarsening of {len(coarsening.membership_V)} nodes does not belong to graph {graph.name} of "
                f"{graph.num_nodes} nodes: coarsen this graph again"
            )
        counts = count_tokens(sampling, global_tokens, graph.num_nodes, coarsening.num_super)
        self.num_regular, self.num_super, self.num_readout = counts.num_regular, counts.num_super, counts.num_readout
        self._graph, self._coarsening = graph, coarsening
        self._dtype = np.dtype(dtype)
        self._sampling = sampling
        self._global_tokens, self._bias_channels = global_tokens, bias_channels
        self._compat = sampling.compat == "ansgt"
        self._first_source = HeuristicSource.from_config(graph, sampling)
        # What rewards are computed with, and draws after the first of them: one definition except in ANS-GT.
        self.source = (
            HeuristicSource.from_config(graph, sampling, by_column=True) if self._compat else self._first_source
        )
        self.weights_H = np.array([sampling.heuristics[name] for name in sampling.heuristics], np.float64)
        self.weights_H /= self.weights_H.sum()
        self._sampler = Sampler.of(self._first_source, coarsening, seed, fill_from_the_end=self._compat)
        self._fine = fine_powers(graph, sampling.powers, bias_channels, dtype)
        self._coarse = coarse_powers(coarsening, sampling.powers, bias_channels, dtype)

    @cached_property
    def features(self) -> NDArray:
        """Rows that `ids_BT` name [V+S, F]: features of nodes, then of super nodes; made when first asked for."""
        return np.concatenate([self._graph.features_VF, self._coarsening.features_SF]).astype(self._dtype, copy=False)

    def adapt(self, weights_H: NDArray[np.float64], updates: int) -> None:
        """Draw with other shares from now on; `updates` have been learned.

        ANS-GT draws from PageRank alone before the first update and from its second definition after (ans-gt 1.4).
        """
        self.weights_H = weights_H
        if self._compat and updates == 0:
            self.weights_H = np.array([name == "ppr" for name in self.source.names], np.float64)
        source = self.source if updates else self._first_source
        self._sampler = replace(self._sampler, source=source)

    def regular_nodes(self, nodes: NDArray[np.int64], *, stream: int, samples: int) -> NDArray[np.int64]:
        """The regular tokens [B, N'] of the sequences that `build` makes of the same arguments."""
        nodes_BR = np.repeat(np.asarray(nodes, np.int64).reshape(-1, self.num_readout), samples, axis=0)
        samples_B = np.tile(np.arange(samples), len(nodes) // self.num_readout)
        return self._tokens(nodes_BR, samples_B, stream)[0]

    @abstractmethod
    def _tokens(
        self, nodes_BR: NDArray[np.int64], samples_B: NDArray[np.int64], stream: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Regular nodes [B, N'], the first R those of `nodes_BR`, and super nodes; -1 throughout for padding."""

    def build(
        self,
        nodes: NDArray[np.int64],
        *,
        stream: int,
        samples: int,
        first_sequence: int = 0,
        regular: slice | None = None,
    ) -> SequenceBatch:
        """The sequences of `nodes` (-1 pads), R to a sequence, `samples` consecutive ones each.

        B = len(nodes) / R * samples. A sequence is a pure function of (seed, `stream`, its nodes, sample) and of
        `weights_H`. `regular` asks for the rows of the regular tokens lo..hi, then those of super nodes and global
        tokens; None for all. Columns are always all N.
        """
        rows = slice(0, self.num_regular) if regular is None else regular
        assert rows.step in (None, 1) and 0 <= rows.start <= rows.stop <= self.num_regular, rows
        nodes = np.asarray(nodes, np.int64)
        assert nodes.ndim == 1 and (nodes < self._graph.num_nodes).all(), "nodes are a vector of ids of the graph"
        assert len(nodes) % self.num_readout == 0, "nodes fill whole sequences; pad with -1"
        nodes_BR = np.repeat(np.where(nodes < 0, -1, nodes).reshape(-1, self.num_readout), samples, axis=0)
        samples_B = np.tile(np.arange(samples), len(nodes) // self.num_readout)
        fine_BN, super_BN = self._tokens(nodes_BR, samples_B, stream)
        ids_BT = np.concatenate([fine_BN[:, rows], super_BN + self._graph.num_nodes], axis=1)
        ids_BT[fine_BN[:, 0] < 0] = 0
        labels_BR = np.where(nodes_BR < 0, -1, self._graph.labels_V[np.maximum(nodes_BR, 0)])
        return SequenceBatch(
            ids_BT=torch.from_numpy(ids_BT),
            bias_BMSN=torch.from_numpy(self._bias(fine_BN, super_BN, rows)),
            sequence_B=torch.arange(first_sequence, first_sequence + len(nodes_BR)),
            labels_BR=torch.from_numpy(np.maximum(labels_BR, 0)),
            weight_BR=torch.from_numpy((labels_BR >= 0).astype(self._dtype)),
            nodes_B=torch.from_numpy(nodes_BR[:, 0].copy()),
        )

    def _bias(self, fine_BN: NDArray[np.int64], super_BN: NDArray[np.int64], rows: slice) -> NDArray:
        """Bias rows of this rank [B, M, S, N] (ans-gt 1.6): A_hat^m between nodes, B_m wherever a super node is."""
        num_batch, num_fine = fine_BN.shape
        num_rows, num_super = rows.stop - rows.start, super_BN.shape[1]
        num_local = num_rows + num_super + self._global_tokens
        num_tokens = num_fine + num_super + self._global_tokens
        bias_BMSN = np.zeros((num_batch, self._bias_channels, num_local, num_tokens), self._dtype)
        self._fine.fill(bias_BMSN, fine_BN, rows.start, num_rows, 0, 0)
        sigma_BN = np.where(fine_BN < 0, -1, self._sampler.membership_V[np.maximum(fine_BN, 0)])
        coarse_BN = np.concatenate([sigma_BN, super_BN], axis=1)
        self._coarse.fill(bias_BMSN, coarse_BN, num_fine, num_super, num_rows, 0)
        below_BMSN = bias_BMSN[:, :, num_rows : num_rows + num_super, rows]
        bias_BMSN[:, :, :num_rows, num_fine : num_fine + num_super] = below_BMSN.swapaxes(2, 3)
        return bias_BMSN


class EgoBuilder(SequenceBuilder):
    """Short sequences around centre nodes (ans-gt 1.5): the reading `ego` of a batch, R = 1."""

    def _tokens(
        self, nodes_BR: NDArray[np.int64], samples_B: NDArray[np.int64], stream: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The centre and its draws, the centre's super node and its draws."""
        centres_B = np.ascontiguousarray(nodes_BR[:, 0])
        sampling = self._sampling
        rule: dict[str, Any] = {"weights_H": self.weights_H, "stream": stream, "num_sampled": sampling.num_sampled}
        fine_BN = self._sampler.nodes(centres_B, samples_B, **rule)
        super_BN = self._sampler.super_nodes(centres_B, samples_B, stream=stream, num_super=sampling.num_super)
        return fine_BN, super_BN
