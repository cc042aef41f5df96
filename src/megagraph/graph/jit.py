"""How the graph kernels are compiled: every option is there to keep the first run of an installation short.

A kernel is compiled once per installation and per set of argument types. What costs seconds is not loops but what
they call: assigning to a slice, sorting and allocating pull in library code that is compiled along. So kernels get
their arrays from outside, in the same types everywhere, and hold loops only. A counter that an inner function gets
starts as ``np.int64(0)``: for a plain 0 the function is compiled once more, for that very number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import njit

kernel: Any = partial(njit, cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
"""Decorates a function that Python calls."""

inner: Any = partial(njit, nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
"""Decorates a function that only kernels call: it is kept as a part of theirs, and no way in from Python is made."""
