"""Device code of products whose rows do not depend on how many there are; `matmul.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def multiply_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    out_stride,
    x_stride,
    weight_stride,
    factor,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows by BLOCK_N outputs. Grid: (tiles of rows, tiles of outputs).

    Programs that run at the same time share a tile of outputs, whose weights are then read from memory once.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, there = row < num_rows, output < OUT_WIDTH
    feature = tl.arange(0, BLOCK_K)
    x_row = x_ptr + row.to(tl.int64) * x_stride
    weight_row = weight_ptr + output.to(tl.int64) * weight_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        present = first + feature < WIDTH
        x = tl.load(
            x_row[:, None] + (first + feature)[None, :], mask=inside[:, None] & present[None, :], other=0
        )
        weight = tl.load(
            weight_row[:, None] + (first + feature)[None, :], mask=there[:, None] & present[None, :], other=0
        )
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_ptr + output, mask=there, other=0).to(tl.float32)[None, :]
    target = out_ptr + (row.to(tl.int64) * out_stride)[:, None] + output[None, :]
    mask = inside[:, None] & there[None, :]
    if ADD:
        total = tl.load(target, mask=mask, other=0).to(tl.float32) + factor * total
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)
