"""The vector code of the CPU backend: three micro-kernels that `kernel.py` calls, emitted as LLVM IR.

Numba's vectoriser may or may not turn a loop into the code one hopes for, and may contract or
reassociate differently from one loop to the next. Here every vector operation is spelled out, so the
speed does not depend on a heuristic, and the bits of a result depend on nothing but its operands:
multiply-adds are `llvm.fma` (rounded once, everywhere), everything else is a plain IEEE operation.
How many rows share a call changes which registers hold what, never the arithmetic of one row.

Keys and values are widened to float32 as they are loaded, which is exact. What they are stored as is a numba
type given as an argument, so that each is compiled by itself: float32, int8, int16 for the bits of a float16,
uint16 for the bits of a bfloat16.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Keys in one vector of scores, values in one vector of output."""
TILE = 64
"""Keys between two updates of the running maximum. Tiles start at multiples of it, from position 0."""
VECTORS = TILE // LANES
MAX_ROWS = 6
"""Query rows that share the loads of one tile."""

_HAS_512 = bool(llvm.get_host_cpu_features().get("avx512f", False))
# Accumulators must fit the registers: 32 of 16 lanes with AVX-512, 16 of 8 lanes without.
_KEY_VECTORS = 2 if _HAS_512 else 1
_VALUE_VECTORS = 4 if _HAS_512 else 1

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VEC = ir.VectorType(_F32, LANES)
_IVEC = ir.VectorType(_I32, LANES)
_HALF_EXPONENT = 0x7C00

Body = Callable[[int], None]


def _const(value: float) -> ir.Constant:
    return ir.Constant(_VEC, [value] * LANES)


def _iconst(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(_IVEC, list(values))


def _index(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _at(b: ir.IRBuilder, base: ir.Value, offset: ir.Value | int, typ: ir.Type) -> ir.Value:
    """Pointer to float number `offset` after address `base`."""
    offset = _index(offset) if isinstance(offset, int) else offset
    return b.inttoptr(b.add(base, b.shl(offset, _index(2))), typ.as_pointer())


def _stored_at(
    b: ir.IRBuilder, storage: Any, base: ir.Value, offset: ir.Value, typ: ir.Type | None = None
) -> ir.Value:
    """Pointer to stored element number `offset` after address `base`, of the element's type or `typ`."""
    size = storage.bitwidth // 8
    element = ir.IntType(storage.bitwidth)
    return b.inttoptr(b.add(base, b.mul(offset, _index(size))), (typ or element).as_pointer())


def _load_stored(b: ir.IRBuilder, storage: Any, base: ir.Value, offset: ir.Value) -> ir.Value:
    """LANES stored elements as float32, int8 without its scale."""
    if storage == types.float32:
        return _load(b, base, offset)
    bits = ir.VectorType(ir.IntType(storage.bitwidth), LANES)
    raw = b.load(_stored_at(b, storage, base, offset, bits), align=storage.bitwidth // 8)
    if storage == types.int8:
        return b.sitofp(b.sext(raw, _IVEC), _VEC)
    wide = b.zext(raw, _IVEC)
    if storage == types.uint16:
        return b.bitcast(b.shl(wide, _iconst([16] * LANES)), _VEC)
    return _half_to_float(b, wide)


def _half_to_float(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """float32 of the bits of float16: exact, subnormals and NaN included.

    By hand, because without an instruction for it LLVM calls a function that may not be there.
    """
    magnitude = b.and_(bits, _iconst([0x7FFF] * LANES))
    sign = b.shl(b.xor(bits, magnitude), _iconst([16] * LANES))
    # The exponent's bias is 15 in place of 127; the product also makes subnormals normal.
    shifted = b.bitcast(b.shl(magnitude, _iconst([13] * LANES)), _VEC)
    scaled = b.bitcast(b.fmul(shifted, _const(2.0**112)), _IVEC)
    finite = b.icmp_signed("<", magnitude, _iconst([_HALF_EXPONENT] * LANES))
    special = b.or_(scaled, _iconst([0x7F800000] * LANES))
    return b.bitcast(b.or_(b.select(finite, scaled, special), sign), _VEC)


def _load(b: ir.IRBuilder, base: ir.Value, offset: ir.Value | int) -> ir.Value:
    return b.load(_at(b, base, offset, _VEC), align=4)


def _store(b: ir.IRBuilder, value: ir.Value, base: ir.Value, offset: ir.Value | int) -> None:
    b.store(value, _at(b, base, offset, _VEC), align=4)


def _splat(b: ir.IRBuilder, scalar: ir.Value, typ: ir.VectorType = _VEC) -> ir.Value:
    undefined = ir.Constant(typ, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, undefined, _iconst([0] * LANES))


def _load_splat(b: ir.IRBuilder, base: ir.Value, offset: ir.Value | int) -> ir.Value:
    return _splat(b, b.load(_at(b, base, offset, _F32), align=4))


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_VEC, [_VEC] * 3), f"llvm.fma.v{LANES}f32"
    )
    return b.call(function, [x, y, z])


def _address(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    return b.load(b.inttoptr(b.add(table, b.shl(index, _index(3))), _I64.as_pointer()))


def _prefetch(b: ir.IRBuilder, storage: Any, base: ir.Value, offset: ir.Value) -> None:
    pointer = _stored_at(b, storage, base, offset, ir.IntType(8))
    # Blocks lie anywhere, so the processor cannot guess the next. Into the second level cache: the first
    # holds the tile that is being used.
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [pointer, *(ir.Constant(_I32, x) for x in (0, 2, 1))])


def _accumulators(b: ir.IRBuilder, count: int) -> list[ir.Value]:
    """Stack slots that LLVM turns into registers."""
    return [cgutils.alloca_once(b, _VEC) for _ in range(count)]


def _switch_rows(b: ir.IRBuilder, rows: ir.Value, body: Body) -> None:
    """Emit `body` once for each possible number of rows and jump to the one wanted."""
    end = b.append_basic_block("rows.end")
    switch = b.switch(rows, end)
    for n in range(1, MAX_ROWS + 1):
        block = b.append_basic_block(f"rows.{n}")
        switch.add_case(_index(n), block)
        b.position_at_end(block)
        body(n)
        b.branch(end)
    b.position_at_end(end)


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
        columns = [_address(b, keys, b.add(group, _index(v))) for v in range(vectors)]
        ahead = [_address(b, keys, b.add(group, _index(v + VECTORS))) for v in range(vectors)]
        sums = _accumulators(b, n * vectors)
        for slot in sums:
            b.store(_const(0.0), slot)
        with cgutils.for_range(b, head_size) as loop:
            offset = b.mul(loop.index, stride)
            k = [_load_stored(b, element, column, offset) for column in columns]
            for column in ahead:
                _prefetch(b, element, column, offset)
            for r in range(n):
                q = _load_splat(b, query, b.add(b.mul(head_size, _index(r)), loop.index))
                for v in range(vectors):
                    slot = sums[r * vectors + v]
                    b.store(_fma(b, q, k[v], b.load(slot)), slot)
        for r in range(n):
            for v in range(vectors):
                column = b.add(b.mul(b.add(group, _index(v)), _index(LANES)), _index(r * TILE))
                _store(b, b.load(sums[r * vectors + v]), out, column)

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        _, _, first, last, rows, *_ = args

        def body(n: int) -> None:
            with cgutils.for_range_slice(b, first, last, _index(_KEY_VECTORS), _I64) as (group, _):
                if _KEY_VECTORS == 1:
                    emit(b, args, n, 1, group)
                    return
                full = b.icmp_signed("<=", b.add(group, _index(_KEY_VECTORS)), last)
                with b.if_else(full) as (then, otherwise):
                    with then:
                        emit(b, args, n, _KEY_VECTORS, group)
                    with otherwise:
                        emit(b, args, n, 1, group)

        _switch_rows(b, rows, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, storage), codegen


def _exp2_parts(b: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """s and q with 2**x = s * (1 + q), for x <= 0; s is 0 below -126.5; NaN stays NaN."""
    x = b.select(b.fcmp_ordered("<", x, _const(-127.0)), _const(-127.0), x)
    # Adding 1.5 * 2**23 leaves the nearest integer in the low bits of the mantissa.
    shifted = b.fadd(x, _const(12582912.0))
    r = b.fsub(x, b.fsub(shifted, _const(12582912.0)))
    bits = b.shl(b.bitcast(shifted, _IVEC), _iconst([23] * LANES))
    scale = b.bitcast(b.add(bits, _iconst([0x3F800000] * LANES)), _VEC)
    # The Taylor series of 2**r - 1 to degree 7 errs by less than 2**-27 on [-0.5, 0.5].
    terms = [math.log(2) ** k / math.factorial(k) for k in range(1, 8)]
    p = _const(terms[-1])
    for term in reversed(terms[:-1]):
        p = _fma(b, p, r, _const(term))
    return scale, b.fmul(p, r)


def _exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    scale, q = _exp2_parts(b, x)
    return _fma(b, scale, q, scale)


def _tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """tanh |x| = -e / (2 + e) with e = exp(-2 |x|) - 1, which loses nothing near 0; then the sign of x."""
    sign = b.and_(b.bitcast(x, _IVEC), _iconst([-(2**31)] * LANES))
    magnitude = b.bitcast(b.xor(b.bitcast(x, _IVEC), sign), _VEC)
    scale, q = _exp2_parts(b, b.fmul(magnitude, _const(-2 / math.log(2))))
    e = _fma(b, scale, q, b.fsub(scale, _const(1.0)))
    result = b.fdiv(b.fsub(_const(0.0), e), b.fadd(e, _const(2.0)))
    return b.bitcast(b.or_(b.bitcast(result, _IVEC), sign), _VEC)


def _horizontal_max(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The largest lane in every lane."""
    distance = LANES // 2
    while distance:
        other = b.shuffle_vector(x, x, _iconst([lane ^ distance for lane in range(LANES)]))
        x = b.select(b.fcmp_ordered(">", other, x), other, x)
        distance //= 2
    return x


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
        first = b.ashr(low, _index(4))
        last = b.ashr(b.add(high, _index(LANES - 1)), _index(4))
        low_lane, high_lane = (_splat(b, b.trunc(x, _I32), _IVEC) for x in (low, high))
        old = _load_splat(b, maximum, 0)
        largest, sums = _accumulators(b, 2)
        b.store(old, largest)
        capped = b.fcmp_ordered(">", cap, ir.Constant(_F32, 0.0))
        with cgutils.for_range_slice(b, first, last, _index(1), _I64) as (group, _):
            offset = b.mul(group, _index(LANES))
            x = cgutils.alloca_once(b, _VEC)
            b.store(_load(b, scores, offset), x)
            if scaled:
                b.store(b.fmul(b.load(x), _load(b, _address(b, key_scales, group), 0)), x)
            with b.if_then(capped):
                b.store(b.fmul(_splat(b, cap), _tanh(b, b.load(x))), x)
            lane = b.add(_splat(b, b.trunc(offset, _I32), _IVEC), _iconst(range(LANES)))
            visible = b.and_(b.icmp_signed(">=", lane, low_lane), b.icmp_signed("<", lane, high_lane))
            # Hidden lanes may hold anything, NaN included: a select, not an addition.
            masked = b.select(visible, b.load(x), _const(-math.inf))
            _store(b, masked, scores, offset)
            so_far = b.load(largest)
            b.store(b.select(b.fcmp_ordered(">", masked, so_far), masked, so_far), largest)
        new = _horizontal_max(b, b.load(largest))
        scale = _exp2(b, b.fsub(old, new))
        b.store(b.fmul(_load(b, total, 0), scale), sums)
        with cgutils.for_range_slice(b, first, last, _index(1), _I64) as (group, _):
            offset = b.mul(group, _index(LANES))
            p = _exp2(b, b.fsub(_load(b, scores, offset), new))
            b.store(b.fadd(b.load(sums), p), sums)
            if scaled:
                p = b.fmul(p, _load(b, _address(b, value_scales, group), 0))
            _store(b, p, scores, offset)
        _store(b, b.load(sums), total, 0)
        lane0 = ir.Constant(_I32, 0)
        b.store(b.extract_element(new, lane0), _at(b, maximum, 0, _F32), align=4)
        b.store(b.extract_element(scale, lane0), _at(b, alpha, 0, _F32), align=4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, types.float32, i64, i64, i64, i64, i64, storage), codegen


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
        sums = _accumulators(b, n * vectors)
        place = [b.add(b.mul(width, _index(r)), column) for r in range(n)]
        for r in range(n):
            scale = _load_splat(b, alpha, r)
            for v in range(vectors):
                old = _load(b, out, b.add(place[r], _index(v * LANES)))
                b.store(b.fmul(old, scale), sums[r * vectors + v])
        with cgutils.for_range_slice(b, low, high, _index(1), _I64) as (key, _):
            group, within = b.ashr(key, _index(4)), b.and_(key, _index(LANES - 1))
            base, ahead = _address(b, values, group), _address(b, values, b.add(group, _index(VECTORS)))
            start = b.add(b.mul(within, width), column)
            row = [_load_stored(b, element, base, b.add(start, _index(v * LANES))) for v in range(vectors)]
            for v in range(vectors):
                _prefetch(b, element, ahead, b.add(start, _index(v * LANES)))
            for r in range(n):
                weight = _load_splat(b, weights, b.add(key, _index(r * TILE)))
                for v in range(vectors):
                    slot = sums[r * vectors + v]
                    b.store(_fma(b, weight, row[v], b.load(slot)), slot)
        for r in range(n):
            for v in range(vectors):
                _store(b, b.load(sums[r * vectors + v]), out, b.add(place[r], _index(v * LANES)))

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        width = args[5]
        chunk = _VALUE_VECTORS * LANES
        whole = b.mul(b.sdiv(width, _index(chunk)), _index(chunk))

        def body(n: int) -> None:
            with cgutils.for_range_slice(b, _index(0), whole, _index(chunk), _I64) as (column, _):
                emit(b, args, n, _VALUE_VECTORS, column)
            with cgutils.for_range_slice(b, whole, width, _index(LANES), _I64) as (column, _):
                emit(b, args, n, 1, column)

        _switch_rows(b, args[4], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, storage), codegen


@intrinsic
def as_pointer(typingctx: Any, address: Any) -> Any:
    """An int64 address as a pointer that `numba.carray` takes."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        return b.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Atomically add to the int64 at `address`; returns what it held before."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        pointer = b.inttoptr(args[0], _I64.as_pointer())
        return b.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen
