"""Which tokens a sequence holds: weighted draws without replacement, keyed by hashes instead of by a generator.

The uniform number of a candidate is a hash of (seed, stream, centre, sample, candidate), so every rank and every
batch that asks for a sequence gets the same tokens.

Shapes: B sequences, N tokens of one kind in a sequence (the first is given), V nodes, S super nodes, E candidates,
T distinct centres, H heuristics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from megagraph.graph.candidates import CandidateSource
from megagraph.graph.jit import inner, kernel
from megagraph.graph.store import Coarsening

_NODES, _SUPER = 0, 1
_WORD = 0xFFFFFFFFFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 1.0 / 9007199254740992.0
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


Pool = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]
"""Where tokens come from: the row of each sequence [B], and CSR pointers, columns and weights of all rows."""


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 output for each state (Steele, Lea, Flood 2014), same shape."""
    word = state + _GOLDEN
    word = (word ^ (word >> _SHIFT_30)) * _MIX_1
    word = (word ^ (word >> _SHIFT_27)) * _MIX_2
    return word ^ (word >> _SHIFT_31)


_splitmix64: Any = inner()(splitmix64)


def sequence_keys(
    seed: int, stream: int, purpose: int, nodes_B: NDArray[np.int64], samples_B: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """One hash [B] for each (seed, stream, purpose, node, sample); any integers, negative ones too."""
    key_B = np.zeros(len(nodes_B), np.uint64)
    for part in (seed, stream, purpose):
        key_B = splitmix64(key_B ^ np.uint64(part & _WORD))
    for part_B in (nodes_B, samples_B):
        key_B = splitmix64(key_B ^ part_B.astype(np.int64).view(np.uint64))
    return key_B


@kernel()
def _race(
    keys_B: NDArray,
    rows_B: NDArray,
    indptr: NDArray,
    indices: NDArray,
    weights_E: NDArray,
    times_N: NDArray,
    counts_B: NDArray,
    tokens_BN: NDArray,
) -> None:
    """Draw by weight from CSR row `rows_B` (int32 `indices`, float32 `weights_E`) after the first `counts_B` tokens.

    The arrival time of a candidate is -log(u) / weight, u its uniform number from the sequence's uint64 key; the first
    arrivals are a weighted sample without replacement in order of draw (Gumbel top-k, exponential form). Tokens that
    are there on entry are not drawn. float64 `times_N` is for work; int64 `counts_B` grows by what was drawn. Rows
    below 0 stay.
    """
    num_tokens = tokens_BN.shape[1]
    for sequence in range(len(rows_B)):
        row, first = rows_B[sequence], counts_B[sequence]
        if row < 0 or first == num_tokens:
            continue
        count = first
        for entry in range(indptr[row], indptr[row + 1]):
            token = np.int64(indices[entry])
            weight = weights_E[entry]
            held = not weight > 0
            for place in range(first):
                held |= tokens_BN[sequence, place] == token
            if held:
                continue
            word = _splitmix64(keys_B[sequence] + _GOLDEN * np.uint64(token + 1))
            time = -np.log((np.float64(word >> _SHIFT_11) + 0.5) * _UNIT) / weight
            if count == num_tokens:
                if time >= times_N[count - 1]:
                    continue
                count -= 1
            place = count
            while place > first and times_N[place - 1] > time:
                times_N[place] = times_N[place - 1]
                tokens_BN[sequence, place] = tokens_BN[sequence, place - 1]
                place -= 1
            times_N[place] = time
            tokens_BN[sequence, place] = token
            count += 1
        counts_B[sequence] = count


@kernel()
def _fill_up(keys_B: NDArray, total: int, from_the_end: bool, counts_B: NDArray, tokens_BN: NDArray) -> None:
    """Complete int64 `tokens_BN` after the first `counts_B` with hashed ids below `total`, distinct while any are left.

    A taken id gives way to the next free one, so that this ends even when few are free. bool `from_the_end` completes
    as ANS-GT does: with the nodes of largest number that were not drawn, ascending. Rows that begin with -1 stay.
    """
    num_tokens = tokens_BN.shape[1]
    for sequence in range(len(counts_B)):
        count = counts_B[sequence]
        if tokens_BN[sequence, 0] < 0:
            continue
        token = np.int64(total)
        for step in range(num_tokens - count):
            place = num_tokens - 1 - step if from_the_end else count + step
            start, stop = (1, count) if from_the_end else (0, place)
            if from_the_end:
                token = token - 1 if token > 0 else token
            else:
                token = np.int64(_splitmix64(keys_B[sequence] ^ _splitmix64(np.uint64(place))) % np.uint64(total))
            held = from_the_end or place < total
            while held:
                held = False
                for other in range(start, stop):
                    held |= tokens_BN[sequence, other] == token
                if from_the_end:
                    held &= token > 0
                if held:
                    token = token - 1 if from_the_end else (token + 1) % total
            tokens_BN[sequence, place] = token


def _draw(
    keys_B: NDArray[np.uint64],
    pools: list[Pool],
    total: int,
    from_the_end: bool,
    tokens_BN: NDArray[np.int64],
) -> None:
    """Complete int64 `tokens_BN`, whose first column is given: from the pools in turn, then with any id below `total`.

    Rows whose first token is -1 stay.
    """
    counts_B = np.ones(len(tokens_BN), np.int64)
    num_tokens = tokens_BN.shape[1]
    for rows_B, indptr, indices, weights_E in pools:
        if (counts_B < num_tokens).any():
            _race(keys_B, rows_B, indptr, indices, weights_E, np.empty(num_tokens), counts_B, tokens_BN)
    if (counts_B < num_tokens)[tokens_BN[:, 0] >= 0].any():
        _fill_up(keys_B, total, from_the_end, counts_B, tokens_BN)


@dataclass(frozen=True)
class Sampler:
    """Draws the regular nodes and the super nodes of sequences; build it with `Sampler.of`."""

    seed: int
    source: CandidateSource
    membership_V: NDArray[np.int64]
    member_indptr: NDArray[np.int64]
    members_V: NDArray[np.int32]
    equal_V: NDArray[np.float32]
    coarse: sp.csr_array
    coarse_rows: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]
    fill_from_the_end: bool = False

    @classmethod
    def of(
        cls, source: CandidateSource, coarsening: Coarsening, seed: int, *, fill_from_the_end: bool = False
    ) -> Sampler:
        """A sampler over the mixture of candidates and over the rows of A_c.

        `fill_from_the_end` completes short sequences as ANS-GT ships it, with unrelated nodes (ans-gt 1.5).
        """
        membership_V = np.ascontiguousarray(coarsening.membership_V, np.int64)
        sizes_S = np.bincount(membership_V, minlength=coarsening.num_super)
        coarse = coarsening.adjacency()
        return cls(
            seed=seed,
            source=source,
            membership_V=membership_V,
            member_indptr=np.concatenate([[0], np.cumsum(sizes_S)]),
            members_V=np.argsort(membership_V, kind="stable").astype(np.int32),
            equal_V=np.ones(len(membership_V), np.float32),
            coarse=coarse,
            coarse_rows=(
                coarse.indptr.astype(np.int64),
                coarse.indices.astype(np.int32),
                coarse.data.astype(np.float32),
            ),
            fill_from_the_end=fill_from_the_end,
        )

    def nodes(
        self,
        centres_B: NDArray[np.int64],
        samples_B: NDArray[np.int64],
        *,
        weights_H: NDArray[np.float64],
        stream: int,
        num_sampled: int,
    ) -> NDArray[np.int64]:
        """Regular nodes [B, 1 + num_sampled]: the centre, then draws by mixture weight in order of draw (ans-gt 1.5).

        `weights_H` are the shares of the source's heuristics. Where candidates run out: members of the centre's super
        node, then any nodes, never one twice unless the graph has fewer nodes than the sequence. A row whose centre
        is -1 is -1 throughout.
        """
        tokens_BN = np.full((len(centres_B), 1 + num_sampled), -1, np.int64)
        tokens_BN[:, 0] = centres_B
        keys_B = sequence_keys(self.seed, stream, _NODES, centres_B, samples_B)
        centres_T, rows_B = np.unique(centres_B, return_inverse=True)
        padding = int(len(centres_T) > 0 and centres_T[0] < 0)
        rows_B = rows_B - padding
        pool = self.source.of(centres_T[padding:])
        pools = [(rows_B, pool.indptr, pool.indices, pool.mixture(weights_H))]
        if not self.fill_from_the_end:
            groups_B = np.where(centres_B < 0, -1, self.membership_V[np.maximum(centres_B, 0)])
            pools.append((groups_B, self.member_indptr, self.members_V, self.equal_V))
        _draw(keys_B, pools, len(self.membership_V), self.fill_from_the_end, tokens_BN)
        return tokens_BN

    def super_nodes(
        self, centres_B: NDArray[np.int64], samples_B: NDArray[np.int64], *, stream: int, num_super: int
    ) -> NDArray[np.int64]:
        """Super nodes [B, 1 + num_super]: the centre's sigma(i), then others drawn from A_c[sigma(i)] (ans-gt 1.5).

        Where neighbours run out: any super nodes, never one twice unless there are too few. Centre -1 gives -1.
        """
        own_B = np.where(centres_B >= 0, self.membership_V[np.maximum(centres_B, 0)], -1)
        tokens_BN = np.full((len(centres_B), 1 + num_super), -1, np.int64)
        tokens_BN[:, 0] = own_B
        keys_B = sequence_keys(self.seed, stream, _SUPER, centres_B, samples_B)
        _draw(keys_B, [(own_B, *self.coarse_rows)], self.coarse.shape[0], False, tokens_BN)
        return tokens_BN
