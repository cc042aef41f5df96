"""The reading `union` of a batch: few long sequences of many seeds, every seed read out (DESIGN section 3).

No token is a mask: a sequence short of distinct nodes is completed with further nodes of the graph, one short of
super nodes with further super nodes, as an ego sequence is. So N' and N_s are fixed and attention needs no mask.

Shapes: B sequences, R seeds, K draws per seed, N' = R (1 + K) regular tokens, P super nodes of a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph.graph.batch import SequenceBuilder
from megagraph.graph.jit import kernel
from megagraph.graph.sampling import sequence_keys

_FILL, _FILL_SUPER = 2, 3


@kernel()
def _unite(pools_BP: NDArray, keys_B: NDArray, total: int, seen: NDArray, tokens_BN: NDArray) -> None:
    """Fill int64 `tokens_BN` with the distinct ids of each row of `pools_BP`, in order, then with hashed ones.

    Negative ids are skipped; the walk for further ids starts at the row's uint64 key. int32 `seen` [total] is -1 on
    entry. A row whose pool holds no id is left as it is. `total` must not be below the number of tokens.
    """
    for b in range(len(pools_BP)):
        count = 0
        for place in range(pools_BP.shape[1]):
            token = pools_BP[b, place]
            if token >= 0 and seen[token] != b and count < tokens_BN.shape[1]:
                seen[token] = b
                tokens_BN[b, count] = token
                count += 1
        if count == 0:
            continue
        step = np.int64(keys_B[b] >> np.uint64(33))
        token = step % total
        while count < tokens_BN.shape[1]:
            if seen[token] != b:
                seen[token] = b
                tokens_BN[b, count] = token
                count += 1
            token = token + 1 if token + 1 < total else 0


class UnionBuilder(SequenceBuilder):
    """Long sequences of `seeds_per_sequence` seeds, `num_sampled` draws of each, and a chosen set of super nodes.

    `super_set`: `members` are the super nodes of the regular tokens (at most N'), `all` those of the whole graph,
    `top` the `num_super` that hold most of the regular tokens (ties to the smaller number).
    """

    def _tokens(
        self, nodes_BR: NDArray[np.int64], samples_B: NDArray[np.int64], stream: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Seeds, then the draws of each in turn, each node once; then the super nodes."""
        num_batch, num_seeds = nodes_BR.shape
        num_sampled = self._sampling.num_sampled
        rule: dict[str, Any] = {"weights_H": self.weights_H, "stream": stream, "num_sampled": num_sampled}
        drawn = self._sampler.nodes(nodes_BR.reshape(-1), np.repeat(samples_B, num_seeds), **rule)
        drawn_BRK = drawn[:, 1:].reshape(num_batch, num_seeds * num_sampled)
        # A short last sequence has its missing seeds at the end: they give way to further nodes that are not read out.
        pools_BP = np.concatenate([nodes_BR, drawn_BRK], axis=1)
        fine_BN = np.full((num_batch, self.num_regular), -1, np.int64)
        first_B = nodes_BR[:, 0]
        keys_B = sequence_keys(self._sampler.seed, stream, _FILL, first_B, samples_B)
        total = self._graph.num_nodes
        _unite(pools_BP, keys_B, total, np.full(total, -1, np.int32), fine_BN)
        return fine_BN, self._super_nodes(fine_BN, first_B, samples_B, stream)

    def _super_nodes(self, fine_BN: NDArray, first_B: NDArray, samples_B: NDArray, stream: int) -> NDArray[np.int64]:
        """The chosen super nodes [B, P] of each sequence, -1 for padding."""
        total, num_chosen = self._coarsening.num_super, self.num_super - self._global_tokens
        chosen_BP = np.full((len(fine_BN), num_chosen), -1, np.int64)
        if self._sampling.super_set == "all":
            chosen_BP[first_B >= 0] = np.arange(total)
            return chosen_BP
        sigma_BN = np.where(fine_BN < 0, -1, self._sampler.membership_V[np.maximum(fine_BN, 0)])
        if self._sampling.super_set == "top":
            for b in np.flatnonzero(first_B >= 0):
                counts = np.bincount(sigma_BN[b], minlength=total)
                chosen_BP[b] = np.argsort(-counts, kind="stable")[:num_chosen]
            return chosen_BP
        keys_B = sequence_keys(self._sampler.seed, stream, _FILL_SUPER, first_B, samples_B)
        _unite(sigma_BN, keys_B, total, np.full(total, -1, np.int32), chosen_BP)
        return chosen_BP
