"""Device code of norms, gated activations and rotary positions; `layers.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen_kernels.triton_kernels.write_kernel import (
    magnitude,
    scale_of,
    to_scaled,
    to_stored,
    write_rows,
)


@triton.jit
def rms_norm_kernel(
    out_ptr,
    total_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """One row. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * WIDTH + column, x, mask=mask)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    if UNIT_OFFSET:
        x = x * (1 + weight)
    else:
        x = x.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * WIDTH + column, x.to(dtype), mask=mask)


@triton.jit
def gated_kernel(
    out_ptr,
    gate_ptr,
    up_ptr,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    """BLOCK elements of one row. Grid: (rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0).to(tl.float32)
    x = gate.to(tl.float32)
    if GELU:
        # gelu by tanh is x * sigmoid(2y), with y the cubic inside of the tanh.
        inside = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    else:
        inside = x
    # Far below 0 the exponential is infinite, and x / inf is the 0 that is wanted.
    active = (x / (1 + tl.exp(-inside))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (active * up).to(gate.dtype), mask=mask)


@triton.jit
def _columns(ptr, row, present, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """COUNT elements behind FIRST of the rows at `row` [n], padded with zeros to [n, PADDED]."""
    column = tl.arange(0, PADDED)
    mask = present[:, None] & (column < COUNT)[None, :]
    return tl.load(ptr + row[:, None] + FIRST + column[None, :], mask=mask, other=0)


@triton.jit
def _set_columns(ptr, row, present, x, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    mask = present[:, None] & (column < COUNT)[None, :]
    tl.store(ptr + row[:, None] + FIRST + column[None, :], x, mask=mask)


@triton.jit
def _normed(
    x,
    factor,
    weight_ptr,
    dtype: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """COUNT elements behind FIRST of heads, `x` [n, PADDED] in float32, by `factor` [n] and their weights."""
    column = tl.arange(0, PADDED)
    weight = tl.load(weight_ptr + FIRST + column, mask=column < COUNT, other=0).to(tl.float32)[None, :]
    x = x * factor[:, None]
    if UNIT_OFFSET:
        x = x * (1 + weight)
    else:
        x = x.to(dtype).to(tl.float32) * weight
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def rotate_and_write_kernel(
    query_out_ptr,
    query_ptr,
    key_in_ptr,
    value_in_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slots_ptr,
    num_rows,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    angle_stride,
    key_page,
    value_page,
    key_scale_page,
    value_scale_page,
    eps,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    """ROWS rows of one query head, or of one KV head. Grid: (chunks of rows, HEADS + KV heads).

    HALF pairs of elements are turned, REST elements behind them are not. With NORM each head is normalised
    before. Normalised and rotated elements are rounded to the dtype that they came in, as they would be
    between kernels, and keys then stored.
    """
    index = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    wide_row = row.to(tl.int64)
    angle = wide_row * angle_stride
    cos1 = _columns(cos_ptr, angle, inside, 0, HALF, BLOCK_HALF).to(tl.float32)
    cos2 = _columns(cos_ptr, angle, inside, HALF, HALF, BLOCK_HALF).to(tl.float32)
    sin1 = _columns(sin_ptr, angle, inside, 0, HALF, BLOCK_HALF).to(tl.float32)
    sin2 = _columns(sin_ptr, angle, inside, HALF, HALF, BLOCK_HALF).to(tl.float32)
    is_query = index < HEADS
    if is_query:
        source_ptr = query_ptr
        source = wide_row * query_token_stride + index * query_head_stride
    else:
        source_ptr = key_in_ptr
        source = wide_row * key_token_stride + (index - HEADS) * key_head_stride
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    x1 = _columns(source_ptr, source, inside, 0, HALF, BLOCK_HALF).to(tl.float32)
    x2 = _columns(source_ptr, source, inside, HALF, HALF, BLOCK_HALF).to(tl.float32)
    if REST > 0:
        rest = _columns(source_ptr, source, inside, 2 * HALF, REST, BLOCK_REST)
    if NORM:
        if is_query:
            norm_ptr = query_norm_ptr
        else:
            norm_ptr = key_norm_ptr
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if REST > 0:
            wide = rest.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        factor = tl.rsqrt(squares / HEAD_SIZE + eps)
        x1 = _normed(x1, factor, norm_ptr, dtype, UNIT_OFFSET, 0, HALF, BLOCK_HALF)
        x2 = _normed(x2, factor, norm_ptr, dtype, UNIT_OFFSET, HALF, HALF, BLOCK_HALF)
        if REST > 0:
            rest = _normed(wide, factor, norm_ptr, dtype, UNIT_OFFSET, 2 * HALF, REST, BLOCK_REST).to(dtype)
    turned1 = (x1 * cos1 - x2 * sin1).to(dtype)
    turned2 = (x2 * cos2 + x1 * sin2).to(dtype)
    if is_query:
        target = (wide_row * HEADS + index) * HEAD_SIZE
        _set_columns(query_out_ptr, target, inside, turned1, 0, HALF, BLOCK_HALF)
        _set_columns(query_out_ptr, target, inside, turned2, HALF, HALF, BLOCK_HALF)
        if REST > 0:
            _set_columns(query_out_ptr, target, inside, rest, 2 * HALF, REST, BLOCK_REST)
    else:
        head = index - HEADS
        slot = tl.load(slots_ptr + row, mask=inside, other=-1)
        present = slot >= 0
        block = slot // BLOCK_SIZE
        place = head * BLOCK_SIZE + slot % BLOCK_SIZE
        target = block * key_page + place * HEAD_SIZE
        if SCALED:
            largest = tl.maximum(
                magnitude(turned1.to(tl.float32)),
                magnitude(turned2.to(tl.float32)),
                propagate_nan=tl.PropagateNan.ALL,
            )
            if REST > 0:
                largest = tl.maximum(
                    largest, magnitude(rest.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL
                )
            scale = scale_of(largest, FP8)
            tl.store(key_scale_ptr + block * key_scale_page + place, scale, mask=present)
            stored1 = to_scaled(turned1.to(tl.float32), scale, FP8)
            stored2 = to_scaled(turned2.to(tl.float32), scale, FP8)
            if REST > 0:
                rest = to_scaled(rest.to(tl.float32), scale, FP8)
        else:
            stored1 = to_stored(turned1, key_ptr.dtype.element_ty)
            stored2 = to_stored(turned2, key_ptr.dtype.element_ty)
            if REST > 0:
                rest = to_stored(rest, key_ptr.dtype.element_ty)
        _set_columns(key_ptr, target, present, stored1, 0, HALF, BLOCK_HALF)
        _set_columns(key_ptr, target, present, stored2, HALF, HALF, BLOCK_HALF)
        if REST > 0:
            _set_columns(key_ptr, target, present, rest, 2 * HALF, REST, BLOCK_REST)
        write_rows(
            value_in_ptr,
            value_ptr,
            value_scale_ptr,
            wide_row * value_token_stride + head * value_head_stride,
            block,
            place,
            present,
            value_page,
            value_scale_page,
            V_HEAD_SIZE,
            BLOCK_V,
            SCALED,
            FP8,
        )
