"""Learning rate by epoch; order of centres by seed."""

import numpy as np
import pytest

from megagraph.config import TrainConfig
from megagraph.train.evaluate import even_capacity
from megagraph.train.progress import Epoch, Progress
from megagraph.train.schedule import epoch_order, learning_rate


def test_warm_up_then_linear_decay():
    config = TrainConfig(epochs=10, warmup_epochs=2, peak_lr=1.0, end_lr=0.2)
    rates = [learning_rate(config, epoch) for epoch in range(1, 11)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[-1] == pytest.approx(0.2)
    assert np.allclose(np.diff(rates[1:]), -0.1)


def test_all_warm_up():
    assert learning_rate(TrainConfig(epochs=3, warmup_epochs=10, peak_lr=1.0), 3) == pytest.approx(0.3)


def test_order_is_a_permutation_by_seed_and_epoch():
    nodes = np.arange(50) * 3
    first = epoch_order(nodes, 1, 1)
    assert sorted(first) == list(nodes)
    assert (first == epoch_order(nodes, 1, 1)).all()
    assert (first != epoch_order(nodes, 1, 2)).any()
    assert (first != epoch_order(nodes, 2, 1)).any()


@pytest.mark.parametrize(("count", "most", "expected"), [(1078, 256, 216), (1024, 1024, 1024), (5, 10, 5), (7, 3, 3)])
def test_steps_are_even(count, most, expected):
    assert even_capacity(count, most) == expected


def test_best_epoch_is_the_earliest_of_equals_and_never_an_unevaluated_one():
    rows = [(1, 0.5), (2, None), (3, 0.9), (4, 0.9), (5, None)]
    progress = Progress([Epoch(epoch, 1.0, 1.0, 0.1, value, value) for epoch, value in rows])
    assert progress.best.epoch == 3
    assert Progress.load(progress.dump()) == progress
