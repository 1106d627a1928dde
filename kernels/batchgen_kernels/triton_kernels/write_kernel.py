"""Device code that stores keys and values in the paged cache; `backend.py` launches it.

What is stored is what `storage.py` says, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """The largest of each row's magnitudes, NaN where one of them is not finite."""
    size = tl.abs(x)
    # A maximum may leave NaN out, so whether all are finite is asked apart.
    sick = tl.max(tl.where(size < float("inf"), 0, 1), 1) > 0
    return tl.where(sick, float("nan"), tl.max(size, 1))


@triton.jit
def to_steps(x, scale):
    """int8 of rows [n, m] and their scales [n]; 0 where a scale is 0 or NaN."""
    usable = scale > 0
    steps = tl.div_rn(x, tl.where(usable, scale, 1.0)[:, None])
    # 1.5 * 2**23: a float32 of this size has no fraction, and additions round halves to even.
    steps = (steps + 12582912.0) - 12582912.0
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    return tl.where(usable[:, None], steps, 0.0).to(tl.int8)


@triton.jit
def to_fp8(x, scale):
    """The bytes of e4m3 of rows [n, m] and their scales [n]; 0 where a scale is 0 or NaN.

    In integers, as a chip before 8.9 has no instruction for it and triton's interpreter rounds wrongly.
    """
    usable = scale > 0
    x = tl.where(usable[:, None], tl.div_rn(x, tl.where(usable, scale, 1.0)[:, None]), 0.0)
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    # 20 of 23 bits of the mantissa go, half of the last that stays is added; the exponent counts from -7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    # Below 2**-6 a step is 2**-9, and the eighth of them is written as the first normal number.
    subnormal = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    sign = (x.to(tl.uint32, bitcast=True) >> 24).to(tl.int32) & 0x80
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def to_scaled(x, scale, FP8: tl.constexpr):
    """Rows in int8, or in bytes of e4m3, by their scales."""
    if FP8:
        stored = to_fp8(x, scale)
    else:
        stored = to_steps(x, scale)
    return stored


@triton.jit
def scale_of(largest, FP8: tl.constexpr):
    """What makes each of `largest` [n] the largest number of the format."""
    return tl.div_rn(largest, tl.full([1], 448.0 if FP8 else 127.0, tl.float32))


@triton.jit
def to_stored(x, dtype: tl.constexpr):
    """`x` in a floating dtype, NaN where it is not finite there."""
    rounded = x.to(dtype)
    finite = tl.abs(rounded.to(tl.float32)) < float("inf")
    return tl.where(finite, rounded, float("nan")).to(dtype)


@triton.jit
def write_rows(
    source_ptr,
    cache_ptr,
    scale_ptr,
    source_row,
    block,
    place,
    present,
    page,
    scale_page,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Rows [n] of WIDTH elements at `source_row`, to `place` vectors behind the start of their page."""
    column = tl.arange(0, PADDED)
    mask = present[:, None] & (column < WIDTH)[None, :]
    x = tl.load(source_ptr + source_row[:, None] + column[None, :], mask=mask, other=0)
    target = cache_ptr + (block * page + place * WIDTH)[:, None] + column[None, :]
    if SCALED:
        x = x.to(tl.float32)
        scale = scale_of(magnitude(x), FP8)
        tl.store(target, to_scaled(x, scale, FP8), mask=mask)
        tl.store(scale_ptr + block * scale_page + place, scale, mask=present)
    else:
        tl.store(target, to_stored(x, cache_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def write_kernel(
    key_in_ptr,
    value_in_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slots_ptr,
    num_rows,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_page,
    value_page,
    key_scale_page,
    value_scale_page,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Keys and values of ROWS rows of one KV head. Grid: (chunks of rows, KV heads)."""
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    present = slot >= 0
    block = slot // BLOCK_SIZE
    place = head * BLOCK_SIZE + slot % BLOCK_SIZE
    row = row.to(tl.int64)
    key_row = row * key_token_stride + head * key_head_stride
    value_row = row * value_token_stride + head * value_head_stride
    write_rows(
        key_in_ptr,
        key_ptr,
        key_scale_ptr,
        key_row,
        block,
        place,
        present,
        key_page,
        key_scale_page,
        HEAD_SIZE,
        BLOCK_K,
        SCALED,
        FP8,
    )
    write_rows(
        value_in_ptr,
        value_ptr,
        value_scale_ptr,
        value_row,
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
