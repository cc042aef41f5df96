"""The next pass's micro-batches are made in a thread while the device computes this one's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Loader:
    """Calls makers in order, one ahead of the caller; `waited` are the seconds the caller stood still for data.

    What is made depends on the maker alone, so items are the same with and without the thread, to the bit. Kernels of
    the data path release the interpreter lock. The thread shares the rank's core where there is no free one: the work
    is then moved, not hidden, and only the waiting is reported.
    """

    def __init__(self, ahead: bool) -> None:
        self._ahead = ahead
        self.waited = 0.0

    def run(self, makers: Sequence[Callable[[], T]]) -> Iterator[T]:
        """The items; an error of a maker is raised where its item is asked for."""
        if not self._ahead:
            for make in makers:
                yield self._timed(make)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            pending = [pool.submit(make) for make in makers[:1]]
            for number in range(len(makers)):
                item = self._timed(pending.pop().result)
                pending += [pool.submit(make) for make in makers[number + 1 : number + 2]]
                yield item
                del item  # before the next: two are held, not three

    def _timed(self, make: Callable[[], T]) -> T:
        begin = time.perf_counter()
        item = make()
        self.waited += time.perf_counter() - begin
        return item
