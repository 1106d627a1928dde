"""What a decoder layer does to each row besides products and attention: norms, rotary positions."""

# mypy: disable-error-code="attr-defined,call-arg,call-overload,no-untyped-call,var-annotated"

from __future__ import annotations

import enum
from collections.abc import Sequence
from math import sqrt
from typing import Any

from llvmlite import ir
from numba import carray, float32, float64, int8, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from batchgen_kernels.cpu.halves import narrow
from batchgen_kernels.cpu.intrinsics import as_pointer
from batchgen_kernels.cpu.kernel import Write, write_row
from batchgen_kernels.cpu.records import quantise_row
from batchgen_kernels.cpu.vectors import Vectors, index

LANES = 16
V = Vectors(LANES)
_WRITE_FIELDS = len(Write)


class Norm(enum.IntEnum):
    """Where the fields of a norm are: x / sqrt(mean(x**2) + EPSILON) * WEIGHT, https://arxiv.org/abs/1910.07467.

    EPSILON is the address of a float64. Where ADDS is not 0 the result is added to what is in OUT. Each row
    becomes a record in RECORDS, too (see `records.py`), so many bytes apart, where that is not 0.
    """

    X = 4
    X_STRIDE = 5
    WEIGHT = 6
    OUT = 7
    OUT_STRIDE = 8
    NUM_ROWS = 9
    WIDTH = 10
    EPSILON = 11
    ROWS_PER_CHUNK = 12
    RECORDS = 13
    RECORD_STRIDE = 14
    ADDS = 15


class Rotate(enum.IntEnum):
    """Where the fields of a rotation are, which also writes keys and values into the cache.

    X `[rows, queries | keys | values]`; COS and SIN `[rows, ROTARY_SIZE]`, or 0 where a layer has no
    positions: they turn the first so many numbers of a head. QUERY_NORM and KEY_NORM, or 0: `[head_size]`, or
    where WHOLE_NORMS is not 0 `[heads * head_size]`, of all heads together. WRITE: the address of a
    `WriteArgument`.
    """

    X = 4
    X_STRIDE = 5
    NUM_ROWS = 6
    NUM_HEADS = 7
    NUM_KV_HEADS = 8
    HEAD_SIZE = 9
    COS = 10
    SIN = 11
    QUERY_NORM = 12
    KEY_NORM = 13
    EPSILON = 14
    WRITE = 15
    ROWS_PER_CHUNK = 16
    ROTARY_SIZE = 17
    WHOLE_NORMS = 18


class Gather(enum.IntEnum):
    """Where the fields of a copy are: row ROWS[i] of X, so many floats wide, becomes row i of OUT."""

    X = 4
    X_STRIDE = 5
    OUT = 6
    OUT_STRIDE = 7
    WIDTH = 8
    ROWS = 9
    NUM_ROWS = 10
    ROWS_PER_CHUNK = 11


@intrinsic
def _sum_of_squares(typingctx: Any, x: Any, count: Any) -> Any:
    """Of `count` floats, a multiple of LANES: lane by lane, then the lanes in pairs."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        x, count = args
        (total,) = V.accumulators(b, 1)
        b.store(V.const(0.0), total)
        with cgutils.for_range_slice(b, index(0), count, index(LANES), ir.IntType(64)) as (place, _):
            value = V.load(b, x, place)
            b.store(V.fma(b, value, value, b.load(total)), total)
        return b.extract_element(V.horizontal_sum(b, b.load(total)), ir.Constant(ir.IntType(32), 0))

    return types.float32(types.int64, types.int64), codegen


def _scaling(*, adds: bool) -> Any:
    @intrinsic
    def scale(typingctx: Any, x: Any, factor: Any, weight: Any, out: Any, count: Any) -> Any:
        """out = x * factor * weight, or that added to out, for `count` floats, a multiple of LANES."""

        def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
            x, factor, weight, out, count = args
            with cgutils.for_range_slice(b, index(0), count, index(LANES), ir.IntType(64)) as (place, _):
                scaled = b.fmul(V.load(b, x, place), V.splat(b, factor))
                result = b.fmul(scaled, V.load(b, weight, place))
                if adds:
                    result = b.fadd(V.load(b, out, place), result)
                V.store(b, result, out, place)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), codegen

    return scale


_scale, _scale_and_add = _scaling(adds=False), _scaling(adds=True)


@njit(error_model="numpy")
def _normalise(x: Any, weight: Any, out: Any, width: Any, epsilon: Any, adds: Any) -> None:
    whole = width // LANES * LANES
    total = _sum_of_squares(x, whole)
    source, target = carray(as_pointer(x), width, float32), carray(as_pointer(out), width, float32)
    factors = carray(as_pointer(weight), width, float32)
    for d in range(whole, width):
        total += source[d] * source[d]
    small = float32(carray(as_pointer(epsilon), 1, float64)[0])
    factor = float32(1.0) / sqrt(total / float32(width) + small)
    if adds != 0:
        _scale_and_add(x, factor, weight, out, whole)
    else:
        _scale(x, factor, weight, out, whole)
    for d in range(whole, width):
        before = target[d] if adds != 0 else float32(0.0)
        target[d] = before + source[d] * factor * factors[d]


@njit(error_model="numpy")
def norm_chunk(a: Any, chunk: Any) -> None:
    """Chunk number `chunk` of the rows of a norm (see `Norm`)."""
    first = chunk * a[Norm.ROWS_PER_CHUNK]
    for row in range(first, min(first + a[Norm.ROWS_PER_CHUNK], a[Norm.NUM_ROWS])):
        x = a[Norm.X] + 4 * row * a[Norm.X_STRIDE]
        out = a[Norm.OUT] + 4 * row * a[Norm.OUT_STRIDE]
        _normalise(x, a[Norm.WEIGHT], out, a[Norm.WIDTH], a[Norm.EPSILON], a[Norm.ADDS])
        if a[Norm.RECORDS] != 0:
            quantise_row(out, a[Norm.WIDTH], a[Norm.RECORDS] + row * a[Norm.RECORD_STRIDE])


@njit(error_model="numpy")
def gather_chunk(a: Any, chunk: Any) -> None:
    """Chunk number `chunk` of the rows of a copy (see `Gather`)."""
    width = a[Gather.WIDTH]
    rows = carray(as_pointer(a[Gather.ROWS]), a[Gather.NUM_ROWS], int64)
    first = chunk * a[Gather.ROWS_PER_CHUNK]
    for row in range(first, min(first + a[Gather.ROWS_PER_CHUNK], a[Gather.NUM_ROWS])):
        source = carray(as_pointer(a[Gather.X] + 4 * rows[row] * a[Gather.X_STRIDE]), width, float32)
        carray(as_pointer(a[Gather.OUT] + 4 * row * a[Gather.OUT_STRIDE]), width, float32)[:] = source


@njit(error_model="numpy")
def _rotate(x: Any, cos: Any, sin: Any) -> None:
    """Turn the pairs (d, d + half), as transformers' models do: https://arxiv.org/abs/2104.09864."""
    half = len(x) // 2
    for d in range(half):
        low, high = x[d], x[d + half]
        x[d] = low * cos[d] - high * sin[d]
        x[d + half] = high * cos[d + half] + low * sin[d + half]


def _narrow_heads(write: Any, row: Any, storage: Any) -> None:
    """Round the keys and values of a row to what they are stored as, where that is in 16 bits; in place."""


@overload(_narrow_heads, jit_options={"error_model": "numpy"})
def _narrow_heads_to(write: Any, row: Any, storage: Any) -> Any:
    return _leave_heads if storage.dtype in (float32, int8) else _narrow_each_head


def _leave_heads(write: Any, row: Any, storage: Any) -> None:
    pass


def _narrow_each_head(write: Any, row: Any, storage: Any) -> None:
    for head in range(write[Write.NUM_KV_HEADS]):
        key = write[Write.KEY_IN] + row * write[Write.KEY_TOKEN_STRIDE] + head * write[Write.KEY_HEAD_STRIDE]
        narrow(key, write[Write.HEAD_SIZE], storage)
        value = write[Write.VALUE_IN] + row * write[Write.VALUE_TOKEN_STRIDE]
        narrow(value + head * write[Write.VALUE_HEAD_STRIDE], write[Write.V_HEAD_SIZE], storage)


@njit(error_model="numpy")
def _normalise_heads(a: Any, start: Any, heads: Any, weight: Any) -> None:
    """Heads that lie side by side from `start` on, each by itself or all together."""
    size = a[Rotate.HEAD_SIZE]
    if weight == 0:
        return
    if a[Rotate.WHOLE_NORMS] != 0:
        _normalise(start, weight, start, heads * size, a[Rotate.EPSILON], 0)
        return
    for head in range(heads):
        x = start + 4 * head * size
        _normalise(x, weight, x, size, a[Rotate.EPSILON], 0)


@njit(error_model="numpy")
def rotate_chunk(a: Any, chunk: Any, storage: Any, source_type: Any) -> None:
    """Chunk number `chunk` of the rows of a rotation (see `Rotate`)."""
    size, heads, kv_heads = a[Rotate.HEAD_SIZE], a[Rotate.NUM_HEADS], a[Rotate.NUM_KV_HEADS]
    turned = a[Rotate.ROTARY_SIZE]
    write = carray(as_pointer(a[Rotate.WRITE]), _WRITE_FIELDS, int64)
    slots = carray(as_pointer(write[Write.SLOTS]), a[Rotate.NUM_ROWS], int64)
    first = chunk * a[Rotate.ROWS_PER_CHUNK]
    for row in range(first, min(first + a[Rotate.ROWS_PER_CHUNK], a[Rotate.NUM_ROWS])):
        start = a[Rotate.X] + 4 * row * a[Rotate.X_STRIDE]
        _normalise_heads(a, start, heads, a[Rotate.QUERY_NORM])
        _normalise_heads(a, start + 4 * heads * size, kv_heads, a[Rotate.KEY_NORM])
        if a[Rotate.COS] != 0:
            for head in range(heads + kv_heads):
                _rotate(
                    carray(as_pointer(start + 4 * head * size), turned, float32),
                    carray(as_pointer(a[Rotate.COS] + 4 * row * turned), turned, float32),
                    carray(as_pointer(a[Rotate.SIN] + 4 * row * turned), turned, float32),
                )
        if slots[row] >= 0:
            _narrow_heads(write, row, storage)
            write_row(write, row, slots[row], source_type, storage)
