"""Device code of paged attention; `backend.py` launches it. Layout and method are told in `__init__.py`.

Offsets into the cache, the queries and the output are counted in elements, in 64 bits where a product of
two sizes may pass 2**31.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sequence_of(tile, starts_ptr, num_seqs, TILE_TOKENS: tl.constexpr):
    """The last sequence whose first tile is not after `tile`."""
    low = tl.full([], 0, tl.int32)
    high = num_seqs + low
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts_ptr + middle)
        if TILE_TOKENS > 1:
            first = first // TILE_TOKENS + middle
        before = first <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _load_part(
    ptr, offsets, present, ALL: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns FIRST to FIRST + PART of the rows at `offsets` [n], 0 where absent or beyond WIDTH.

    With ALL no row is absent.
    """
    column = FIRST + tl.arange(0, PART)
    pointers = ptr + offsets[:, None] + column[None, :]
    if ALL and FIRST + PART <= WIDTH:
        part = tl.load(pointers)
    elif ALL:
        part = tl.load(pointers, mask=(column < WIDTH)[None, :], other=0)
    elif FIRST + PART <= WIDTH:
        part = tl.load(pointers, mask=present[:, None], other=0)
    else:
        part = tl.load(pointers, mask=present[:, None] & (column < WIDTH)[None, :], other=0)
    return part


@triton.jit
def _load_scale(ptr, offsets, present, ALL: tl.constexpr):
    """Scales of rows at `offsets` [n], 0 where absent; with ALL none is."""
    if ALL:
        scale = tl.load(ptr + offsets)
    else:
        scale = tl.load(ptr + offsets, mask=present, other=0)
    return scale


@triton.jit
def _widen(x, dtype: tl.constexpr, FP8: tl.constexpr):
    """Elements as stored, in the dtype of a product. FP8: bytes of e4m3, by instruction (1) or shifts (2)."""
    if FP8 == 1:
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FP8 == 2:
        # float16 has one bit of exponent more, whose offset is 8 higher: subnormal numbers are right too.
        bits = x.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        x = bits.to(tl.float16, bitcast=True) * 256.0
    return x.to(dtype)


@triton.jit
def _store_part(ptr, offsets, present, x, FIRST: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    column = FIRST + tl.arange(0, PART)
    mask = present[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + offsets[:, None] + column[None, :], x.to(ptr.dtype.element_ty), mask=mask)


# What changes from step to step, by which a kernel would be compiled anew in the middle of a run.
@triton.jit(do_not_specialize=["num_seqs", "num_splits", "num_shared", "table_stride"])
def attend_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    sinks_ptr,
    starts_ptr,
    seq_lens_ptr,
    table_ptr,
    members_ptr,
    count_ptr,
    rows_ptr,
    skipped_ptr,
    shared_partial_ptr,
    shared_stats_ptr,
    num_seqs,
    num_splits,
    num_shared,
    query_token_stride,
    query_head_stride,
    table_stride,
    KEY_PAGE: tl.constexpr,
    VALUE_PAGE: tl.constexpr,
    KEY_SCALE_PAGE: tl.constexpr,
    VALUE_SCALE_PAGE: tl.constexpr,
    factor,
    cap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
    SPLIT: tl.constexpr,
    FIXED_TILES: tl.constexpr,
    ONE_ROW: tl.constexpr,
    SHARED: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    CONTINUED: tl.constexpr,
):
    """One tile of query rows of one KV head against one split of its keys.

    Grid: (tiles, KV heads x chunks of their query heads, splits). `SPLIT` writes float32 sums to
    `partial_ptr` [T, HEADS, num_splits, V_HEAD_SIZE] and (largest score, weight) to `stats_ptr`
    [T, HEADS, num_splits, 2] for `merge_kernel`; else the result goes to `out_ptr`. `FIXED_TILES` counts
    the key tiles of a split from position 0; 0 divides what this tile sees by the number of splits. With
    `ONE_ROW` each sequence has one row, and a tile is its own: a search is a chain of loads, longer than all
    others before the first product.

    `SHARED` attends to what groups of sequences have in common: a group takes the place of a sequence, whose
    rows are its members', one each, and all stand behind its keys. `starts_ptr` then counts members of
    `count_ptr` groups, `members_ptr` has their sequences, `rows_ptr` the first row of each sequence, a split
    has `LEAST_KEYS` keys at least, and sums are those of sequences, [S, HEADS, num_splits, ...]. `CONTINUED`
    leaves out the first `skipped_ptr` keys of each sequence and adds the sums that such a launch left in
    `shared_partial_ptr` and `shared_stats_ptr`, of `num_shared` splits.
    """
    # Later tiles of a sequence see more keys: who starts first should take longest.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    CHUNKS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(1) // CHUNKS
    chunk = tl.program_id(1) % CHUNKS
    split = tl.program_id(2)

    if ONE_ROW:
        seq = tile
        start = tile
        num_rows = tl.full([], 1, tl.int32)
    else:
        if SHARED:
            num_seqs = tl.load(count_ptr)
        seq = _sequence_of(tile, starts_ptr, num_seqs, TILE_TOKENS)
        start = tl.load(starts_ptr + seq)
        num_rows = tl.load(starts_ptr + seq + 1) - start
    history = tl.load(seq_lens_ptr + seq)
    if not SHARED:
        history = history - num_rows
    if CONTINUED:
        # From here on positions count from the first of its own keys.
        skipped = tl.load(skipped_ptr + seq)
        history = history - skipped
    if ONE_ROW:
        first = tl.full([], 0, tl.int32)
    elif TILE_TOKENS > 1:
        first = (tile - start // TILE_TOKENS - seq) * TILE_TOKENS
    else:
        first = tile - start
    if first >= num_rows:
        return

    row = tl.arange(0, BLOCK_M)
    token = first + row // TILE_HEADS
    group_head = chunk * TILE_HEADS + row % TILE_HEADS
    valid = (row < TILE_TOKENS * TILE_HEADS) & (token < num_rows) & (group_head < GROUP)
    head = kv_head * GROUP + group_head
    if SHARED:
        member = tl.load(members_ptr + start + token, mask=valid, other=0)
        step_row = tl.load(rows_ptr + member, mask=valid, other=0).to(tl.int64)
    else:
        position = history + token
        step_row = (start + token).to(tl.int64)
    query_row = step_row * query_token_stride + head * query_head_stride
    query1 = _load_part(query_ptr, query_row, valid, False, 0, K1, HEAD_SIZE)
    if K2 > 0:
        query2 = _load_part(query_ptr, query_row, valid, False, K1, K2, HEAD_SIZE)

    end = history
    if not SHARED:
        end = history + tl.minimum(first + TILE_TOKENS, num_rows)
    begin = tl.full([], 0, tl.int32)
    if WINDOW > 0:
        begin = tl.maximum(history + first - WINDOW + 1, 0)
    # float16 holds no probability times a small scale: there values are scaled, which takes more time.
    SCALE_VALUES: tl.constexpr = SCALED and query_ptr.dtype.element_ty == tl.float16
    low = begin // BLOCK_N
    high = (end + BLOCK_N - 1) // BLOCK_N
    if SPLIT:
        if FIXED_TILES > 0:
            low = tl.maximum(low, split * FIXED_TILES)
            high = tl.minimum(high, (split + 1) * FIXED_TILES)
        else:
            share = (high - low + num_splits - 1) // num_splits
            if SHARED:
                share = tl.maximum(share, LEAST_KEYS // BLOCK_N)
            low = low + split * share
            high = tl.minimum(high, low + share)

    owner = seq
    if SHARED:
        owner = tl.load(members_ptr + start)
    table_row = table_ptr + owner.to(tl.int64) * table_stride
    if CONTINUED:
        table_row = table_row + skipped // BLOCK_SIZE
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    sum1 = tl.zeros([BLOCK_M, V1], tl.float32)
    if V2 > 0:
        sum2 = tl.zeros([BLOCK_M, V2], tl.float32)
    # Tiles of keys that all rows see come first, and need no masks.
    whole = low
    if WINDOW == 0:
        seen_by_all = history
        if not SHARED:
            seen_by_all = history + first + 1
        whole = tl.minimum(tl.maximum(seen_by_all // BLOCK_N, low), high)
    column = tl.arange(0, BLOCK_N)
    for rest in tl.static_range(2):
        for n in range(whole if rest else low, high if rest else whole):
            key_position = n * BLOCK_N + column
            # What no row sees may hold anything: it is never read.
            present = (key_position >= begin) & (key_position < end)
            if BLOCK_N % BLOCK_SIZE == 0:
                entry = table_row + n * (BLOCK_N // BLOCK_SIZE) + column // BLOCK_SIZE
                place = column % BLOCK_SIZE
            elif BLOCK_SIZE % BLOCK_N == 0:
                entry = table_row + n * BLOCK_N // BLOCK_SIZE
                place = n * BLOCK_N % BLOCK_SIZE + column
            else:
                entry = table_row + key_position // BLOCK_SIZE
                place = key_position % BLOCK_SIZE
            if rest and BLOCK_SIZE % BLOCK_N != 0:
                block = tl.load(entry, mask=present, other=0).to(tl.int64)
            else:
                block = tl.load(entry).to(tl.int64)
            place = kv_head * BLOCK_SIZE + place

            key_row = block * KEY_PAGE + place * HEAD_SIZE
            key = _load_part(key_ptr, key_row, present, not rest, 0, K1, HEAD_SIZE)
            key = _widen(key, query1.dtype, FP8)
            scores = tl.dot(query1, tl.trans(key), input_precision="ieee")
            if K2 > 0:
                key = _load_part(key_ptr, key_row, present, not rest, K1, K2, HEAD_SIZE)
                key = _widen(key, query1.dtype, FP8)
                scores = tl.dot(query2, tl.trans(key), scores, input_precision="ieee")
            if SCALED:
                key_scale = _load_scale(key_scale_ptr, block * KEY_SCALE_PAGE + place, present, not rest)
                scores = scores * key_scale[None, :]
            if SOFTCAP:
                # tanh(x) = 1 - 2 / (1 + exp(2x)), right at both ends without a branch.
                scores = cap * (1 - 2 / (1 + tl.exp2(scores * factor)))
            if rest:
                visible = present[None, :]
                if not SHARED:
                    visible = visible & (key_position[None, :] <= position[:, None])
                if WINDOW > 0:
                    visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
                scores = tl.where(visible, scores, float("-inf"))

            # A row that sees nothing yet keeps -inf, and must not subtract it from itself.
            unit = 1.0 if SOFTCAP else factor
            larger = tl.maximum(largest, tl.max(scores, 1) * unit)
            base = tl.where(larger == float("-inf"), 0.0, larger)
            probability = tl.exp2(tl.fma(scores, unit, -base[:, None]))
            fade = tl.exp2(largest - base)
            weight = weight * fade + tl.sum(probability, 1)
            largest = larger

            value_row = block * VALUE_PAGE + place * V_HEAD_SIZE
            if SCALED:
                value_scale = _load_scale(
                    value_scale_ptr, block * VALUE_SCALE_PAGE + place, present, not rest
                )
                if not SCALE_VALUES:
                    probability = probability * value_scale[None, :]
            probability = probability.to(query1.dtype)
            value = _load_part(value_ptr, value_row, present, not rest, 0, V1, V_HEAD_SIZE)
            if SCALE_VALUES:
                value = (_widen(value, tl.float32, FP8) * value_scale[:, None]).to(query1.dtype)
            else:
                value = _widen(value, query1.dtype, FP8)
            sum1 = tl.dot(probability, value, sum1 * fade[:, None], input_precision="ieee")
            if V2 > 0:
                value = _load_part(value_ptr, value_row, present, not rest, V1, V2, V_HEAD_SIZE)
                if SCALE_VALUES:
                    value = (_widen(value, tl.float32, FP8) * value_scale[:, None]).to(query1.dtype)
                else:
                    value = _widen(value, query1.dtype, FP8)
                sum2 = tl.dot(probability, value, sum2 * fade[:, None], input_precision="ieee")

    if CONTINUED:
        # The first split alone takes them in, so that they are counted once; the last of theirs may be empty.
        count = tl.minimum((skipped + LEAST_KEYS - 1) // LEAST_KEYS, num_shared)
        if SPLIT:
            count = tl.where(split == 0, count, 0)
        first_sum = seq.to(tl.int64) * HEADS * num_shared
        its_stats_ptr = shared_stats_ptr + first_sum * 2
        its_partial_ptr = shared_partial_ptr + first_sum * V_HEAD_SIZE
        for s in range(count):
            shared_row = head * num_shared + s
            its_largest = tl.load(its_stats_ptr + shared_row * 2, mask=valid, other=float("-inf"))
            its_weight = tl.load(its_stats_ptr + shared_row * 2 + 1, mask=valid, other=0)
            larger = tl.maximum(largest, its_largest)
            base = tl.where(larger == float("-inf"), 0.0, larger)
            fade = tl.exp2(largest - base)
            gain = tl.exp2(its_largest - base)
            # NaN is not 0.
            seen = valid & (its_weight != 0)
            weight = weight * fade + its_weight * gain
            largest = larger
            part = _load_part(its_partial_ptr, shared_row * V_HEAD_SIZE, seen, False, 0, V1, V_HEAD_SIZE)
            sum1 = sum1 * fade[:, None] + part * gain[:, None]
            if V2 > 0:
                part = _load_part(its_partial_ptr, shared_row * V_HEAD_SIZE, seen, False, V1, V2, V_HEAD_SIZE)
                sum2 = sum2 * fade[:, None] + part * gain[:, None]

    out_row = step_row * HEADS + head
    if SHARED:
        out_row = member.to(tl.int64) * HEADS + head
    if SPLIT:
        out_row = out_row * num_splits + split
        tl.store(stats_ptr + out_row * 2, largest, mask=valid)
        tl.store(stats_ptr + out_row * 2 + 1, weight, mask=valid)
        # Nothing is written for rows that see none of this split's keys, nor read by `merge_kernel`.
        valid = valid & (weight != 0)
        target = partial_ptr
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=valid, other=0).to(tl.float32) * 1.4426950408889634
            larger = tl.maximum(largest, sink)
            fade = tl.exp2(largest - larger)
            weight = weight * fade + tl.exp2(sink - larger)
            sum1 = sum1 * fade[:, None]
            if V2 > 0:
                sum2 = sum2 * fade[:, None]
        weight = tl.where(weight == 0, 1.0, weight)
        sum1 = sum1 / weight[:, None]
        if V2 > 0:
            sum2 = sum2 / weight[:, None]
        target = out_ptr
    _store_part(target, out_row * V_HEAD_SIZE, valid, sum1, 0, V1, V_HEAD_SIZE)
    if V2 > 0:
        _store_part(target, out_row * V_HEAD_SIZE, valid, sum2, V1, V2, V_HEAD_SIZE)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    sinks_ptr,
    num_splits,
    HEADS: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add up the splits of BLOCK_H heads of one row, in order. Grid: (rows, chunks of heads).

    A split in which the row sees nothing adds an exact 0, so that the result does not depend on how many
    there are of them.
    """
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = head < HEADS
    row = tl.program_id(0).to(tl.int64) * HEADS + head
    stats = stats_ptr + row * num_splits * 2
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0).to(tl.float32) * 1.4426950408889634
        largest = sink
    for s in range(num_splits):
        largest = tl.maximum(largest, tl.load(stats + s * 2, mask=valid, other=0))
    weight = tl.zeros([BLOCK_H], tl.float32)
    if SINKS:
        weight = tl.exp2(sink - largest)
    column = tl.arange(0, BLOCK_V)
    total = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for s in range(num_splits):
        share = tl.load(stats + s * 2 + 1, mask=valid, other=0)
        factor = tl.exp2(tl.load(stats + s * 2, mask=valid, other=0) - largest)
        # NaN is not 0.
        seen = (share != 0)[:, None] & (column < V_HEAD_SIZE)[None, :]
        place = (row * num_splits + s) * V_HEAD_SIZE
        partial = tl.load(partial_ptr + place[:, None] + column[None, :], mask=seen, other=0)
        weight += share * factor
        total += partial * factor[:, None]
    # Heads beyond the last have no weight.
    total = total / tl.where(weight == 0, 1.0, weight)[:, None]
    _store_part(out_ptr, row * V_HEAD_SIZE, valid, total, 0, BLOCK_V, V_HEAD_SIZE)
