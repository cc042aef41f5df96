"""The loops of `lanes` that a compiler does not turn into vectors by itself, since it cannot know that tiles do not
overlap: written as instructions on vectors of `LANES` numbers, sums stay in registers.

Tiles are flat arrays of vectors; every place in one is counted in vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from megagraph.attention.dropout import ROUNDS

LANES = 32
"""Sequences side by side: four registers of float32, or eight of float64, with AVX2."""
FUSED = ["contract"]
_INT32 = ir.IntType(32)


class _Vectors:
    """Instructions on vectors, and places in the tiles that a loop was called with."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        self.builder = builder
        self.kinds = kinds
        self.values = values
        self._pointers = {
            index: context.make_array(kind)(context, builder, value).data
            for index, (kind, value) in enumerate(zip(kinds, values, strict=True))
            if isinstance(kind, types.Array)
        }
        self.element = context.get_value_type(kinds[0].dtype)
        self.single = isinstance(self.element, ir.FloatType)
        self.real = ir.VectorType(self.element, LANES)
        self.whole = ir.VectorType(ir.IntType(32 if self.single else 64), LANES)

    def place(self, index: int, start: Any) -> Any:
        """Pointer to a vector of the array that is argument `index`."""
        offset = self.builder.mul(start, ir.Constant(start.type, LANES))
        return self.builder.gep(self._pointers[index], [offset])

    def load(self, index: int, start: Any, kind: Any = None) -> Any:
        kind = kind or self.real
        pointer = self.builder.bitcast(self.place(index, start), kind.as_pointer())
        return self.builder.load(pointer, align=4 if kind.element == _INT32 or self.single else 8, typ=kind)

    def store(self, value: Any, index: int, start: Any) -> None:
        pointer = self.builder.bitcast(self.place(index, start), value.type.as_pointer())
        self.builder.store(value, pointer, align=4 if self.single else 8)

    def number(self, index: int, place: Any) -> Any:
        """One number of an array."""
        return self.builder.load(self.builder.gep(self._pointers[index], [place]))

    def splat(self, value: Any) -> Any:
        """A vector of one number."""
        kind = ir.VectorType(value.type, LANES)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT32(0))
        order = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), order)

    def constant(self, value: float, kind: Any = None) -> Any:
        kind = kind or self.real
        return ir.Constant(kind, [value] * LANES)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(a, b, flags=FUSED), c, flags=FUSED)

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def each(self, count: Any, body: Callable[[Any], None]) -> None:
        with cgutils.for_range(self.builder, count) as loop:
            body(loop.index)

    def exponential(self, x: Any) -> Any:
        """exp(x), x <= 0: adding `rounding` leaves an integer in the lowest bits, which are then put in the exponent's
        place; the rest is a polynomial."""
        builder = self.builder
        shift, bias, lowest, terms = (23, 127, -87.0, 7) if self.single else (52, 1023, -708.0, 12)
        high = 0.693359375 if self.single else float.fromhex("0x1.62e42feep-1")  # few digits: its product is exact
        rounding = self.constant(1.5 * 2.0**shift)
        y = self.larger(x, self.constant(lowest))
        shifted = self.multiply_add(y, self.constant(1 / math.log(2)), rounding)
        power = builder.bitcast(shifted, self.whole)
        power = builder.shl(power, self.constant(shift, self.whole))
        power = builder.bitcast(builder.add(power, self.constant(bias << shift, self.whole)), self.real)
        whole = builder.fsub(shifted, rounding)
        r = self.multiply_add(whole, self.constant(-high), y)
        r = self.multiply_add(whole, self.constant(high - math.log(2)), r)
        value = self.constant(1 / math.factorial(terms))
        for term in range(terms - 1, -1, -1):
            value = self.multiply_add(value, r, self.constant(1 / math.factorial(term)))
        return builder.fmul(value, power)

    def kept(self, code: Any, threshold: Any) -> Any:
        """Which lanes stay, by the hash of `dropout`."""
        kind, builder = code.type, self.builder
        for shift, factor in ROUNDS:
            code = builder.xor(code, builder.lshr(code, self.constant(shift, kind)))
            if factor is not None:
                code = builder.mul(code, self.constant(factor, kind))
        return builder.icmp_signed(">=", code, self.splat(threshold))


def _built(body: Callable[[_Vectors], None], kinds: tuple[Any, ...]) -> tuple[Any, Any]:
    """Signature and code of a loop that takes arrays, places (int64) and numbers, and returns nothing."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        body(_Vectors(context, builder, signature.args, values))
        return context.get_dummy_value()

    return types.void(*map(types.unliteral, kinds)), build


def _contract(v: _Vectors) -> None:
    x_start, x_step, y_start, y_step, count, out_start, first = (v.values[i] for i in (1, 2, 4, 5, 6, 8, 9))
    total = cgutils.alloca_once_value(v.builder, v.splat(first))

    def add(t: Any) -> None:
        x = v.load(0, v.builder.add(x_start, v.builder.mul(t, x_step)))
        y = v.load(3, v.builder.add(y_start, v.builder.mul(t, y_step)))
        v.builder.store(v.multiply_add(x, y, v.builder.load(total, typ=v.real)), total)

    v.each(count, add)
    v.store(v.builder.load(total, typ=v.real), 7, out_start)


def _scores(v: _Vectors) -> None:
    builder = v.builder
    q_start, k_start, width, e_start, e_step, head, channels, out_start, first = (
        v.values[i] for i in (1, 3, 4, 6, 7, 9, 10, 12, 13)
    )
    total = cgutils.alloca_once_value(builder, v.splat(first))

    def add(d: Any) -> None:
        x, y = v.load(0, builder.add(q_start, d)), v.load(2, builder.add(k_start, d))
        builder.store(v.multiply_add(x, y, builder.load(total, typ=v.real)), total)

    def project(m: Any) -> None:
        weight = v.splat(v.number(8, builder.add(builder.mul(head, channels), m)))
        e = v.load(5, builder.add(e_start, builder.mul(m, e_step)))
        builder.store(v.multiply_add(weight, e, builder.load(total, typ=v.real)), total)

    v.each(width, add)
    v.each(channels, project)
    v.store(builder.load(total, typ=v.real), 11, out_start)


def _largest(v: _Vectors) -> None:
    start, count, out_start = v.values[1], v.values[2], v.values[4]
    most = cgutils.alloca_once_value(v.builder, v.load(0, start))

    def compare(n: Any) -> None:
        x = v.load(0, v.builder.add(start, n))
        v.builder.store(v.larger(x, v.builder.load(most, typ=v.real)), most)

    v.each(count, compare)
    v.store(v.builder.load(most, typ=v.real), 3, out_start)


def _exponentials(v: _Vectors) -> None:
    start, count, sum_start = v.values[1], v.values[2], v.values[5]
    less = v.load(3, ir.Constant(ir.IntType(64), 0))
    total = cgutils.alloca_once_value(v.builder, v.constant(0.0))

    def one(n: Any) -> None:
        place = v.builder.add(start, n)
        e = v.exponential(v.builder.fsub(v.load(0, place), less))
        v.builder.store(v.builder.fadd(e, v.builder.load(total, typ=v.real)), total)
        v.store(e, 0, place)

    v.each(count, one)
    v.store(v.builder.load(total, typ=v.real), 4, sum_start)


def _times_kept(v: _Vectors, n: Any, first_argument: int) -> Any:
    """`times` for lanes that stay, else 0; arguments: lane codes, column codes, row code, threshold, times."""
    lanes, columns, row, threshold, times = range(first_argument, first_argument + 5)
    code = v.builder.add(v.values[row], v.number(columns, n))
    codes = v.load(lanes, ir.Constant(ir.IntType(64), 0), ir.VectorType(_INT32, LANES))
    stays = v.kept(v.builder.add(codes, v.splat(code)), v.values[threshold])
    return v.builder.select(stays, v.splat(v.values[times]), v.constant(0.0))


def _drop(v: _Vectors) -> None:
    start, count = v.values[1], v.values[2]

    def one(n: Any) -> None:
        place = v.builder.add(start, n)
        v.store(v.builder.fmul(v.load(0, place), _times_kept(v, n, 3)), 0, place)

    v.each(count, one)


def _softmax_backward(v: _Vectors) -> None:
    start, count = v.values[2], v.values[3]
    delta = v.load(4, ir.Constant(ir.IntType(64), 0))

    def one(n: Any) -> None:
        place = v.builder.add(start, n)
        times, p = _times_kept(v, n, 5), v.load(0, place)
        dp = v.builder.fmul(v.load(1, place), times)
        v.store(v.builder.fmul(p, v.builder.fsub(dp, delta)), 1, place)
        v.store(v.builder.fmul(p, times), 0, place)

    v.each(count, one)


# Parameter names of the functions below are those that compiled code sees; their types are numba's.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN201


@intrinsic
def contract(typing, a, a_start, a_step, b, b_start, b_step, count, out, out_start, first):
    """out[l] = first + sum over t < count of a[t, l] * b[t, l]."""
    return _built(_contract, (a, a_start, a_step, b, b_start, b_step, count, out, out_start, first))


@intrinsic
def score(typing, q, q_start, k, k_start, width, e, e_start, e_step, weight_HM, head, channels, out, out_start, first):
    """out[l] = first + q . k over `width` features + weight[head] . e over channels; `weight_HM` is contiguous."""
    kinds = q, q_start, k, k_start, width, e, e_start, e_step, weight_HM, head, channels, out, out_start, first
    return _built(_scores, kinds)


@intrinsic
def largest(typing, x, start, count, out, out_start):
    """out[l] = max over n < count of x[n, l]."""
    return _built(_largest, (x, start, count, out, out_start))


@intrinsic
def exponentials(typing, x, start, count, less, total, total_start):
    """x[n, l] <- exp(x[n, l] - less[l]), which is at most 1; total[l] = their sum."""
    return _built(_exponentials, (x, start, count, less, total, total_start))


@intrinsic
def drop(typing, x, start, count, lane_codes, column_codes, row_code, threshold, times):
    """x[n, l] <- times * x[n, l] where the hash of its codes' sum reaches the threshold, else 0."""
    return _built(_drop, (x, start, count, lane_codes, column_codes, row_code, threshold, times))


@intrinsic
def softmax_backward(typing, p, ds, start, count, delta, lane_codes, column_codes, row_code, threshold, times):
    """ds (holding dout . v) <- p * (dropped ds - delta), then p <- dropped p; as in `drop`."""
    kinds = p, ds, start, count, delta, lane_codes, column_codes, row_code, threshold, times
    return _built(_softmax_backward, kinds)
