import numpy as np
import pytest

from megagraph.search.makespan import gpipe_makespan, makespan, one_f_one_b_makespan, one_f_one_b_order, warm_up


@pytest.mark.parametrize(("schedule", "run"), [("gpipe", gpipe_makespan), ("1f1b", one_f_one_b_makespan)])
def test_2000_random_pipelines_equal_an_event_simulation(simulate, schedule, run):
    rng = np.random.default_rng(0)
    for _ in range(2000):
        num_stages, k = int(rng.integers(1, 7)), int(rng.integers(1, 9))
        f, b, a = (rng.exponential(1.0, num_stages) for _ in range(3))
        links = {"link_forward": float(rng.exponential(0.5)), "link_backward": float(rng.exponential(0.5))}
        expected = simulate(f, b, a, k, **links, schedule=schedule)
        np.testing.assert_allclose(run(f, b, a, microbatches=k, **links), expected, rtol=1e-13)


def test_many_1f1b_pipelines_at_once_equal_one_by_one():
    f, b, a = np.random.default_rng(1).random((3, 5, 3))
    together = one_f_one_b_makespan(f, b, a, microbatches=4, link_forward=0.1, link_backward=0.2)
    one = [
        one_f_one_b_makespan(*row, microbatches=4, link_forward=0.1, link_backward=0.2)
        for row in zip(f, b, a, strict=True)
    ]
    np.testing.assert_array_equal(together, one)


def test_equal_stages_take_as_long_under_either_schedule():
    parts = [2.0] * 4, [4.0] * 4, [0.5] * 4
    lengths = [makespan(schedule, *parts, microbatches=8, link=0.0) for schedule in ("gpipe", "1f1b")]
    assert lengths[0] == lengths[1] == (4 + 7) * 6.0 + 0.5


def test_a_window_shorter_than_the_round_trip_makes_1f1b_wait():
    parts = [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]
    gpipe, short = (float(makespan(schedule, *parts, microbatches=8, link=1.5)) for schedule in ("gpipe", "1f1b"))
    assert short > gpipe


def test_no_stage_keeps_more_than_its_window():
    for num_stages, k in ((1, 3), (4, 4), (4, 9), (3, 2)):
        kept, most = [0] * num_stages, [0] * num_stages
        for stage, ahead, _ in one_f_one_b_order(num_stages, k):
            kept[stage] += 1 if ahead else -1
            most[stage] = max(most[stage], kept[stage])
        assert most == [warm_up(num_stages, stage, k) for stage in range(num_stages)]


def test_many_pipelines_at_once_equal_one_by_one():
    rng = np.random.default_rng(1)
    f, b, a = (rng.random((5, 7, 3)) for _ in range(3))
    together = gpipe_makespan(f, b, a, microbatches=4, link_forward=0.1, link_backward=0.2)
    assert together.shape == (5, 7)
    one = gpipe_makespan(f[2, 3], b[2, 3], a[2, 3], microbatches=4, link_forward=0.1, link_backward=0.2)
    assert together[2, 3] == one


def test_slowest_stages_of_the_two_directions_count_apart():
    f, b = [4.0, 1.0], [1.0, 4.0]
    k = 3
    one_maximum = sum(f) + sum(b) + (k - 1) * 5.0
    assert gpipe_makespan(f, b, [0.0, 0.0], microbatches=k) == 10 + 2 * (4 + 4) > one_maximum


def test_update_of_an_early_finishing_stage_can_be_hidden():
    f = b = [1.0, 1.0]
    bare = float(gpipe_makespan(f, b, [0.0, 0.0], microbatches=2))
    assert gpipe_makespan(f, b, [0.0, 0.5], microbatches=2) == bare
    assert gpipe_makespan(f, b, [0.5, 0.0], microbatches=2) == bare + 0.5
