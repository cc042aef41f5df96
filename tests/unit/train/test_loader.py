"""The loader: items in order and one ahead, waiting measured, errors where they belong."""

import threading
from functools import partial

import pytest

from megagraph.train.loader import Loader


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_items_come_in_order(ahead, count):
    assert list(Loader(ahead).run([partial(int, str(n)) for n in range(count)])) == list(range(count))


def test_the_next_item_is_made_while_the_caller_holds_this_one():
    made = [threading.Event() for _ in range(3)]
    items = Loader(True).run([lambda n=n: (made[n].set(), threading.current_thread().name)[1] for n in range(3)])
    assert next(items).startswith("loader")
    assert made[1].wait(10), "the second item is made without being asked for"
    assert not made[2].is_set(), "one ahead, not more: memory holds two steps"
    items.close()


def test_without_the_thread_items_are_made_when_asked_for():
    made = []
    items = Loader(False).run([lambda n=n: made.append(n) for n in range(3)])
    next(items)
    assert made == [0]


def test_waiting_is_what_the_caller_waited():
    release = threading.Event()
    loader = Loader(True)
    threading.Timer(0.05, release.set).start()
    list(loader.run([lambda: release.wait(10)]))
    assert 0.01 < loader.waited < 10


def test_an_error_is_raised_at_its_item():
    items = Loader(True).run([lambda: 1, lambda: 1 // 0, lambda: 3])
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError):
        next(items)
