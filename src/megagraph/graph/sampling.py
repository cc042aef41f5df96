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
from numba import njit
from numpy.typing import NDArray

from megagraph.graph.candidates import CandidateSource
from megagraph.graph.store import Coarsening

_NODES, _SUPER = 0, 1
_WORD = 0xFFFFFFFFFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 output for each state (Steele, Lea, Flood 2014), same shape."""
    word = state + _GOLDEN
    word = (word ^ (word >> _SHIFT_30)) * _MIX_1
    word = (word ^ (word >> _SHIFT_27)) * _MIX_2
    return word ^ (word >> _SHIFT_31)


_splitmix64: Any = njit(cache=True, nogil=True, inline="always")(splitmix64)


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


@njit(cache=True, nogil=True)
def _arrival(key: int, candidate: int, weight: float) -> float:
    """Arrival time of an int64 candidate in the race of uint64 `key`: -log(u) / float weight, u its uniform number.

    The first k arrivals are a weighted sample without replacement in order of draw (Gumbel top-k, exponential form).
    """
    word = _splitmix64(key + _GOLDEN * np.uint64(candidate + 1))
    uniform = (np.float64(word >> _SHIFT_11) + 0.5) * (1.0 / 9007199254740992.0)
    return -np.log(uniform) / weight


@njit(cache=True, nogil=True)
def _enter(time: float, token: int, first: int, count: int, times_N: NDArray, tokens_N: NDArray) -> int:
    """Insert (float time, int token) into the ascending lists that stand at ``first : count``; the new count."""
    if count == len(tokens_N):
        if time >= times_N[count - 1]:
            return count
        count -= 1
    place = count
    while place > first and times_N[place - 1] > time:
        times_N[place] = times_N[place - 1]
        tokens_N[place] = tokens_N[place - 1]
        place -= 1
    times_N[place] = time
    tokens_N[place] = token
    return count + 1


@njit(cache=True, nogil=True)
def _holds(tokens_N: NDArray, count: int, token: int) -> bool:
    """Whether int64 `token` is among the first `count` tokens."""
    for place in range(count):  # noqa: SIM110 (compiled code has no generators)
        if tokens_N[place] == token:
            return True
    return False


@njit(cache=True, nogil=True)
def _fill_up(key: int, total: int, count: int, tokens_N: NDArray) -> None:
    """Complete int64 `tokens_N` with hashed ids below `total`, distinct while there are any left.

    A taken id gives way to the next free one, so that this ends even when few are free.
    """
    for place in range(count, len(tokens_N)):
        word = _splitmix64(key ^ _splitmix64(np.uint64(place)))
        token = int(word % np.uint64(total))
        if place < total:
            while _holds(tokens_N, place, token):
                token = token + 1 if token + 1 < total else 0
        tokens_N[place] = token


@njit(cache=True, nogil=True)
def _fill_from_the_end(total: int, count: int, tokens_N: NDArray) -> None:
    """Complete int64 `tokens_N` as ANS-GT does: with the nodes of largest number that were not drawn, ascending."""
    token = total - 1
    for place in range(len(tokens_N) - 1, count - 1, -1):
        while token > 0 and _holds(tokens_N[1:], count - 1, token):
            token -= 1
        tokens_N[place] = token
        token = max(token - 1, 0)


@njit(cache=True, nogil=True)
def _draw(
    keys_B: NDArray,
    rows_B: NDArray,
    indptr: NDArray,
    indices: NDArray,
    weights_E: NDArray,
    groups_B: NDArray,
    group_indptr: NDArray,
    group_members: NDArray,
    total: int,
    from_the_end: bool,
    tokens_BN: NDArray,
) -> None:
    """Complete int64 `tokens_BN`, whose first column is given, for the uint64 keys; rows with ``rows_B < 0`` stay.

    From CSR row `rows_B` by weight; then the members of group `groups_B` in hashed order; then any id below `total`.
    bool `from_the_end` completes with the largest ids instead (`_fill_from_the_end`).
    """
    num_tokens = tokens_BN.shape[1]
    times_N = np.empty(num_tokens)
    for sequence in range(len(rows_B)):
        row = rows_B[sequence]
        if row < 0:
            continue
        key, tokens_N = keys_B[sequence], tokens_BN[sequence]
        count = 1
        if num_tokens > 1:
            for entry in range(indptr[row], indptr[row + 1]):
                token = int(indices[entry])
                if weights_E[entry] > 0 and token != tokens_N[0]:
                    count = _enter(_arrival(key, token, weights_E[entry]), token, 1, count, times_N, tokens_N)
        if from_the_end:
            _fill_from_the_end(total, count, tokens_N)
            continue
        drawn = count
        if drawn < num_tokens:
            group = groups_B[sequence]
            for entry in range(group_indptr[group], group_indptr[group + 1]):
                token = group_members[entry]
                if not _holds(tokens_N, drawn, token):
                    count = _enter(_arrival(key, token, 1.0), token, drawn, count, times_N, tokens_N)
        _fill_up(key, total, count, tokens_N)


@dataclass(frozen=True)
class Sampler:
    """Draws the regular nodes and the super nodes of sequences; build it with `Sampler.of`."""

    seed: int
    source: CandidateSource
    membership_V: NDArray[np.int64]
    member_indptr: NDArray[np.int64]
    members_V: NDArray[np.int64]
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
            members_V=np.argsort(membership_V, kind="stable"),
            coarse=coarse,
            coarse_rows=(coarse.indptr.astype(np.int64), coarse.indices.astype(np.int32), coarse.data),
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
        groups = (self.membership_V[np.maximum(centres_B, 0)], self.member_indptr, self.members_V)
        candidates = (pool.indptr, pool.indices, pool.mixture(weights_H))
        _draw(keys_B, rows_B, *candidates, *groups, len(self.membership_V), self.fill_from_the_end, tokens_BN)
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
        no_group = (np.zeros(len(own_B), np.int64), np.zeros(2, np.int64), np.zeros(0, np.int64))
        _draw(keys_B, own_B, *self.coarse_rows, *no_group, self.coarse.shape[0], False, tokens_BN)
        return tokens_BN
