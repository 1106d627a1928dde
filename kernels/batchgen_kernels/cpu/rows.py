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
from batchgen_kernels.cpu.vectors import Vectors, index

LANES = 16
V = Vectors(LANES)
_WRITE_FIELDS = len(Write)


class Norm(enum.IntEnum):
    """Where the fields of a norm are: x / sqrt(mean(x**2) + EPSILON) * WEIGHT, https://arxiv.org/abs/1910.07467.

    EPSILON is the address of a float64.
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


class Rotate(enum.IntEnum):
    """Where the fields of a rotation are, which also writes keys and values into the cache.

    X `[rows, queries | keys | values]`; COS and SIN `[rows, head_size]`, or 0 where a layer has no positions;
    QUERY_NORM and KEY_NORM `[head_size]`, or 0; WRITE: the address of a `WriteArgument`.
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


@intrinsic
def _scale(typingctx: Any, x: Any, factor: Any, weight: Any, out: Any, count: Any) -> Any:
    """out = x * factor * weight for `count` floats, a multiple of LANES."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        x, factor, weight, out, count = args
        with cgutils.for_range_slice(b, index(0), count, index(LANES), ir.IntType(64)) as (place, _):
            scaled = b.fmul(V.load(b, x, place), V.splat(b, factor))
            V.store(b, b.fmul(scaled, V.load(b, weight, place)), out, place)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), codegen


@njit(error_model="numpy")
def _normalise(x: Any, weight: Any, out: Any, width: Any, epsilon: Any) -> None:
    whole = width // LANES * LANES
    total = _sum_of_squares(x, whole)
    source, target = carray(as_pointer(x), width, float32), carray(as_pointer(out), width, float32)
    factors = carray(as_pointer(weight), width, float32)
    for d in range(whole, width):
        total += source[d] * source[d]
    small = float32(carray(as_pointer(epsilon), 1, float64)[0])
    factor = float32(1.0) / sqrt(total / float32(width) + small)
    _scale(x, factor, weight, out, whole)
    for d in range(whole, width):
        target[d] = source[d] * factor * factors[d]


@njit(error_model="numpy")
def norm_chunk(a: Any, chunk: Any) -> None:
    """Chunk number `chunk` of the rows of a norm (see `Norm`)."""
    first = chunk * a[Norm.ROWS_PER_CHUNK]
    for row in range(first, min(first + a[Norm.ROWS_PER_CHUNK], a[Norm.NUM_ROWS])):
        x = a[Norm.X] + 4 * row * a[Norm.X_STRIDE]
        out = a[Norm.OUT] + 4 * row * a[Norm.OUT_STRIDE]
        _normalise(x, a[Norm.WEIGHT], out, a[Norm.WIDTH], a[Norm.EPSILON])


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
def rotate_chunk(a: Any, chunk: Any, storage: Any, source_type: Any) -> None:
    """Chunk number `chunk` of the rows of a rotation (see `Rotate`)."""
    size, heads, kv_heads = a[Rotate.HEAD_SIZE], a[Rotate.NUM_HEADS], a[Rotate.NUM_KV_HEADS]
    write = carray(as_pointer(a[Rotate.WRITE]), _WRITE_FIELDS, int64)
    slots = carray(as_pointer(write[Write.SLOTS]), a[Rotate.NUM_ROWS], int64)
    first = chunk * a[Rotate.ROWS_PER_CHUNK]
    for row in range(first, min(first + a[Rotate.ROWS_PER_CHUNK], a[Rotate.NUM_ROWS])):
        start = a[Rotate.X] + 4 * row * a[Rotate.X_STRIDE]
        for head in range(heads + kv_heads):
            x = start + 4 * head * size
            weight = a[Rotate.QUERY_NORM] if head < heads else a[Rotate.KEY_NORM]
            if weight != 0:
                _normalise(x, weight, x, size, a[Rotate.EPSILON])
            if a[Rotate.COS] != 0:
                _rotate(
                    carray(as_pointer(x), size, float32),
                    carray(as_pointer(a[Rotate.COS] + 4 * row * size), size, float32),
                    carray(as_pointer(a[Rotate.SIN] + 4 * row * size), size, float32),
                )
        if slots[row] >= 0:
            _narrow_heads(write, row, storage)
            write_row(write, row, slots[row], source_type, storage)
