"""Live bytes: exact on a chain whose peak is known by counting."""

import pytest
import torch

from megagraph.train.meters import LiveBytes, PeakMemory, timing


def test_peak_of_a_known_chain():
    x = torch.zeros(1000, 1000)  # 4 MB
    memory = PeakMemory(torch.device("cpu"), [x])
    with memory:
        y = x + 1  # 8
        z = y + 1  # 12
        del y  # 8
        w = z + 1  # 12
        del z, w
    assert memory.bytes == 12_000_000


def test_views_count_once_and_saved_tensors_count():
    weight = torch.ones(100, 100, requires_grad=True)
    tracker = LiveBytes()
    with tracker:
        tracker.track([weight])
        assert tracker.current == 40_000
        y = (weight.view(50, 200)[:10] * 1.0).exp()
        before = tracker.current
        z = y * y  # keeps y
        del y
        assert tracker.current > before
        z.sum().backward()
    assert tracker.peak >= tracker.current
    assert weight.grad is not None


def test_timing_is_median_and_spread():
    value = timing([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (value.median, value.iqr, value.repeats) == (3.0, 2.0, 5)
    assert timing([2.0]).median == pytest.approx(2.0)


def test_what_another_thread_made_is_counted_when_it_is_held():
    import threading

    made = []
    memory = PeakMemory(torch.device("cpu"), [])
    with memory:
        worker = threading.Thread(target=lambda: made.append(torch.zeros(250)))
        worker.start()
        worker.join()
        memory.hold(made)
        kept = made[0] + 1
        made.clear()
    memory.hold([torch.zeros(1000)])  # after the block: not counted
    assert memory.bytes == 2000
    assert len(kept) == 250


def test_granules_round_up_and_the_peak_is_told():
    seen = []
    tracker = LiveBytes(granule=512, at_peak=lambda: seen.append(tracker.current))
    first = torch.zeros(1)
    tracker.track([first])
    with tracker:
        second = first + 1
        del second
        third = torch.zeros(200) + 0  # 800 bytes, and as much while it is made
    assert seen == [512, 1024, 1536, 2560]
    assert tracker.peak == 2560
    assert tracker.bytes_of([first, first.view(1), third, torch.zeros(9)]) == 1536
