"""EXP4-style learning of the heuristics' shares: rewards of drawn nodes, and the update (ans-gt 3).

Shapes: B sequences, N' regular tokens, E candidates, H heuristics, T distinct centres.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph.config import AdaptiveConfig
from megagraph.graph.candidates import CandidateSource
from megagraph.graph.jit import kernel

_TINY = 1e-5
_DIGITS = 6


@kernel()
def _rewards(
    rows_B: NDArray,
    indptr: NDArray,
    indices: NDArray,
    values_HE: NDArray,
    shares_H: NDArray,
    tokens_BN: NDArray,
    scores_BN: NDArray,
    rewards_BH: NDArray,
) -> None:
    """Fill float64 `rewards_BH`; tokens beyond the centre that are nobody's candidates earn nothing."""
    for b in range(len(rows_B)):
        for place in range(1, tokens_BN.shape[1]):
            for entry in range(indptr[rows_B[b]], indptr[rows_B[b] + 1]):
                if indices[entry] == tokens_BN[b, place]:
                    chance = _TINY
                    for h in range(len(shares_H)):
                        chance += shares_H[h] * values_HE[h, entry]
                    for h in range(len(shares_H)):
                        rewards_BH[b, h] += scores_BN[b, place] * values_HE[h, entry] / chance
                    break


def rewards(
    source: CandidateSource, shares_H: NDArray[np.float64], tokens_BN: NDArray[np.int64], scores_BN: NDArray
) -> NDArray[np.float64]:
    """What each heuristic earns by each sequence [B, H]: sum over its drawn tokens of score q_h / phi.

    q_h is the heuristic's normalised value at the token and phi = sum_h p_h q_h + 1e-5 the chance it was drawn with,
    for p = `shares_H`: the importance weights are right when the sequences were drawn with these shares.
    """
    centres_T, rows_B = np.unique(tokens_BN[:, 0], return_inverse=True)
    pool = source.of(centres_T)
    rewards_BH = np.zeros((len(tokens_BN), len(shares_H)))
    _rewards(rows_B, pool.indptr, pool.indices, pool.values_HE, shares_H, tokens_BN, scores_BN, rewards_BH)
    return rewards_BH


@dataclass
class Bandit:
    """The learned weights w_H (mean 1) and the number of updates; JSON-able, so that it travels in checkpoints."""

    config: AdaptiveConfig
    weights_H: NDArray[np.float64]
    updates: int = field(default=0)

    @classmethod
    def start(cls, config: AdaptiveConfig, weights_H: NDArray[np.float64]) -> Bandit:
        """Weights in the proportion that the configuration gives to the heuristics."""
        return cls(config, weights_H / weights_H.mean())

    @property
    def shares_H(self) -> NDArray[np.float64]:
        """p = (1 - H p_min) w / sum(w) + p_min."""
        p_min = self.config.p_min
        return (1.0 - len(self.weights_H) * p_min) * self.weights_H / self.weights_H.sum() + p_min

    def update(self, rewards_H: NDArray[np.float64]) -> None:
        """w <- w exp(rate (r + confidence / p)), scaled back to mean 1, which p ignores.

        Rewards are rounded, so that layouts, which differ in the last bits of a score, go on with the same draws.
        """
        gain_H = self.config.rate * (np.round(rewards_H, _DIGITS) + self.config.confidence / self.shares_H)
        weights_H = self.weights_H * np.exp(gain_H - gain_H.max())
        self.weights_H = weights_H / weights_H.mean()
        self.updates += 1

    def dump(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"weights": self.weights_H.tolist(), "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `dump`."""
        self.weights_H, self.updates = np.array(state["weights"], np.float64), int(state["updates"])
