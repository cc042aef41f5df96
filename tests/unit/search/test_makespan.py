import numpy as np

from megagraph.search.makespan import gpipe_makespan


def test_closed_form_equals_simulation(simulate):
    rng = np.random.default_rng(0)
    for _ in range(2000):
        num_stages, k = int(rng.integers(1, 7)), int(rng.integers(1, 9))
        f, b, a = (rng.exponential(1.0, num_stages) for _ in range(3))
        links = {"link_forward": float(rng.exponential(0.5)), "link_backward": float(rng.exponential(0.5))}
        expected = simulate(f, b, a, k, **links)
        np.testing.assert_allclose(gpipe_makespan(f, b, a, microbatches=k, **links), expected, rtol=1e-13)


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
