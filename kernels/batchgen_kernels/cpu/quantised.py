"""Matrix products in int8 with weights packed for them, whose rows do not depend on each other.

Activations are records (see `records.py`), and weights have a scale for each output and group of features,
too. The products of a group are summed as whole numbers, which is exact, so their order is free and the
instructions of every processor give the same bits. The sums of the groups are added as float32 in the order
of the features, each with one rounding:

    y = fma(float32(sum of q[k] * w[k] over the group), scale of the row * scale of the output, y)

Packed weights `[panels, groups, GROUP / STEP, PANEL, STEP]` hold w + 128, which is not negative; a group's
sum begins with -128 * (the sum of its q) in return. Four weights of an output lie together, as instructions
take them; without such an instruction they are taken apart into pairs of 16 bits.
"""

# mypy: disable-error-code="attr-defined,call-arg,call-overload,no-untyped-call,var-annotated"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from batchgen_kernels.cpu.matmul import PANEL, ROWS, Epilogue, Matmul, V, add_bias, combine, sums_tile
from batchgen_kernels.cpu.records import GROUP, HAS_DOT, ITEM, pointer
from batchgen_kernels.cpu.vectors import F32, I32, I64, has_feature, index, switch

STEP = 4
"""Features that are multiplied at once."""
_VECTORS = PANEL // V.lanes
_BLOCK = ROWS // 2
"""Most rows of a block, whose sums and totals fill the registers."""
_STEPS_OF_GROUP = GROUP // STEP
_PAIRS = ir.VectorType(ir.IntType(16), 2 * V.lanes)


def _call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), list(args))


def _operands(b: ir.IRBuilder, weights: ir.Value) -> list[ir.Value]:
    """Four weights in each lane as `_add_products` takes them."""
    if HAS_DOT:
        return [weights]
    low = V.iconst(0x00FF00FF)
    return [b.and_(weights, low), b.and_(b.lshr(weights, V.iconst(8)), low)]


def _add_products(b: ir.IRBuilder, total: ir.Value, weights: list[ir.Value], q: list[ir.Value]) -> ir.Value:
    """total + the products of four features, in each lane."""
    if HAS_DOT:
        return _call(b, f"llvm.x86.avx512.vpdpbusd.{32 * V.lanes}", V.ints, total, weights[0], q[0])
    for x, y in zip(weights, q, strict=True):
        total = b.add(total, _multiply_pairs(b, x, y))
    return total


def _multiply_pairs(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x0 * y0 + x1 * y1 of the two 16-bit numbers in each lane."""
    if V.lanes == 16 and has_feature("avx512bw"):
        return _call(b, "llvm.x86.avx512.pmaddw.d.512", V.ints, b.bitcast(x, _PAIRS), b.bitcast(y, _PAIRS))
    if V.lanes == 8 and has_feature("avx2"):
        return _call(b, "llvm.x86.avx2.pmadd.wd", V.ints, b.bitcast(x, _PAIRS), b.bitcast(y, _PAIRS))
    half = V.iconst(16)
    low = b.mul(b.ashr(b.shl(x, half), half), b.ashr(b.shl(y, half), half))
    return b.add(low, b.mul(b.ashr(x, half), b.ashr(y, half)))


class _Block:
    """Code for a block of `rows` rows of one panel.

    Sums of a group and totals of the groups stay in registers.
    """

    def __init__(self, b: ir.IRBuilder, rows: int, x: ir.Value, x_stride: ir.Value) -> None:
        self.b = b
        self.rows = rows
        self.totals = V.accumulators(b, rows * _VECTORS)
        for slot in self.totals:
            b.store(V.const(0.0), slot)
        self.records = [b.add(x, b.mul(x_stride, index(r))) for r in range(rows)]
        self.sums = [cgutils.alloca_once(b, V.ints) for _ in range(rows * _VECTORS)]

    def of_record(self, row: int, offset: ir.Value, typ: ir.Type) -> ir.Value:
        """A number of a row's record in every lane."""
        b = self.b
        return V.splat(b, b.load(pointer(b, b.add(self.records[row], offset), typ), align=4))

    def begin(self, offset: ir.Value) -> None:
        """The sums of a group, whose beginning is so many bytes behind the begin of a record."""
        for r in range(self.rows):
            start = self.of_record(r, offset, I32)
            for v in range(_VECTORS):
                self.b.store(start, self.sums[r * _VECTORS + v])

    def multiply(self, weights: ir.Value, step: ir.Value) -> None:
        """Add the products of the four features of a step."""
        b = self.b
        place = b.add(weights, b.mul(step, index(PANEL * STEP)))
        w = [_operands(b, b.bitcast(V.load(b, place, v * V.lanes), V.ints)) for v in range(_VECTORS)]
        offset = b.mul(step, index(STEP * ITEM))
        for r in range(self.rows):
            q = [self.of_record(r, b.add(offset, index(4 * part)), I32) for part in range(ITEM)]
            for v in range(_VECTORS):
                slot = self.sums[r * _VECTORS + v]
                b.store(_add_products(b, b.load(slot), w[v], q), slot)

    def end(self, offset: ir.Value, scales: list[ir.Value]) -> None:
        """Add a group's sums to the totals; its scale is so many bytes behind the begin of a record."""
        b = self.b
        for r in range(self.rows):
            scale = self.of_record(r, offset, F32)
            for v in range(_VECTORS):
                exact = b.sitofp(b.load(self.sums[r * _VECTORS + v]), V.floats)
                slot = self.totals[r * _VECTORS + v]
                b.store(V.fma(b, exact, b.fmul(scale, scales[v]), b.load(slot)), slot)

    def store(self, out: ir.Value, stride: ir.Value) -> None:
        """Write the totals."""
        b = self.b
        for r in range(self.rows):
            for v in range(_VECTORS):
                place = b.add(b.mul(stride, index(r)), index(v * V.lanes))
                V.store(b, b.load(self.totals[r * _VECTORS + v]), out, place)


@intrinsic
def _multiply(
    typingctx: Any,
    x: Any,
    x_stride: Any,
    weights: Any,
    scales: Any,
    groups: Any,
    out: Any,
    out_stride: Any,
    rows: Any,
) -> Any:
    """out[rows, PANEL] = x[rows] @ weights for 1 to `_BLOCK` records; `scales` are `[groups, PANEL]`."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        x, x_stride, weights, scales, groups, out, out_stride, rows = args
        of_scales = b.mul(groups, index(GROUP * ITEM))
        of_starts = b.add(of_scales, b.shl(groups, index(2)))

        def body(n: int) -> None:
            block = _Block(b, n, x, x_stride)
            with cgutils.for_range(b, groups) as loop:
                of_group = b.shl(loop.index, index(2))
                first = b.mul(loop.index, index(_STEPS_OF_GROUP))
                end = b.add(first, index(_STEPS_OF_GROUP))
                block.begin(b.add(of_starts, of_group))
                with cgutils.for_range_slice(b, first, end, index(1), I64) as (step, _):
                    block.multiply(weights, step)
                place = b.mul(loop.index, index(PANEL))
                factors = [V.load(b, scales, b.add(place, index(v * V.lanes))) for v in range(_VECTORS)]
                block.end(b.add(of_scales, of_group), factors)
            block.store(out, out_stride)

        switch(b, rows, range(1, _BLOCK + 1), body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


_STORE = Epilogue.STORE.value


@njit(error_model="numpy")
def quantised_matmul_chunk(a: Any, chunk: Any) -> None:
    """Chunk number `chunk` of the product that `a` describes (see `Matmul`); X_STRIDE is in bytes."""
    segments = (a[Matmul.NUM_ROWS] + a[Matmul.ROWS_PER_CHUNK] - 1) // a[Matmul.ROWS_PER_CHUNK]
    first_panel = chunk // segments * a[Matmul.PANELS_PER_CHUNK]
    end_panel = min(first_panel + a[Matmul.PANELS_PER_CHUNK], a[Matmul.PANELS])
    first_row = chunk % segments * a[Matmul.ROWS_PER_CHUNK]
    end_row = min(first_row + a[Matmul.ROWS_PER_CHUNK], a[Matmul.NUM_ROWS])
    groups = (a[Matmul.FEATURES] + GROUP - 1) // GROUP
    x_stride, out_stride = a[Matmul.X_STRIDE], a[Matmul.OUT_STRIDE]
    blocks = (end_row - first_row + _BLOCK - 1) // _BLOCK
    tile = sums_tile()
    for panel in range(first_panel, end_panel):
        weights = a[Matmul.WEIGHTS] + panel * groups * GROUP * PANEL
        scales = a[Matmul.SCALES] + 4 * panel * groups * PANEL
        row = first_row
        for block in range(blocks):
            # Even shares keep the last block from having one row only.
            rows = (end_row - row) // (blocks - block)
            x = a[Matmul.X] + row * x_stride
            out = a[Matmul.OUT] + 4 * (row * out_stride + panel * PANEL)
            if a[Matmul.EPILOGUE] == _STORE:
                _multiply(x, x_stride, weights, scales, groups, out, out_stride, rows)
                add_bias(a, rows, panel, out, out_stride)
            else:
                _multiply(x, x_stride, weights, scales, groups, tile, PANEL, rows)
                add_bias(a, rows, panel, tile, PANEL)
                combine(a, row, rows, panel, tile)
            row += rows
