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


def test_the_first_item_of_the_next_run_is_made_at_the_end_of_this_one():
    loader, made, begun = Loader(True), [], threading.Event()
    makers = [lambda n=n: made.append(n) or n for n in range(3)]
    assert list(loader.run(makers[:2], lambda: made.append("next") or begun.set() or "next")) == [0, 1]
    assert begun.wait(10), "it is made before the next run asks for it"
    assert list(loader.run(makers[1:])) == ["next", 2]
    assert list(loader.run(makers)) == [0, 1, 2], "what follows is used once"
    assert made == [0, 1, "next", 2, 0, 1, 2]


def test_a_run_that_is_given_up_leaves_nothing_to_the_next():
    loader = Loader(True)
    items = loader.run([lambda: 1, lambda: 2])
    assert next(items) == 1
    items.close()
    assert list(loader.run([lambda: 3])) == [3]


def test_without_the_thread_nothing_follows():
    loader = Loader(False)
    assert list(loader.run([lambda: 1], lambda: 1 // 0)) == [1]
    assert list(loader.run([lambda: 2])) == [2]


def test_an_error_is_raised_at_its_item():
    items = Loader(True).run([lambda: 1, lambda: 1 // 0, lambda: 3])
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError):
        next(items)
