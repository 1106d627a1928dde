"""Attention and cache writes, as the chunks of work of two operations of a program (see `program.py`).

Each is given a structure of int64 (`AttendArgument`, `WriteArgument`) that says where everything is. Compiled
for what keys and values are stored as when that is first used on a machine, loaded from the cache afterwards.

Cache layout of one layer, a block of 16 positions, head_size D and value width W (v_head_size rounded up
to a multiple of 16); int8 has a float32 scale [block][kv head][position] beside each:

```
key   [block][kv head][D][position]     value [block][kv head][position][W]

        position 0  1  2 ... 15                  w  0  1  2 ... W-1
      d 0      [ one vector  ]           position 0 [ vector ][ vector ] ...
      d 1      [             ]           position 1 [        ][        ] ...
      ...      scores += q[d] * row      ...        out += p[position] * row
      d D-1    [             ]           position 15
```

Both products are sums of rows scaled by a number, so no lane ever meets another, and both halves of a
block are contiguous memory. Blocks are a stride apart, which leaves room for other layers between them.
"""

# mypy: disable-error-code="attr-defined,call-arg,call-overload,var-annotated"
# Numba types these functions; its stubs know neither intrinsics nor carray of an address.

from __future__ import annotations

import ctypes
import enum
from typing import Any

import torch
from numba import carray, float32, int8, int16, int32, int64, njit, uint16
from numba.extending import overload

from batchgen_kernels.cpu.intrinsics import as_pointer
from batchgen_kernels.cpu.simd import (
    LANES,
    MAX_ROWS,
    TILE,
    VECTORS,
    accumulate,
    scores,
    softmax,
    softmax_whole,
)

UNIT_ROWS = 48
"""Query rows (tokens times heads of a group) that one unit of work, or a team of units, aims at."""
LOG2_E = 1.4426950408889634
_INF, _NAN = float("inf"), float("nan")
_HALF_NAN = 0x7FFF
"""Bits of a NaN in either 16-bit format."""


class Attend(enum.IntEnum):
    """Where the fields of `AttendArgument` are: addresses, counts, and strides in floats.

    PAGE is the number of bytes from one block of the cache to the next, ITEM_SIZE of a stored element.
    """

    CHUNKS = 0
    UNITS = 1
    TEAMS = 2
    TABLE = 3
    TABLE_WIDTH = 4
    BLOCK_SIZE = 5
    WINDOW = 6
    NUM_KV_HEADS = 7
    GROUP = 8
    HEAD_SIZE = 9
    V_HEAD_SIZE = 10
    V_WIDTH = 11
    QUERY = 12
    QUERY_TOKEN_STRIDE = 13
    QUERY_HEAD_STRIDE = 14
    KEY = 15
    VALUE = 16
    FACTORS = 17
    SINKS = 18
    OUT = 19
    SCRATCH = 20
    SCRATCH_STRIDE = 21
    PAGE = 22
    ITEM_SIZE = 23
    KEY_SCALE = 24
    VALUE_SCALE = 25


class Write(enum.IntEnum):
    """Where the fields of `WriteArgument` are: addresses, counts, and strides in bytes."""

    ROWS_PER_CHUNK = 0
    NUM_ROWS = 1
    SLOTS = 2
    BLOCK_SIZE = 3
    NUM_KV_HEADS = 4
    HEAD_SIZE = 5
    V_HEAD_SIZE = 6
    V_WIDTH = 7
    KEY_IN = 8
    KEY_TOKEN_STRIDE = 9
    KEY_HEAD_STRIDE = 10
    VALUE_IN = 11
    VALUE_TOKEN_STRIDE = 12
    VALUE_HEAD_STRIDE = 13
    KEY = 14
    VALUE = 15
    PAGE = 16
    ITEM_SIZE = 17
    KEY_SCALE = 18
    VALUE_SCALE = 19


class AttendArgument(ctypes.Structure):
    """What `attend_chunk` reads."""

    _fields_ = tuple((name.lower(), ctypes.c_int64) for name in Attend.__members__)


class WriteArgument(ctypes.Structure):
    """What `write_chunk` reads."""

    _fields_ = tuple((name.lower(), ctypes.c_int64) for name in Write.__members__)


_ADDRESS_TABLES = 4
_KEYS, _VALUES, _KEY_SCALES, _VALUE_SCALES = range(_ADDRESS_TABLES)


def scratch_floats(rows: int, head_size: int, v_width: int) -> int:
    """Floats of scratch memory that a thread needs for units of at most `rows` query rows."""
    addresses = _ADDRESS_TABLES * 2 * VECTORS * 2
    per_row = head_size + v_width + LANES + 2
    return -(-(addresses + MAX_ROWS * TILE + rows * per_row) // LANES) * LANES


@njit(error_model="numpy")
def _floats(address: Any, count: Any) -> Any:
    return carray(as_pointer(address), count, float32)


@njit(error_model="numpy")
def _low(position: Any, window: Any, tile: Any) -> Any:
    """First key of the tile that a query at `position` sees; window 0 is none."""
    return max(position - window + 1 - tile * TILE, 0) if window > 0 else 0


@njit(error_model="numpy")
def _high(position: Any, tile: Any) -> Any:
    """End of the keys of the tile that a query at `position` sees; at most 0 if it sees none."""
    return min(position + 1 - tile * TILE, TILE)


@njit(error_model="numpy")
def _unit(a: Any, unit: Any) -> Any:
    """(sequence, first row of the step, rows, position of the first row, first row of the result)."""
    seq, first, tokens, position, out = carray(as_pointer(a[Attend.UNITS] + 40 * unit), 5, int64)
    return seq, first, tokens, position, out


@njit(error_model="numpy")
def _tiles(position: Any, tokens: Any, window: Any) -> Any:
    """First tile that any of the tokens sees, and the last."""
    first_key = max(position - window + 1, 0) if window > 0 else 0
    return first_key // TILE, (position + tokens - 1) // TILE


@njit(error_model="numpy")
def _team(a: Any, team: Any) -> Any:
    """(first unit, end of units, common tiles) of a team."""
    first, end, common = carray(as_pointer(a[Attend.TEAMS] + 24 * team), 3, int64)
    return first, end, common


@njit(error_model="numpy")
def _own_tiles(a: Any, unit: Any, common: Any) -> Any:
    """First and last tile of a unit that are not common to its team."""
    _, _, tokens, position, _ = _unit(a, unit)
    first, last = _tiles(position, tokens, a[Attend.WINDOW])
    return max(first, common), last


@njit(error_model="numpy")
def _team_begins(a: Any, team: Any) -> Any:
    """What a team begins with: (unit, tile)."""
    unit, _, common = _team(a, team)
    return unit, 0 if common > 0 else _own_tiles(a, unit, 0)[0]


@njit(error_model="numpy")
def _locate(a: Any, head: Any, unit: Any, tile: Any, tables: Any, at: Any) -> None:
    """Addresses of each LANES positions of `tile` that the unit sees, from number `at` of each table on."""
    seq, _, tokens, position, _ = _unit(a, unit)
    size, width, window = a[Attend.BLOCK_SIZE], a[Attend.V_WIDTH], a[Attend.WINDOW]
    head_size, item = a[Attend.HEAD_SIZE], a[Attend.ITEM_SIZE]
    table = carray(
        as_pointer(a[Attend.TABLE] + 4 * seq * a[Attend.TABLE_WIDTH]), a[Attend.TABLE_WIDTH], int32
    )
    first, last = _low(position, window, tile), _high(position + tokens - 1, tile) - 1
    start = tile * TILE + first // LANES * LANES
    block, offset = start // size, start % size
    for vector in range(first // LANES, last // LANES + 1):
        page = table[block] * a[Attend.PAGE]
        place = head * size + offset
        tables[_KEYS, at + vector] = a[Attend.KEY] + page + item * (head * head_size * size + offset)
        tables[_VALUES, at + vector] = a[Attend.VALUE] + page + item * place * width
        tables[_KEY_SCALES, at + vector] = a[Attend.KEY_SCALE] + page + 4 * place
        tables[_VALUE_SCALES, at + vector] = a[Attend.VALUE_SCALE] + page + 4 * place
        offset += LANES
        if offset == size:
            block, offset = block + 1, 0


@njit(error_model="numpy")
def _attend_rows(
    a: Any,
    rows: Any,
    row: Any,
    position: Any,
    tile: Any,
    s: Any,
    q: Any,
    m: Any,
    t: Any,
    alpha: Any,
    acc: Any,
    addresses: Any,
    storage: Any,
) -> None:
    """`rows` query rows from number `row` of the unit, whose first token is at `position`, on one tile."""
    group, window, width, head_size = (
        a[Attend.GROUP],
        a[Attend.WINDOW],
        a[Attend.V_WIDTH],
        a[Attend.HEAD_SIZE],
    )
    keys, values, key_scales, value_scales = addresses
    first_position, last_position = position + row // group, position + (row + rows - 1) // group
    low, high = _low(first_position, window, tile), _high(last_position, tile)
    whole = _low(last_position, window, tile) == 0 and _high(first_position, tile) == TILE
    scores(
        q + 4 * row * head_size,
        keys,
        low // LANES,
        (high + LANES - 1) // LANES,
        rows,
        head_size,
        a[Attend.BLOCK_SIZE],
        s,
        storage,
    )
    cap = _floats(a[Attend.FACTORS], 2)[1]
    m, t, alpha, acc = m + 4 * row, t + 4 * LANES * row, alpha + 4 * row, acc + 4 * row * width
    if whole and cap == 0:
        for r in range(rows):
            softmax_whole(
                s + 4 * r * TILE,
                m + 4 * r,
                t + 4 * LANES * r,
                alpha + 4 * r,
                key_scales,
                value_scales,
                storage,
            )
        accumulate(s, values, 0, TILE, rows, width, alpha, acc, storage)
        return
    at, left = first_position, group - row % group
    for r in range(rows):
        softmax(
            s + 4 * r * TILE,
            _low(at, window, tile),
            _high(at, tile),
            cap,
            m + 4 * r,
            t + 4 * LANES * r,
            alpha + 4 * r,
            key_scales,
            value_scales,
            storage,
        )
        left -= 1
        if left == 0:
            at, left = at + 1, group
    at, left = first_position, group - row % group
    same_low = low == _low(last_position, window, tile)
    done = low
    for r in range(rows):
        end = _high(at, tile)
        if not same_low:
            start = _low(at, window, tile)
            accumulate(
                s + 4 * r * TILE, values, start, end, 1, width, alpha + 4 * r, acc + 4 * r * width, storage
            )
        elif end > done:
            # Keys that this row and all behind it see; these have been given those before.
            accumulate(
                s + 4 * r * TILE,
                values,
                done,
                end,
                rows - r,
                width,
                alpha + 4 * r,
                acc + 4 * r * width,
                storage,
            )
            done = end
            _floats(alpha, rows)[:] = float32(1.0)
        left -= 1
        if left == 0:
            at, left = at + 1, group


@njit(error_model="numpy")
def _attend_tiles(
    a: Any,
    head: Any,
    unit: Any,
    tokens: Any,
    position: Any,
    tiles: Any,
    then: Any,
    tables: Any,
    scratch: Any,
    storage: Any,
) -> None:
    """The `tiles` from first to last, in the blocks of `unit`, for `tokens` from `position` on.

    The first tile is located already. While a tile is used the next one is prefetched, after the last the
    one that comes `then`: (unit, tile).
    """
    group, window = a[Attend.GROUP], a[Attend.WINDOW]
    s, m, t, alpha, q, acc = scratch
    first_address = tables.ctypes.data
    row_bytes = 8 * tables.shape[1]
    addresses = (
        first_address + _KEYS * row_bytes,
        first_address + _VALUES * row_bytes,
        first_address + _KEY_SCALES * row_bytes,
        first_address + _VALUE_SCALES * row_bytes,
    )
    first_tile, last_tile = tiles
    for tile in range(first_tile, last_tile + 1):
        for kind in range(_ADDRESS_TABLES):
            for vector in range(VECTORS):
                tables[kind, vector] = tables[kind, VECTORS + vector]
        next_unit, next_tile = (unit, tile + 1) if tile < last_tile else then
        _locate(a, head, next_unit, next_tile, tables, VECTORS)
        # The tokens that see anything of this tile are neighbours: not above it, their window not past it.
        start = max(tile * TILE - position, 0)
        stop = min(tile * TILE + TILE - 1 + window - position, tokens) if window > 0 else tokens
        row, end = start * group, stop * group
        # Even shares keep the last call from having one row only.
        calls = (end - row + MAX_ROWS - 1) // MAX_ROWS
        for call in range(calls):
            rows = (end - row) // (calls - call)
            _attend_rows(a, rows, row, position, tile, s, q, m, t, alpha, acc, addresses, storage)
            row += rows


@njit(error_model="numpy")
def _start_unit(a: Any, head: Any, first_token: Any, tokens: Any, scratch: Any) -> None:
    """Scaled queries, and the state of a softmax that has seen nothing but the sink."""
    group, head_size, width = a[Attend.GROUP], a[Attend.HEAD_SIZE], a[Attend.V_WIDTH]
    _, m, t, _, q, acc = scratch
    rows = tokens * group
    factor = _floats(a[Attend.FACTORS], 2)[0]
    _floats(t, rows * LANES)[:] = float32(0.0)
    _floats(acc, rows * width)[:] = float32(0.0)
    _floats(m, rows)[:] = float32(-_INF)
    for token in range(tokens):
        for member in range(group):
            query_head, r = head * group + member, token * group + member
            offset = (first_token + token) * a[Attend.QUERY_TOKEN_STRIDE]
            offset += query_head * a[Attend.QUERY_HEAD_STRIDE]
            # Arrays of a row each: an index that may be negative would cost more than all the rest.
            source = _floats(a[Attend.QUERY] + 4 * offset, head_size)
            packed = _floats(q + 4 * r * head_size, head_size)
            for d in range(head_size):
                packed[d] = source[d] * factor
            if a[Attend.SINKS] != 0:
                sink = _floats(a[Attend.SINKS] + 4 * query_head, 1)[0]
                _floats(m + 4 * r, 1)[0] = sink * float32(LOG2_E)
                _floats(t + 4 * r * LANES, 1)[0] = float32(1.0)


@njit(error_model="numpy")
def _finish_unit(a: Any, head: Any, first_row: Any, tokens: Any, scratch: Any) -> None:
    group, v_head_size, width = a[Attend.GROUP], a[Attend.V_HEAD_SIZE], a[Attend.V_WIDTH]
    _, _, t, _, _, acc = scratch
    num_heads = a[Attend.NUM_KV_HEADS] * group
    for token in range(tokens):
        for member in range(group):
            r = token * group + member
            total, sums = _floats(t + 4 * r * LANES, LANES), _floats(acc + 4 * r * width, width)
            denominator = float32(0.0)
            for lane in range(LANES):
                denominator += total[lane]
            place = (first_row + token) * num_heads + head * group + member
            out = _floats(a[Attend.OUT] + 4 * place * v_head_size, v_head_size)
            for d in range(v_head_size):
                out[d] = sums[d] / denominator


@njit(error_model="numpy")
def _divide_scratch(a: Any, start: Any, rows: Any) -> Any:
    """Addresses inside a thread's scratch memory from `start` on: s, m, t, alpha, q, acc."""
    t = start + 4 * MAX_ROWS * TILE
    acc = t + 4 * rows * LANES
    q = acc + 4 * rows * a[Attend.V_WIDTH]
    m = q + 4 * rows * a[Attend.HEAD_SIZE]
    alpha = m + 4 * rows
    return start, m, t, alpha, q, acc


@njit(error_model="numpy")
def _from_row(a: Any, scratch: Any, row: Any) -> Any:
    """The part of a team's scratch memory that is its rows' from number `row` on."""
    s, m, t, alpha, q, acc = scratch
    floats = 4 * row
    return (
        s,
        m + floats,
        t + floats * LANES,
        alpha + floats,
        q + floats * a[Attend.HEAD_SIZE],
        acc + floats * a[Attend.V_WIDTH],
    )


@njit(error_model="numpy")
def _attend_team(a: Any, head: Any, team: Any, then: Any, tables: Any, own: Any, storage: Any) -> None:
    """All rows of a team: common tiles together, as if by one unit that sees them whole, others by unit."""
    first_unit, end_unit, common = _team(a, team)
    group, all_tokens = a[Attend.GROUP], 0
    for unit in range(first_unit, end_unit):
        all_tokens += _unit(a, unit)[2]
    scratch = _divide_scratch(a, own, all_tokens * group)
    done = 0
    for unit in range(first_unit, end_unit):
        _, first, tokens, _, _ = _unit(a, unit)
        _start_unit(a, head, first, tokens, _from_row(a, scratch, done * group))
        done += tokens
    if common > 0:
        tiles, after = (0, common - 1), (first_unit, common)
        end = common * TILE
        _attend_tiles(a, head, first_unit, all_tokens, end, tiles, after, tables, scratch, storage)
    done = 0
    for unit in range(first_unit, end_unit):
        _, _, tokens, position, out = _unit(a, unit)
        mine = _from_row(a, scratch, done * group)
        after = (unit + 1, _own_tiles(a, unit + 1, common)[0]) if unit + 1 < end_unit else then
        tiles = _own_tiles(a, unit, common)
        _attend_tiles(a, head, unit, tokens, position, tiles, after, tables, mine, storage)
        _finish_unit(a, head, out, tokens, mine)
        done += tokens


@njit(error_model="numpy")
def attend_chunk(a: Any, chunk: Any, own: Any, storage: Any) -> None:
    """Chunk number `chunk` of the plan, with a thread's `own` scratch memory."""
    tables = carray(as_pointer(own), (_ADDRESS_TABLES, 2 * VECTORS), int64)
    head, first, end = carray(as_pointer(a[Attend.CHUNKS] + 24 * chunk), 3, int64)
    unit, tile = _team_begins(a, first)
    _locate(a, head, unit, tile, tables, VECTORS)
    for team in range(first, end):
        # After the last comes nothing: any tile may be prefetched.
        then = _team_begins(a, min(team + 1, end - 1))
        _attend_team(a, head, team, then, tables, own + 8 * tables.size, storage)


def _put(source: Any, target: Any, stride: Any, scale: Any) -> None:
    """Store a vector in every `stride`-th element of `target`, and its scale, as `storage.stored` says."""


@overload(_put, jit_options={"error_model": "numpy"})
def _put_as(source: Any, target: Any, stride: Any, scale: Any) -> Any:
    if target.dtype == float32:
        return _put_float
    if target.dtype == int8:
        return _put_int8
    return _put_bits(0x7C00 if target.dtype == int16 else 0x7F80)


def _put_float(source: Any, target: Any, stride: Any, scale: Any) -> None:
    for d in range(len(source)):
        x = source[d]
        target[d * stride] = x if abs(x) < float32(_INF) else float32(_NAN)


def _put_bits(exponent: int) -> Any:
    """For 16-bit floats whose exponent has these bits."""

    def put(source: Any, target: Any, stride: Any, scale: Any) -> None:
        for d in range(len(source)):
            bits = source[d]
            target[d * stride] = _HALF_NAN if bits & exponent == exponent else bits

    return put


def _put_int8(source: Any, target: Any, stride: Any, scale: Any) -> None:
    largest = float32(0.0)
    finite = True
    for d in range(len(source)):
        largest = max(largest, abs(source[d]))
        finite &= abs(source[d]) < float32(_INF)
    step = largest / float32(127.0)
    scale[0] = step if finite else float32(_NAN)
    usable = finite and step > float32(0.0)
    for d in range(len(source)):
        # Adding 1.5 * 2**23 leaves the nearest integer, of two equally near the even one.
        x = (source[d] / step + float32(12582912.0)) - float32(12582912.0)
        target[d * stride] = int8(min(max(x, float32(-127.0)), float32(127.0))) if usable else int8(0)


@njit(error_model="numpy")
def write_row(a: Any, row: Any, slot: Any, source_type: Any, storage: Any) -> None:
    size, heads, item, page = a[Write.BLOCK_SIZE], a[Write.NUM_KV_HEADS], a[Write.ITEM_SIZE], a[Write.PAGE]
    head_size, v_head_size, width = a[Write.HEAD_SIZE], a[Write.V_HEAD_SIZE], a[Write.V_WIDTH]
    block, offset = page * (slot // size), slot % size
    for head in range(heads):
        place = head * size + offset
        key_in = a[Write.KEY_IN] + row * a[Write.KEY_TOKEN_STRIDE] + head * a[Write.KEY_HEAD_STRIDE]
        key = a[Write.KEY] + block + item * (head * head_size * size + offset)
        _put(
            carray(as_pointer(key_in), head_size, source_type),
            carray(as_pointer(key), head_size * size, storage),
            size,
            _floats(a[Write.KEY_SCALE] + block + 4 * place, 1),
        )
        value_in = a[Write.VALUE_IN] + row * a[Write.VALUE_TOKEN_STRIDE] + head * a[Write.VALUE_HEAD_STRIDE]
        value = a[Write.VALUE] + block + item * place * width
        _put(
            carray(as_pointer(value_in), v_head_size, source_type),
            carray(as_pointer(value), v_head_size, storage),
            1,
            _floats(a[Write.VALUE_SCALE] + block + 4 * place, 1),
        )


@njit(error_model="numpy")
def write_chunk(a: Any, chunk: Any, source_type: Any, storage: Any) -> None:
    """Chunk number `chunk` of the rows of a write."""
    slots = carray(as_pointer(a[Write.SLOTS]), a[Write.NUM_ROWS], int64)
    start = chunk * a[Write.ROWS_PER_CHUNK]
    for row in range(start, min(start + a[Write.ROWS_PER_CHUNK], a[Write.NUM_ROWS])):
        if slots[row] >= 0:
            write_row(a, row, slots[row], source_type, storage)


STORAGE = {torch.float32: float32, torch.int8: int8, torch.float16: int16, torch.bfloat16: uint16}
"""The types of `simd.py`, by what keys and values are stored as."""
