"""Seconds and bytes of a run: steady-state epoch time, peak of live tensor memory."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megagraph.artifacts import Timing


def timing(seconds: Sequence[float]) -> Timing:
    """Median and interquartile range of repeated measurements."""
    if len(seconds) < 2:
        return Timing(median=seconds[0], iqr=0.0, repeats=len(seconds))
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median=middle, iqr=high - low, repeats=len(seconds))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages and their peak while active.

    The CPU counterpart of `torch.cuda.max_memory_allocated`: allocator caches and libraries are not in it. Storages
    are followed by weak references; `track` adds those made before (weights, features, optimiser state). Each counts
    as whole granules, what an allocator hands out at least. `at_peak` is called whenever there is a new peak.
    """

    def __init__(self, granule: int = 1, at_peak: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._granule = granule
        self._at_peak = at_peak
        self._live: dict[int, Any] = {}

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._granule) * self._granule

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Count existing tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live:
                size = self._size(storage)
                self._live[key] = weakref.ref(storage, partial(self._release, key, size))
                self.current += size
        if self.current > self.peak:
            self.peak = self.current
            self._at_peak()

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """What these tensors contribute to `current`, each storage once."""
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        return sum(self._size(storage) for key, storage in storages.items() if key in self._live)

    def _release(self, key: int, size: int, _: Any) -> None:
        if self._live.pop(key, None) is not None:
            self.current -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count storages that appear in its result."""
        result = func(*args, **(kwargs or {}))
        self.track(leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor))
        return result


class PeakMemory:
    """Peak bytes of a block, or of several: the CUDA allocator's counter on a GPU, live tensors elsewhere."""

    def __init__(self, device: torch.device, existing: Iterable[Tensor]) -> None:
        self._device = device
        self._tracker = None if device.type == "cuda" else LiveBytes()
        self._existing = list(existing)
        self._active = False
        self.bytes = 0

    @property
    def source(self) -> str:
        """Which counter `bytes` is."""
        return "live tensor storages" if self._tracker else "cuda max_memory_allocated"

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that another thread made: a dispatch mode sees its own thread only."""
        if self._tracker is not None and self._active:
            self._tracker.track(tensors)

    def __enter__(self) -> PeakMemory:
        self._active = True
        if self._tracker is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._tracker.__enter__()
            self._tracker.track(self._existing)
        self._existing = []
        return self

    def __exit__(self, *details: Any) -> None:
        self._active = False
        if self._tracker is None:
            self.bytes = max(self.bytes, torch.cuda.max_memory_allocated(self._device))
        else:
            self._tracker.__exit__(*details)
            self.bytes = self._tracker.peak
