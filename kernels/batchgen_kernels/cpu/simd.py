"""The three micro-kernels of attention that `kernel.py` calls.

How many rows share a call changes which registers hold what, never the arithmetic of one row.

Keys and values are widened to float32 as they are loaded, which is exact. What they are stored as is a numba
type given as an argument, so that each is compiled by itself: float32, int8, int16 for the bits of a float16,
uint16 for the bits of a bfloat16.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchgen_kernels.cpu.vectors import (
    F32,
    HAS_512,
    HAS_F16C,
    I32,
    I64,
    Vectors,
    address,
    at,
    index,
    switch,
)

LANES = 16
"""Keys in one vector of scores, values in one vector of output."""
TILE = 64
"""Keys between two updates of the running maximum. Tiles start at multiples of it, from position 0."""
VECTORS = TILE // LANES
MAX_ROWS = 6
"""Query rows that share the loads of one tile."""

# Accumulators must fit the registers: 32 of 16 lanes with AVX-512, 16 of 8 lanes without.
_KEY_VECTORS = 2 if HAS_512 else 1
_VALUE_VECTORS = 4 if HAS_512 else 1
_HALF_EXPONENT = 0x7C00

V = Vectors(LANES)


def _stored_at(
    b: ir.IRBuilder, storage: Any, base: ir.Value, offset: ir.Value, typ: ir.Type | None = None
) -> ir.Value:
    """Pointer to stored element number `offset` after address `base`, of the element's type or `typ`."""
    size = storage.bitwidth // 8
    element = ir.IntType(storage.bitwidth)
    return b.inttoptr(b.add(base, b.mul(offset, index(size))), (typ or element).as_pointer())


def _load_stored(b: ir.IRBuilder, storage: Any, base: ir.Value, offset: ir.Value) -> ir.Value:
    """LANES stored elements as float32, int8 without its scale."""
    if storage == types.float32:
        return V.load(b, base, offset)
    bits = ir.VectorType(ir.IntType(storage.bitwidth), LANES)
    raw = b.load(_stored_at(b, storage, base, offset, bits), align=storage.bitwidth // 8)
    if storage == types.int8:
        return b.sitofp(b.sext(raw, V.ints), V.floats)
    if storage == types.uint16:
        return b.bitcast(b.shl(b.zext(raw, V.ints), V.iconst(16)), V.floats)
    return _half_to_float(b, raw)


def _half_to_float(b: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    """float32 of the bits of float16: exact, subnormals and NaN included.

    By hand where there is no instruction for it: LLVM would call a function that may not be there.
    """
    if HAS_F16C:
        return b.fpext(b.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), V.floats)
    bits = b.zext(raw, V.ints)
    magnitude = b.and_(bits, V.iconst(0x7FFF))
    sign = b.shl(b.xor(bits, magnitude), V.iconst(16))
    # The exponent's bias is 15 in place of 127; the product also makes subnormals normal.
    shifted = b.bitcast(b.shl(magnitude, V.iconst(13)), V.floats)
    scaled = b.bitcast(b.fmul(shifted, V.const(2.0**112)), V.ints)
    finite = b.icmp_signed("<", magnitude, V.iconst(_HALF_EXPONENT))
    special = b.or_(scaled, V.iconst(0x7F800000))
    return b.bitcast(b.or_(b.select(finite, scaled, special), sign), V.floats)


def _prefetch(b: ir.IRBuilder, storage: Any, base: ir.Value, offset: ir.Value) -> None:
    pointer = _stored_at(b, storage, base, offset, ir.IntType(8))
    # Blocks lie anywhere, so the processor cannot guess the next. Into the second level cache: the first
    # holds the tile that is being used.
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [pointer, *(ir.Constant(I32, x) for x in (0, 2, 1))])


@intrinsic
def scores(
    typingctx: Any,
    query: Any,
    keys: Any,
    first: Any,
    last: Any,
    rows: Any,
    head_size: Any,
    stride: Any,
    out: Any,
    storage: Any,
) -> Any:
    """Dot products of `rows` queries with the key vectors `first` to `last` (exclusive) of a tile.

    Arguments are addresses or counts (int64): query [rows, head_size]; keys, the addresses of
    storage[head_size, stride], one for each LANES keys of this tile and of the next, which is prefetched;
    out [rows, TILE].
    """
    element = storage.dtype

    def emit(b: ir.IRBuilder, args: Sequence[ir.Value], n: int, vectors: int, group: ir.Value) -> None:
        query, keys, _, _, _, head_size, stride, out, _ = args
        columns = [address(b, keys, b.add(group, index(v))) for v in range(vectors)]
        ahead = [address(b, keys, b.add(group, index(v + VECTORS))) for v in range(vectors)]
        sums = V.accumulators(b, n * vectors)
        for slot in sums:
            b.store(V.const(0.0), slot)
        with cgutils.for_range(b, head_size) as loop:
            offset = b.mul(loop.index, stride)
            k = [_load_stored(b, element, column, offset) for column in columns]
            for column in ahead:
                _prefetch(b, element, column, offset)
            for r in range(n):
                q = V.load_splat(b, query, b.add(b.mul(head_size, index(r)), loop.index))
                for v in range(vectors):
                    slot = sums[r * vectors + v]
                    b.store(V.fma(b, q, k[v], b.load(slot)), slot)
        for r in range(n):
            for v in range(vectors):
                column = b.add(b.mul(b.add(group, index(v)), index(LANES)), index(r * TILE))
                V.store(b, b.load(sums[r * vectors + v]), out, column)

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        _, _, first, last, rows, *_ = args

        def body(n: int) -> None:
            with cgutils.for_range_slice(b, first, last, index(_KEY_VECTORS), I64) as (group, _):
                if _KEY_VECTORS == 1:
                    emit(b, args, n, 1, group)
                    return
                full = b.icmp_signed("<=", b.add(group, index(_KEY_VECTORS)), last)
                with b.if_else(full) as (then, otherwise):
                    with then:
                        emit(b, args, n, _KEY_VECTORS, group)
                    with otherwise:
                        emit(b, args, n, 1, group)

        switch(b, rows, range(1, MAX_ROWS + 1), body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, storage), codegen


@intrinsic
def softmax(
    typingctx: Any,
    scores: Any,
    low: Any,
    high: Any,
    cap: Any,
    maximum: Any,
    total: Any,
    alpha: Any,
    key_scales: Any,
    value_scales: Any,
    storage: Any,
) -> Any:
    """One row, one tile of the running softmax, in base 2.

    scores [TILE] (address): in, dot products; out, what the values of keys `low` to `high` (exclusive, at
    least one) are multiplied by. cap: 0, or scores become cap * tanh(score) first. maximum [1], total
    [LANES] (addresses): the running state. alpha [1]: out, what everything summed so far is worth now.
    key_scales, value_scales: where storage is int8, the addresses of float[LANES] by which dot products and
    values are to be multiplied, one for each LANES keys of the tile.
    """
    scaled = storage.dtype == types.int8

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        scores, low, high, cap, maximum, total, alpha, key_scales, value_scales, _ = args
        first = b.ashr(low, index(4))
        last = b.ashr(b.add(high, index(LANES - 1)), index(4))
        low_lane, high_lane = (V.splat(b, b.trunc(x, I32)) for x in (low, high))
        old = V.load_splat(b, maximum, 0)
        largest, sums = V.accumulators(b, 2)
        b.store(old, largest)
        capped = b.fcmp_ordered(">", cap, ir.Constant(F32, 0.0))
        with cgutils.for_range_slice(b, first, last, index(1), I64) as (group, _):
            offset = b.mul(group, index(LANES))
            x = cgutils.alloca_once(b, V.floats)
            b.store(V.load(b, scores, offset), x)
            if scaled:
                b.store(b.fmul(b.load(x), V.load(b, address(b, key_scales, group), 0)), x)
            with b.if_then(capped):
                b.store(b.fmul(V.splat(b, cap), V.tanh(b, b.load(x))), x)
            lane = b.add(V.splat(b, b.trunc(offset, I32)), V.iconst(range(LANES)))
            visible = b.and_(b.icmp_signed(">=", lane, low_lane), b.icmp_signed("<", lane, high_lane))
            # Hidden lanes may hold anything, NaN included: a select, not an addition.
            masked = b.select(visible, b.load(x), V.const(-math.inf))
            V.store(b, masked, scores, offset)
            so_far = b.load(largest)
            b.store(b.select(b.fcmp_ordered(">", masked, so_far), masked, so_far), largest)
        new = V.horizontal_max(b, b.load(largest))
        scale = V.exp2(b, b.fsub(old, new))
        b.store(b.fmul(V.load(b, total, 0), scale), sums)
        with cgutils.for_range_slice(b, first, last, index(1), I64) as (group, _):
            offset = b.mul(group, index(LANES))
            p = V.exp2(b, b.fsub(V.load(b, scores, offset), new))
            b.store(b.fadd(b.load(sums), p), sums)
            if scaled:
                p = b.fmul(p, V.load(b, address(b, value_scales, group), 0))
            V.store(b, p, scores, offset)
        V.store(b, b.load(sums), total, 0)
        lane0 = ir.Constant(I32, 0)
        b.store(b.extract_element(new, lane0), at(b, maximum, 0, F32), align=4)
        b.store(b.extract_element(scale, lane0), at(b, alpha, 0, F32), align=4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, types.float32, i64, i64, i64, i64, i64, storage), codegen


@intrinsic
def softmax_whole(
    typingctx: Any,
    scores: Any,
    maximum: Any,
    total: Any,
    alpha: Any,
    key_scales: Any,
    value_scales: Any,
    storage: Any,
) -> Any:
    """As `softmax` of a row that sees all keys of a tile, and has no cap."""
    scaled = storage.dtype == types.int8

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        scores, maximum, total, alpha, key_scales, value_scales, _ = args
        old = V.load_splat(b, maximum, 0)
        x = [V.load(b, scores, v * LANES) for v in range(VECTORS)]
        if scaled:
            x = [b.fmul(x[v], V.load(b, address(b, key_scales, index(v)), 0)) for v in range(VECTORS)]
        largest = old
        for one in x:
            largest = b.select(b.fcmp_ordered(">", one, largest), one, largest)
        new = V.horizontal_max(b, largest)
        scale = V.exp2(b, b.fsub(old, new))
        sums = b.fmul(V.load(b, total, 0), scale)
        for v, one in enumerate(x):
            p = V.exp2(b, b.fsub(one, new))
            sums = b.fadd(sums, p)
            if scaled:
                p = b.fmul(p, V.load(b, address(b, value_scales, index(v)), 0))
            V.store(b, p, scores, v * LANES)
        V.store(b, sums, total, 0)
        lane0 = ir.Constant(I32, 0)
        b.store(b.extract_element(new, lane0), at(b, maximum, 0, F32), align=4)
        b.store(b.extract_element(scale, lane0), at(b, alpha, 0, F32), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, storage), codegen


@intrinsic
def accumulate(
    typingctx: Any,
    weights: Any,
    values: Any,
    low: Any,
    high: Any,
    rows: Any,
    width: Any,
    alpha: Any,
    out: Any,
    storage: Any,
) -> Any:
    """out = out * alpha + weights @ values for `rows` rows over the keys `low` to `high` of a tile.

    Arguments are addresses or counts (int64): weights [rows, TILE]; values, the addresses of
    storage[LANES, width], one for each LANES keys of this tile and of the next, which is prefetched; alpha
    [rows]; out [rows, width]; width is a multiple of LANES. Keys outside the range are not read.
    """
    element = storage.dtype

    def emit(b: ir.IRBuilder, args: Sequence[ir.Value], n: int, vectors: int, column: ir.Value) -> None:
        weights, values, low, high, _, width, alpha, out, _ = args
        sums = V.accumulators(b, n * vectors)
        place = [b.add(b.mul(width, index(r)), column) for r in range(n)]
        for r in range(n):
            scale = V.load_splat(b, alpha, r)
            for v in range(vectors):
                old = V.load(b, out, b.add(place[r], index(v * LANES)))
                b.store(b.fmul(old, scale), sums[r * vectors + v])
        with cgutils.for_range_slice(b, low, high, index(1), I64) as (key, _):
            group, within = b.ashr(key, index(4)), b.and_(key, index(LANES - 1))
            base, ahead = address(b, values, group), address(b, values, b.add(group, index(VECTORS)))
            start = b.add(b.mul(within, width), column)
            row = [_load_stored(b, element, base, b.add(start, index(v * LANES))) for v in range(vectors)]
            for v in range(vectors):
                _prefetch(b, element, ahead, b.add(start, index(v * LANES)))
            for r in range(n):
                weight = V.load_splat(b, weights, b.add(key, index(r * TILE)))
                for v in range(vectors):
                    slot = sums[r * vectors + v]
                    b.store(V.fma(b, weight, row[v], b.load(slot)), slot)
        for r in range(n):
            for v in range(vectors):
                V.store(b, b.load(sums[r * vectors + v]), out, b.add(place[r], index(v * LANES)))

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        width = args[5]
        chunk = _VALUE_VECTORS * LANES
        whole = b.mul(b.sdiv(width, index(chunk)), index(chunk))

        def body(n: int) -> None:
            with cgutils.for_range_slice(b, index(0), whole, index(chunk), I64) as (column, _):
                emit(b, args, n, _VALUE_VECTORS, column)
            with cgutils.for_range_slice(b, whole, width, index(LANES), I64) as (column, _):
                emit(b, args, n, 1, column)

        switch(b, args[4], range(1, MAX_ROWS + 1), body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, storage), codegen
