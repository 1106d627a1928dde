"""Vector code, emitted as LLVM IR instruction by instruction, for the micro-kernels of the CPU backend.

Numba's vectoriser may or may not turn a loop into the code one hopes for, and may contract or
reassociate differently from one loop to the next. Here every vector operation is spelled out, so the
speed does not depend on a heuristic, and the bits of a result depend on nothing but its operands:
multiply-adds are `llvm.fma` (rounded once, everywhere), everything else is a plain IEEE operation.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import cgutils


def has_feature(feature: str) -> bool:
    """Whether this processor, or the one that Numba was told to compile for, has something."""
    config: Any = numba.config
    if config.CPU_NAME or config.CPU_FEATURES:
        return f"+{feature}" in (config.CPU_FEATURES or "").split(",")
    return bool(llvm.get_host_cpu_features().get(feature, False))


HAS_512 = has_feature("avx512f")
HAS_F16C = has_feature("f16c")
"""Instructions that make float32 of float16."""
F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)


def index(value: int) -> ir.Constant:
    """A number as int64."""
    return ir.Constant(I64, value)


def at(b: ir.IRBuilder, base: ir.Value, offset: ir.Value | int, typ: ir.Type) -> ir.Value:
    """Pointer to float number `offset` after address `base`."""
    offset = index(offset) if isinstance(offset, int) else offset
    return b.inttoptr(b.add(base, b.shl(offset, index(2))), typ.as_pointer())


def address(b: ir.IRBuilder, table: ir.Value, number: ir.Value) -> ir.Value:
    """Entry of a table of addresses."""
    return b.load(b.inttoptr(b.add(table, b.shl(number, index(3))), I64.as_pointer()))


def switch(b: ir.IRBuilder, value: ir.Value, cases: Iterable[int], body: Callable[[int], None]) -> None:
    """Emit `body` once for each of `cases` and jump to the one that equals `value`."""
    end = b.append_basic_block("switch.end")
    jump = b.switch(value, end)
    for case in cases:
        block = b.append_basic_block(f"switch.{case}")
        jump.add_case(index(case), block)
        b.position_at_end(block)
        body(case)
        b.branch(end)
    b.position_at_end(end)


class Vectors:
    """Code for vectors of `lanes` float32 numbers.

    Where the processor's registers hold fewer, LLVM uses several for one.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.floats = ir.VectorType(F32, lanes)
        self.ints = ir.VectorType(I32, lanes)

    def const(self, value: float) -> ir.Constant:
        """`value` in every lane."""
        return ir.Constant(self.floats, [value] * self.lanes)

    def iconst(self, values: int | Iterable[int]) -> ir.Constant:
        """int32 lanes, or one number in every lane."""
        return ir.Constant(self.ints, [values] * self.lanes if isinstance(values, int) else list(values))

    def load(self, b: ir.IRBuilder, base: ir.Value, offset: ir.Value | int) -> ir.Value:
        """Floats from number `offset` after address `base` on."""
        return b.load(at(b, base, offset, self.floats), align=4)

    def store(self, b: ir.IRBuilder, value: ir.Value, base: ir.Value, offset: ir.Value | int) -> None:
        """The opposite of `load`."""
        b.store(value, at(b, base, offset, self.floats), align=4)

    def splat(self, b: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
        """A float or int32 in every lane."""
        kind = self.floats if scalar.type == F32 else self.ints
        undefined = ir.Constant(kind, ir.Undefined)
        first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return b.shuffle_vector(first, undefined, self.iconst(0))

    def load_splat(self, b: ir.IRBuilder, base: ir.Value, offset: ir.Value | int) -> ir.Value:
        """One float of memory in every lane."""
        return self.splat(b, b.load(at(b, base, offset, F32), align=4))

    def fma(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z, rounded once."""
        function = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(self.floats, [self.floats] * 3), f"llvm.fma.v{self.lanes}f32"
        )
        return b.call(function, [x, y, z])

    def accumulators(self, b: ir.IRBuilder, count: int) -> list[ir.Value]:
        """Stack slots that LLVM turns into registers."""
        return [cgutils.alloca_once(b, self.floats) for _ in range(count)]

    def magnitude(self, b: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """|x|, and the sign bits of x."""
        sign = b.and_(b.bitcast(x, self.ints), self.iconst(-(2**31)))
        return b.bitcast(b.xor(b.bitcast(x, self.ints), sign), self.floats), sign

    def with_sign(self, b: ir.IRBuilder, x: ir.Value, sign: ir.Value) -> ir.Value:
        """x, whose sign is positive, with other sign bits."""
        return b.bitcast(b.or_(b.bitcast(x, self.ints), sign), self.floats)

    def exp2_parts(self, b: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """s and q with 2**x = s * (1 + q), for x <= 0; s is 0 below -126.5; NaN stays NaN."""
        x = b.select(b.fcmp_ordered("<", x, self.const(-127.0)), self.const(-127.0), x)
        # Adding 1.5 * 2**23 leaves the nearest integer in the low bits of the mantissa.
        shifted = b.fadd(x, self.const(12582912.0))
        r = b.fsub(x, b.fsub(shifted, self.const(12582912.0)))
        bits = b.shl(b.bitcast(shifted, self.ints), self.iconst(23))
        scale = b.bitcast(b.add(bits, self.iconst(0x3F800000)), self.floats)
        # The Taylor series of 2**r - 1 to degree 7 errs by less than 2**-27 on [-0.5, 0.5].
        terms = [math.log(2) ** k / math.factorial(k) for k in range(1, 8)]
        p = self.const(terms[-1])
        for term in reversed(terms[:-1]):
            p = self.fma(b, p, r, self.const(term))
        return scale, b.fmul(p, r)

    def exp2(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """2**x for x <= 0."""
        scale, q = self.exp2_parts(b, x)
        return self.fma(b, scale, q, scale)

    def tanh(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """tanh |x| = -e / (2 + e) with e = exp(-2 |x|) - 1, which loses nothing near 0; then x's sign."""
        magnitude, sign = self.magnitude(b, x)
        scale, q = self.exp2_parts(b, b.fmul(magnitude, self.const(-2 / math.log(2))))
        e = self.fma(b, scale, q, b.fsub(scale, self.const(1.0)))
        return self.with_sign(b, b.fdiv(b.fsub(self.const(0.0), e), b.fadd(e, self.const(2.0))), sign)

    def horizontal_sum(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """The sum of the lanes in every lane: neighbours first, then pairs, then fours."""
        distance = 1
        while distance < self.lanes:
            other = b.shuffle_vector(x, x, self.iconst([lane ^ distance for lane in range(self.lanes)]))
            x = b.fadd(x, other)
            distance *= 2
        return x

    def horizontal_max(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """The largest lane in every lane."""
        distance = self.lanes // 2
        while distance:
            other = b.shuffle_vector(x, x, self.iconst([lane ^ distance for lane in range(self.lanes)]))
            x = b.select(b.fcmp_ordered(">", other, x), other, x)
            distance //= 2
        return x
