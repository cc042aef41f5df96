"""The next pass's micro-batches are made in a thread while the device computes this one's, over ends of epochs too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Loader(Generic[T]):
    """Calls makers in order, one ahead of the caller; `waited` are the seconds the caller stood still for data.

    What is made depends on the maker alone, so items are the same with and without the thread, to the bit. Kernels of
    the data path release the interpreter lock. The thread shares the rank's core where there is no free one: the work
    is then moved, not hidden, and only the waiting is reported.
    """

    def __init__(self, ahead: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader") if ahead else None
        self._pending: Future[T] | None = None
        self.waited = 0.0

    def run(self, makers: Sequence[Callable[[], T]], following: Callable[[], T] | None = None) -> Iterator[T]:
        """The items; an error of a maker is raised where its item is asked for.

        `following` makes the first item of the next run: it is begun when the last one here is handed out, and the
        first of the next run's makers is then not called.
        """
        if self._pool is None:
            for make in makers:
                yield self._timed(make)
            return
        ahead = [*makers, *([] if following is None else [following])]
        complete = False
        try:
            for number in range(len(makers)):
                pending, self._pending = self._pending or self._pool.submit(ahead[number]), None
                item = self._timed(pending.result)
                del pending
                if number + 1 < len(ahead):
                    self._pending = self._pool.submit(ahead[number + 1])
                yield item
                del item  # before the next: two are held, not three
            complete = True
        finally:
            if not complete:  # the next run begins anew
                self._pending = None

    def _timed(self, make: Callable[[], T]) -> T:
        begin = time.perf_counter()
        item = make()
        self.waited += time.perf_counter() - begin
        return item
