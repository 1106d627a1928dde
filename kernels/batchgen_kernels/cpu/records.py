"""Rows of activations as int8, for `quantised.py`.

A row is cut into groups of `GROUP` features; what a row becomes depends on that row alone. Each group is
turned by a Hadamard matrix first, as weights are, which leaves products as they are (but for a factor of
`GROUP`) and spreads an outlier over its group: https://arxiv.org/abs/2404.00456. Then it gets a scale:

    scale = largest magnitude / 127        q = x * (127 / largest magnitude), to the nearest whole number

A row of any width, filled up with zeros to whole groups, is a record:

    q of all features | float32 scale of each group | int32 beginning of each group's sums

A group with a number that is not finite has such a scale, and so has every product with the row; a group of
which nothing reaches `TINY` is all zeros.
"""

# mypy: disable-error-code="attr-defined,call-arg,call-overload,no-untyped-call,var-annotated"

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from batchgen_kernels.cpu.vectors import F32, I32, Vectors, at, has_feature, index

GROUP = 64
"""Features that share a scale; records hold whole groups."""
LARGEST = 127
"""Magnitude of a quantised number."""
TINY = 1e-30
OFFSET = 128
"""Added to weights, for the instruction that multiplies unsigned by signed bytes."""
HAS_DOT = (has_feature("avx512vnni") and has_feature("avx512vl")) or has_feature("avxvnni")
"""Whether four products of bytes and their sum are one instruction."""
ITEM = 1 if HAS_DOT else 2
"""Bytes of a number in a record: where pairs are multiplied, they are pairs of 16 bits."""
ORDER = (0, 1, 2, 3) if HAS_DOT else (0, 2, 1, 3)
"""Of four numbers in a record; it is its own inverse."""
_RECORD_ALIGNMENT = 64
_NEAREST = 1.5 * 2**23
"""Adding it leaves the nearest whole number, of two the even one, in the low bits of the mantissa."""
_NEAREST_BITS = 0x4B400000
_LANES = 16
_VECTORS = GROUP // _LANES
_V = Vectors(_LANES)


class Quantise(enum.IntEnum):
    """Where the fields of a quantisation of rows are.

    X `[rows, WIDTH]` float32, rows X_STRIDE floats apart; OUT, records, OUT_STRIDE bytes apart.
    """

    X = 4
    X_STRIDE = 5
    OUT = 6
    OUT_STRIDE = 7
    NUM_ROWS = 8
    WIDTH = 9
    ROWS_PER_CHUNK = 10


def record_bytes(width: int) -> int:
    """Size of the record of a row of `width` numbers."""
    groups = -(-width // GROUP)
    return -(-groups * (GROUP * ITEM + 8) // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT


def pointer(b: ir.IRBuilder, address: ir.Value, typ: ir.Type) -> ir.Value:
    """An address as a pointer."""
    return b.inttoptr(address, typ.as_pointer())


def _load_group(b: ir.IRBuilder, x: ir.Value, count: ir.Value) -> list[ir.Value]:
    """`count` floats at address `x`, filled up with zeros."""
    slots = [cgutils.alloca_once(b, _V.floats) for _ in range(_VECTORS)]
    with b.if_else(b.icmp_signed(">=", count, index(GROUP))) as (whole, part):
        with whole:
            for i, slot in enumerate(slots):
                b.store(_V.load(b, x, i * _LANES), slot)
        with part:
            left = _V.splat(b, b.trunc(count, I32))
            for i, slot in enumerate(slots):
                lanes = _V.iconst(range(i * _LANES, (i + 1) * _LANES))
                b.store(_masked_load(b, x, i * _LANES, b.icmp_signed("<", lanes, left)), slot)
    return [b.load(slot) for slot in slots]


def _masked_load(b: ir.IRBuilder, x: ir.Value, offset: int, mask: ir.Value) -> ir.Value:
    source = at(b, x, offset, _V.floats)
    kind = ir.FunctionType(_V.floats, [source.type, I32, mask.type, _V.floats])
    load = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.load.v{_LANES}f32.p0")
    return b.call(load, [source, ir.Constant(I32, 4), mask, _V.const(0.0)])


def _rotate(b: ir.IRBuilder, x: list[ir.Value]) -> list[ir.Value]:
    """Sums and differences of numbers 32, 16, 8, 4, 2 and 1 apart: a Hadamard matrix times a group."""
    distance = _VECTORS // 2
    while distance:
        x = [
            b.fsub(x[i ^ distance], v) if i & distance else b.fadd(v, x[i ^ distance])
            for i, v in enumerate(x)
        ]
        distance //= 2
    distance = _LANES // 2
    while distance:
        signs = ir.Constant(_V.floats, [-1.0 if lane & distance else 1.0 for lane in range(_LANES)])
        x = [_V.fma(b, v, signs, _swapped(b, v, distance)) for v in x]
        distance //= 2
    return x


def _swapped(b: ir.IRBuilder, x: ir.Value, distance: int) -> ir.Value:
    return b.shuffle_vector(x, x, _V.iconst([lane ^ distance for lane in range(_LANES)]))


def _reduce(b: ir.IRBuilder, x: list[ir.Value], both: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Of int32 lanes, by a function of two that may take them in any order."""
    total = reduce(both, x)
    distance = _LANES // 2
    while distance:
        total = both(total, _swapped(b, total, distance))
        distance //= 2
    return b.extract_element(total, ir.Constant(I32, 0))


def _largest_magnitude(b: ir.IRBuilder, x: list[ir.Value]) -> ir.Value:
    """Not a number where one is none: its bits are the largest of all as a whole number."""
    bits = [b.and_(b.bitcast(v, _V.ints), _V.iconst(0x7FFFFFFF)) for v in x]
    return b.bitcast(_reduce(b, bits, lambda p, q: b.select(b.icmp_signed(">", p, q), p, q)), F32)


def _store_nearest(b: ir.IRBuilder, x: list[ir.Value], factor: ir.Value, out: ir.Value) -> ir.Value:
    """Write x * factor as whole numbers, which are small; returns their sum."""
    factors = _V.splat(b, factor)
    order = _V.iconst([lane - lane % 4 + ORDER[lane % 4] for lane in range(_LANES)])
    narrow = ir.VectorType(ir.IntType(8 * ITEM), _LANES)
    numbers = []
    for i, value in enumerate(x):
        nearest = _V.fma(b, value, factors, _V.const(_NEAREST))
        q = b.sub(b.bitcast(nearest, _V.ints), _V.iconst(_NEAREST_BITS))
        place = b.add(out, index(i * _LANES * ITEM))
        b.store(b.trunc(b.shuffle_vector(q, q, order), narrow), pointer(b, place, narrow), align=4)
        numbers.append(q)
    return _reduce(b, numbers, b.add)


@intrinsic
def _quantise_group(typingctx: Any, x: Any, count: Any, out: Any, scale: Any, start: Any) -> Any:
    """Write what becomes of `count` floats at `x`: q, their scale and the beginning of their sums."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        x, count, out, scale, start = args
        group = _rotate(b, _load_group(b, x, count))
        largest = _largest_magnitude(b, group)
        is_zero = b.fcmp_ordered("<", largest, F32(TINY))
        factor = b.select(is_zero, F32(0.0), b.fdiv(F32(LARGEST), largest))
        total = _store_nearest(b, group, factor, out)
        b.store(b.fdiv(largest, F32(LARGEST)), at(b, scale, 0, F32), align=4)
        b.store(b.mul(total, I32(-OFFSET)), at(b, start, 0, I32), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@njit(error_model="numpy")
def quantise_row(x: Any, width: Any, record: Any) -> None:
    """Write the record of `width` floats at address `x`."""
    groups = (width + GROUP - 1) // GROUP
    scales = record + groups * GROUP * ITEM
    starts = scales + 4 * groups
    for group in range(groups):
        first = group * GROUP
        _quantise_group(
            x + 4 * first, width - first, record + first * ITEM, scales + 4 * group, starts + 4 * group
        )


@njit(error_model="numpy")
def quantise_chunk(a: Any, chunk: Any) -> None:
    """Chunk number `chunk` of the rows of a quantisation (see `Quantise`)."""
    first = chunk * a[Quantise.ROWS_PER_CHUNK]
    for row in range(first, min(first + a[Quantise.ROWS_PER_CHUNK], a[Quantise.NUM_ROWS])):
        x = a[Quantise.X] + 4 * row * a[Quantise.X_STRIDE]
        quantise_row(x, a[Quantise.WIDTH], a[Quantise.OUT] + row * a[Quantise.OUT_STRIDE])
