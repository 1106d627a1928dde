"""float32 rounded to 16 bits, where keys and values are stored so. Called by `rows.py`.

By hand, because without an instruction for it LLVM calls a function that may not be there.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchgen_kernels.cpu.vectors import I64, Vectors, index

LANES = 16
_WHOLE, _SINGLE = Vectors(LANES), Vectors(1)
_NOT_FINITE = 0x7FFF
"""Bits of a NaN in either format, without the sign."""
_LEAST_NORMAL = 0x38800000
"""float32 bits of 2**-14, of float16."""
_TOO_LARGE = {types.int16: 0x477FF000, types.uint16: 0x7F7F8000}
"""float32 bits of the least number that is rounded to infinity."""


@intrinsic
def narrow(typingctx: Any, numbers: Any, count: Any, storage: Any) -> Any:
    """Round `count` float32 numbers to the nearest of 16 bits, of two equally near to the even one.

    In place: the bits lie side by side from `numbers` (an address) on. What is not finite, or is beyond what
    the format holds, becomes a NaN. storage: int16 for float16, uint16 for bfloat16.
    """
    is_half = storage.dtype == types.int16
    too_large = _TOO_LARGE[storage.dtype]

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        numbers, count, _ = args
        whole = b.mul(b.sdiv(count, index(LANES)), index(LANES))
        for v, start, stop in ((_WHOLE, index(0), whole), (_SINGLE, whole, count)):
            kind = ir.VectorType(ir.IntType(16), v.lanes).as_pointer()
            with cgutils.for_range_slice(b, start, stop, index(v.lanes), I64) as (place, _):
                x = v.load(b, numbers, place)
                magnitude, sign = v.magnitude(b, x)
                bits = b.bitcast(magnitude, v.ints)
                rounded = _float16(v, b, magnitude) if is_half else _rounded(v, b, bits, 16)
                fits = b.icmp_unsigned("<", bits, v.iconst(too_large))
                rounded = b.select(fits, rounded, v.iconst(_NOT_FINITE))
                narrowed = b.trunc(b.or_(rounded, b.lshr(sign, v.iconst(16))), kind.pointee)
                target = b.inttoptr(b.add(numbers, b.shl(place, index(1))), kind)
                b.store(narrowed, target, align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, storage), codegen


def _float16(v: Vectors, b: ir.IRBuilder, magnitude: ir.Value) -> ir.Value:
    bits = b.bitcast(magnitude, v.ints)
    # The exponent's bias is 15 in place of 127.
    normal = _rounded(v, b, b.sub(bits, v.iconst(112 << 23)), 13)
    # Beside 0.5 the least bit of a float32 is that of a subnormal float16.
    subnormal = b.sub(b.bitcast(b.fadd(magnitude, v.const(0.5)), v.ints), v.iconst(0x3F000000))
    small = b.icmp_unsigned("<", bits, v.iconst(_LEAST_NORMAL))
    return b.select(small, subnormal, normal)


def _rounded(v: Vectors, b: ir.IRBuilder, bits: ir.Value, dropped: int) -> ir.Value:
    """Without the lowest `dropped` bits."""
    odd = b.and_(b.lshr(bits, v.iconst(dropped)), v.iconst(1))
    half = b.add(bits, b.add(odd, v.iconst((1 << dropped - 1) - 1)))
    return b.lshr(half, v.iconst(dropped))
