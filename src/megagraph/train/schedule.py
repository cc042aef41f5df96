"""The learning rate and the order of centres: pure functions of the epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megagraph.config import TrainConfig


def learning_rate(config: TrainConfig, epoch: int) -> float:
    """Rate of a 1-based epoch: linear warm-up to the peak, then linear decay to `end_lr` at the last epoch."""
    if epoch <= config.warmup_epochs:
        return config.peak_lr * epoch / config.warmup_epochs
    decay_epochs = config.epochs - config.warmup_epochs
    left = (config.epochs - epoch) / decay_epochs if decay_epochs > 0 else 0.0
    return config.end_lr + (config.peak_lr - config.end_lr) * left


def epoch_order(nodes: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """The training centres in the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(nodes)
