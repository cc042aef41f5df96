"""Cuts of one cell with random costs of every stage, against all cuts simulated."""

import itertools

import numpy as np
import pytest

from megagraph.search import partition
from megagraph.search.labels import GPipeRule, OneFOneBRule, Options
from megagraph.search.partition import best_cut, evaluate, first_cut, list_cuts, undominated


def random_options(rng):
    """Stages of their own kind each; some numbers of layers do not fit; smooth costs half of the time."""
    num_stages = int(rng.integers(1, 5))
    num_layers, k = int(rng.integers(num_stages, 9)), int(rng.integers(1, 12))
    most = num_layers - num_stages + 1
    shape = num_stages, most + 1
    noise = rng.uniform(0.8, 1.3, (3, *shape)) if rng.random() < 0.5 else np.ones((3, *shape))
    n = np.arange(most + 1)
    f, b = (noise[i] * n * rng.uniform(0.5, 2, (num_stages, 1)) for i in range(2))
    a = noise[2] * rng.uniform(0, 6, (num_stages, 1))
    lost = rng.random(shape) < 0.15
    lost[:, 0] = True
    f, b, a, size = (np.where(lost, np.inf, part) for part in (f, b, a, np.ones(shape)))
    link = float(rng.choice([0.0, rng.uniform(0, 1)])) if num_stages > 1 else 0.0
    return Options(f, b, a, np.zeros(shape, dtype=int), size, np.arange(num_stages), link, k), num_layers


def cuts(options, num_layers):
    """Every cut that fits [R, P]."""
    num_stages = len(options.kinds)
    every = [np.diff((0, *cut, num_layers)) for cut in itertools.combinations(range(1, num_layers), num_stages - 1)]
    every = np.array(every).reshape(-1, num_stages)
    return every[np.isfinite(options.size[options.kinds, every]).all(axis=1)]


def schedules(options):
    return ("gpipe", "1f1b") if options.microbatches >= len(options.kinds) else ("gpipe",)


def solved(options, schedule, num_layers):
    """First cut, labels, list; the best seconds and the best bound."""
    found = first_cut(options, schedule, num_layers)
    best, low = found.seconds, found.low
    for step in (best_cut, list_cuts):
        if found.finished:
            break
        arguments = (options, schedule, num_layers, best) if step is best_cut else (options, num_layers, best)
        found = step(*arguments)
        best, low = min(best, found.seconds), max(low, found.low)
    return best, min(low, best)


def test_cuts_of_random_stages_equal_all_cuts_simulated():
    rng = np.random.default_rng(0)
    for _ in range(600):
        options, num_layers = random_options(rng)
        every = cuts(options, num_layers)
        for schedule in schedules(options):
            expected = evaluate(options, schedule, every).min(initial=np.inf)
            best, low = solved(options, schedule, num_layers)
            assert best == pytest.approx(expected, rel=1e-12)
            assert low == pytest.approx(expected, rel=1e-12)


def test_bounds_never_exceed_the_length_and_grow_with_every_stage():
    rng = np.random.default_rng(1)
    exact = 0
    for _ in range(300):
        options, num_layers = random_options(rng)
        every = cuts(options, num_layers)
        for schedule in schedules(options):
            rule = (GPipeRule if schedule == "gpipe" else OneFOneBRule)(options)
            length = evaluate(options, schedule, every)
            labels, left, before = np.repeat(rule.start(), len(every), axis=0), np.full(len(every), num_layers), 0.0
            for stage in reversed(range(len(options.kinds))):
                at = options.kinds[stage], every[:, stage]
                labels = rule.extend(labels, stage, options.forward[at], options.backward[at], options.update[at])
                left = left - every[:, stage]
                bound = rule.bound(labels, stage, left)
                assert (bound >= before * (1 - 1e-12)).all()
                assert (bound <= length * (1 + 1e-12)).all()
                before = bound
            if schedule == "gpipe":
                np.testing.assert_allclose(bound, length, rtol=1e-12)
            else:
                exact += np.mean(bound > length * (1 - 1e-12)) if len(every) else 0
    assert exact > 50


def test_too_many_labels_leave_a_true_bound(monkeypatch):
    monkeypatch.setattr(partition, "MAX_LABELS", 4)
    rng = np.random.default_rng(2)
    gaps = []
    for _ in range(150):
        options, num_layers = random_options(rng)
        every = cuts(options, num_layers)
        best, low = solved(options, "gpipe", num_layers)
        expected = evaluate(options, "gpipe", every).min(initial=np.inf)
        assert low <= expected * (1 + 1e-12) <= best * (1 + 2e-12)
        gaps.append(best / low - 1 if np.isfinite(best) else 0.0)
    assert max(gaps) < 0.2


def test_a_list_that_would_be_too_long_is_not_made(monkeypatch):
    monkeypatch.setattr(partition, "MAX_ROWS", 0)
    options, num_layers = random_options(np.random.default_rng(3))
    found = list_cuts(options, num_layers, np.inf)
    assert (found.layers, found.low) == (None, 0.0)


def test_only_rows_that_nothing_beats_are_kept():
    rng = np.random.default_rng(4)
    for count in (5, 700):
        labels, groups = rng.integers(0, 6, (count, 3)).astype(float), rng.integers(0, 3, count)
        kept = undominated(labels, groups)
        for row in range(count):
            rivals = [other for other in kept if groups[other] == groups[row] and (labels[other] <= labels[row]).all()]
            assert rivals, "every row has one that is at most it"
            assert (row in kept) == (rivals == [row])
