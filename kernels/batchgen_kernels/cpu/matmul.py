"""Matrix products with weights packed for them, whose rows do not depend on each other.

Each number of the result is one chain of multiply-adds over the input features, from the first to the last,
each rounded once. How many rows a call has, how they are cut into blocks, which thread computes them and how
wide the processor's vectors are changes none of it: a row has the same bits in every batch, on every machine
with fused multiply-add, and no padding is needed for it. A library chooses among kernels that sum in
different orders, by the number of rows.

Packed weights `[panels, in_features, PANEL]`: the weights of PANEL outputs lie side by side for each input
feature, so that a panel is read from its start to its end, by all rows of a block, whose sums stay in
registers all the while:

```
              panel p, input k
w[p, k]       [ vector 0 ][ vector 1 ]          sums of a block: ROWS x 2 registers
x[row, k]     one number, in all lanes          sums[row] += x[row, k] * w[p, k]
```
"""

# mypy: disable-error-code="attr-defined,call-arg,call-overload,no-untyped-call,var-annotated"

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from batchgen_kernels.cpu.vectors import HAS_512, Vectors, index, switch

_VECTORS = 2
V = Vectors(16 if HAS_512 else 8)
PANEL = _VECTORS * V.lanes
"""Outputs whose weights lie together."""
ROWS = 14 if HAS_512 else 6
"""Most rows of a block: two vectors of sums each, two of weights and one of x fill the registers."""
ALIGNMENT = 32
"""Rows of results are multiples of this many floats apart, whatever the processor's vectors."""


class Epilogue(enum.IntEnum):
    """What becomes of the sums.

    STORE: they are the result. ADD: they are added to it. SILU and GELU_TANH: of each panel, the second half
    is multiplied by the activation of the first, which gives PANEL / 2 numbers.
    """

    STORE = 0
    ADD = 1
    SILU = 2
    GELU_TANH = 3


class Matmul(enum.IntEnum):
    """Where the fields of a product are: addresses, counts, and strides in floats.

    X `[rows, features]`, WEIGHTS as packed, BIAS `[panels * PANEL]` or 0, OUT `[rows, ...]`. Of
    quantised weights, too: SCALES `[panels, groups, PANEL]`.
    """

    X = 4
    X_STRIDE = 5
    WEIGHTS = 6
    BIAS = 7
    OUT = 8
    OUT_STRIDE = 9
    NUM_ROWS = 10
    FEATURES = 11
    PANELS = 12
    EPILOGUE = 13
    PANELS_PER_CHUNK = 14
    ROWS_PER_CHUNK = 15
    SCALES = 16


@intrinsic
def _multiply(
    typingctx: Any, x: Any, x_stride: Any, weights: Any, features: Any, out: Any, out_stride: Any, rows: Any
) -> Any:
    """out[rows, PANEL] = x[rows, features] @ weights[features, PANEL] for 1 to ROWS rows."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        x, x_stride, weights, features, out, out_stride, rows = args

        def body(n: int) -> None:
            sums = V.accumulators(b, n * _VECTORS)
            for slot in sums:
                b.store(V.const(0.0), slot)
            starts = [b.add(x, b.shl(b.mul(x_stride, index(r)), index(2))) for r in range(n)]
            with cgutils.for_range(b, features) as loop:
                place = b.mul(loop.index, index(PANEL))
                w = [V.load(b, weights, b.add(place, index(v * V.lanes))) for v in range(_VECTORS)]
                for r in range(n):
                    factor = V.load_splat(b, starts[r], loop.index)
                    for v in range(_VECTORS):
                        slot = sums[r * _VECTORS + v]
                        b.store(V.fma(b, factor, w[v], b.load(slot)), slot)
            for r in range(n):
                for v in range(_VECTORS):
                    place = b.add(b.mul(out_stride, index(r)), index(v * V.lanes))
                    V.store(b, b.load(sums[r * _VECTORS + v]), out, place)

        switch(b, rows, range(1, ROWS + 1), body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@intrinsic
def sums_tile(typingctx: Any) -> Any:
    """Address of a block of sums on the stack, `[ROWS, PANEL]`, valid until the calling function returns."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        place = cgutils.alloca_once(b, ir.ArrayType(V.floats, ROWS * _VECTORS))
        return b.ptrtoint(place, ir.IntType(64))

    return types.int64(), codegen


@intrinsic
def _add(typingctx: Any, target: Any, source: Any) -> Any:
    """target[PANEL] += source[PANEL]."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        target, source = args
        for v in range(_VECTORS):
            place = v * V.lanes
            total = b.fadd(V.load(b, target, place), V.load(b, source, place))
            V.store(b, total, target, place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), codegen


def _silu(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x * sigmoid(x), by exp(-|x|), which cannot overflow."""
    magnitude, _ = V.magnitude(b, x)
    small = V.exp2(b, b.fmul(magnitude, V.const(-1 / math.log(2))))
    top = b.select(b.fcmp_ordered("<", x, V.const(0.0)), small, V.const(1.0))
    return b.fmul(x, b.fdiv(top, b.fadd(small, V.const(1.0))))


def _gelu_tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))), https://arxiv.org/abs/1606.08415."""
    cube = b.fmul(b.fmul(x, x), x)
    inner = b.fmul(V.const(math.sqrt(2 / math.pi)), V.fma(b, cube, V.const(0.044715), x))
    return b.fmul(b.fmul(x, V.const(0.5)), b.fadd(V.tanh(b, inner), V.const(1.0)))


def _gate_by(activation: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> Any:
    @intrinsic
    def gate(typingctx: Any, target: Any, sums: Any) -> Any:
        def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
            target, sums = args
            gated = b.fmul(activation(b, V.load(b, sums, 0)), V.load(b, sums, V.lanes))
            V.store(b, gated, target, 0)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 2), codegen

    return gate


_gate_by_silu = _gate_by(_silu)
_gate_by_gelu_tanh = _gate_by(_gelu_tanh)

_STORE, _ADD, _SILU = Epilogue.STORE.value, Epilogue.ADD.value, Epilogue.SILU.value
_ROWS, _PANEL, _HALF = ROWS, PANEL, PANEL // 2


@njit(error_model="numpy")
def add_bias(a: Any, rows: Any, panel: Any, sums: Any, stride: Any) -> None:
    if a[Matmul.BIAS] != 0:
        for r in range(rows):
            _add(sums + 4 * r * stride, a[Matmul.BIAS] + 4 * panel * _PANEL)


@njit(error_model="numpy")
def combine(a: Any, row: Any, rows: Any, panel: Any, tile: Any) -> None:
    """Every epilogue but STORE, for a block of sums."""
    epilogue, stride = a[Matmul.EPILOGUE], a[Matmul.OUT_STRIDE]
    for r in range(rows):
        sums = tile + 4 * r * _PANEL
        out = a[Matmul.OUT] + 4 * (row + r) * stride
        if epilogue == _ADD:
            _add(out + 4 * panel * _PANEL, sums)
        elif epilogue == _SILU:
            _gate_by_silu(out + 4 * panel * _HALF, sums)
        else:
            _gate_by_gelu_tanh(out + 4 * panel * _HALF, sums)


@njit(error_model="numpy")
def matmul_chunk(a: Any, chunk: Any) -> None:
    """Chunk number `chunk` of the product that `a` describes (see `Matmul`)."""
    segments = (a[Matmul.NUM_ROWS] + a[Matmul.ROWS_PER_CHUNK] - 1) // a[Matmul.ROWS_PER_CHUNK]
    first_panel = chunk // segments * a[Matmul.PANELS_PER_CHUNK]
    end_panel = min(first_panel + a[Matmul.PANELS_PER_CHUNK], a[Matmul.PANELS])
    first_row = chunk % segments * a[Matmul.ROWS_PER_CHUNK]
    end_row = min(first_row + a[Matmul.ROWS_PER_CHUNK], a[Matmul.NUM_ROWS])
    features, x_stride, out_stride = a[Matmul.FEATURES], a[Matmul.X_STRIDE], a[Matmul.OUT_STRIDE]
    blocks = (end_row - first_row + _ROWS - 1) // _ROWS
    tile = sums_tile()
    for panel in range(first_panel, end_panel):
        weights = a[Matmul.WEIGHTS] + 4 * panel * _PANEL * features
        row = first_row
        for block in range(blocks):
            # Even shares keep the last block from having one row only.
            rows = (end_row - row) // (blocks - block)
            x = a[Matmul.X] + 4 * row * x_stride
            out = a[Matmul.OUT] + 4 * (row * out_stride + panel * _PANEL)
            if a[Matmul.EPILOGUE] == _STORE:
                _multiply(x, x_stride, weights, features, out, out_stride, rows)
                add_bias(a, rows, panel, out, out_stride)
            else:
                _multiply(x, x_stride, weights, features, tile, _PANEL, rows)
                add_bias(a, rows, panel, tile, _PANEL)
                combine(a, row, rows, panel, tile)
            row += rows
