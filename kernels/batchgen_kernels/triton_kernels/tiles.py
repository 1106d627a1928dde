"""How large the tiles of a launch are, and into how many parts keys are split: data, formulas, no triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchgen_kernels.shared_prefix import SharingCost
from batchgen_kernels.spec import AttentionSpec
from batchgen_kernels.storage import LARGEST


@dataclass(frozen=True, slots=True)
class Chip:
    """What tiles depend on.

    Args:
        capability: compute capability, 90 for 9.0.
        shared_memory: bytes that one program may have.
        processors: how many there are.
        bandwidth: bytes a second of its memory.
    """

    capability: int
    shared_memory: int
    processors: int
    bandwidth: float


A100 = Chip(80, 163 * 1024, 108, 2.0e12)
H100 = Chip(90, 227 * 1024, 132, 3.35e12)
B200 = Chip(100, 227 * 1024, 148, 8.0e12)
INTERPRETER = Chip(90, 227 * 1024, 1, 1e8)
"""Works on one program at a time, so that splits would not be any use, and slowly."""
SMALLEST_TILE = 16
"""Rows and columns that a tensor core takes at least."""
WRITE_ROWS = 16
"""Rows of a program that writes to the cache."""
MERGE_HEADS = 8
"""Most heads of a program that adds up splits."""


@dataclass(frozen=True, slots=True)
class TileLimits:
    """The production setting of one width of heads and one size of elements.

    Args:
        rows: most query rows (tokens x heads of a group) of a tile.
        keys: in a step of the loop.
        many_keys: the same for the largest tiles of 9.0, where nothing is widened: they have a processor
            alone, so that what is done once a step is better done for more of them.
        stages: of the loop's pipeline, for tiles of 32 rows or less, and for larger ones; fewer where
            shared memory does not hold them. Looking up blocks takes every second one, so that five keep
            two key tiles on their way: small tiles wait for memory alone.
        warp_floats: sums that a warp holds in registers at most.
    """

    rows: int
    keys: int
    stages: tuple[int, int]
    warp_floats: int = 2048
    many_keys: int | None = None


# By (bytes of an element that is computed with, the wider of keys and values up to this).
# Float32 is there to be compared with: its products do not run on tensor cores.
TILE_LIMITS: dict[tuple[int, int], TileLimits] = {
    (2, 64): TileLimits(rows=128, keys=64, stages=(5, 4)),
    (2, 128): TileLimits(rows=128, keys=64, stages=(5, 3), many_keys=128),
    (2, 256): TileLimits(rows=64, keys=64, stages=(5, 2)),
    (4, 64): TileLimits(rows=32, keys=32, stages=(2, 2), warp_floats=512),
    (4, 128): TileLimits(rows=16, keys=32, stages=(2, 2), warp_floats=256),
    (4, 256): TileLimits(rows=16, keys=32, stages=(1, 1), warp_floats=512),
}
FEWEST_WARPS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of `attend_kernel` works on.

    Args:
        rows: of the tile, `tokens` x `heads` of them used.
        tokens: of one sequence.
        heads: of one KV head's group.
        keys: in a step of the loop.
        warps: of a program.
        stages: of the loop's pipeline.
    """

    rows: int
    tokens: int
    heads: int
    keys: int
    warps: int
    stages: int


def choose_tile(
    spec: AttentionSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    rows_per_sequence: int,
    chip: Chip,
    *,
    continued: bool = False,
) -> Tile:
    """The tile of a step.

    As many rows as the mean sequence fills, so that steps that mostly decode do not multiply padding, and no
    more than the registers hold; half as many before 9.0, where operands pass through them.

    Args:
        spec: the layer.
        dtype: of queries.
        kv_dtype: of the cache.
        rows_per_sequence: tokens of a sequence, rounded up.
        chip: where it runs.
        continued: whether sums of shared keys are added.
    """
    halves = 1 if chip.capability >= 90 or dtype.itemsize > 2 else 2
    limits = _limits(spec, dtype)
    wanted = power_of_two(rows_per_sequence * spec.group_size)
    rows = min(max(wanted, SMALLEST_TILE), limits.rows // halves)
    heads = min(spec.group_size, rows)
    stages, keys = limits.stages[rows > 32], limits.keys
    if limits.many_keys and rows == limits.rows and chip.capability == 90 and kv_dtype == dtype:
        keys = limits.many_keys
    while stages > 1 and shared_bytes(spec, dtype, kv_dtype, rows, keys, stages) > chip.shared_memory:
        stages -= 1
    # Tiles of two parts, and wide ones of bytes, which are widened in registers, take more of them; as do
    # wide ones to whose sums others are added.
    wide = max(spec.head_size, spec.v_head_size) > 128 and (kv_dtype.itemsize == 1 or continued)
    many = (wide and rows <= 32) or (parts(spec.head_size)[1] and rows == 32)
    fewest = 2 * FEWEST_WARPS if many else FEWEST_WARPS
    warps = max(rows * sum(parts(spec.v_head_size)) * halves // limits.warp_floats, fewest)
    return Tile(rows, rows // heads, heads, keys, power_of_two(warps), stages)


def sharing_cost(spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype, chip: Chip) -> SharingCost:
    """Of keys that sequences have in common, in tiles of `choose_fixed_tile`."""
    tile = choose_fixed_tile(spec, dtype, kv_dtype, chip)
    scales = 8 if kv_dtype in LARGEST else 0
    widths = (spec.head_size + spec.v_head_size) * kv_dtype.itemsize
    return SharingCost(
        tile=tile.tokens,
        key_bytes=spec.num_kv_heads * (widths + scales),
        sum_bytes=8 * spec.num_heads * spec.v_head_size,
        columns=columns_of(spec, tile),
        processors=chip.processors,
        bandwidth=chip.bandwidth,
    )


def columns_of(spec: AttentionSpec, tile: Tile) -> int:
    """Programs of a tile's rows: KV heads, times chunks of their query heads."""
    return spec.num_kv_heads * -(-spec.group_size // tile.heads)


def choose_fixed_tile(spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype, chip: Chip) -> Tile:
    """The tile that does not depend on the step: 64 rows, whose keys take longer to come than to multiply."""
    return choose_tile(spec, dtype, kv_dtype, -(-64 // spec.group_size), chip)


def shared_bytes(
    spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype, rows: int, keys: int, stages: int
) -> int:
    """Most bytes of shared memory that a program of `attend_kernel` takes.

    Tiles of keys and of values on their way, as they are stored, with their scales and blocks; beside them
    queries and probabilities, one tile of each as it is multiplied if it is stored in another dtype, and
    two floats a row for sums across warps.
    """
    widths = sum(parts(spec.head_size)) + sum(parts(spec.v_head_size))
    buffers = max((stages + 1) // 2, 2) if stages > 1 else 1
    staged = buffers * keys * (widths * kv_dtype.itemsize + 3 * 4)
    turned = rows * (sum(parts(spec.head_size)) + keys) * dtype.itemsize + rows * 2 * 4
    return staged + turned + (keys * widths * dtype.itemsize if kv_dtype != dtype else 0)


def choose_splits(programs: int, tile: Tile, longest: int, chip: Chip) -> int:
    """Into how many parts each tile's keys are divided, chosen for a batch.

    Two programs fit on a processor at a time. Where fewer than that are to run, n parts of each take 1/n of
    the time as long as n * programs fit: n = 2 * processors // programs. A part costs a float32 sum of
    `tile.rows` x V that is written and read again, 8 * rows * V bytes, while it reads keys * (K + V) * 2
    bytes in 16 bits; with K = V the first is a sixteenth of the second at keys = 32 * rows, below which
    splitting further would not pay.

    Args:
        programs: tiles x KV heads x chunks of heads that have rows.
        tile: of the step.
        longest: keys of the longest sequence, or more.
        chip: where it runs.
    """
    room = 2 * chip.processors // max(programs, 1)
    worth = longest // (32 * tile.rows)
    return max(1, min(room, worth))


def parts(width: int) -> tuple[int, int]:
    """Two powers of two (the second may be 0) that a vector of `width` is cut into: 192 = 128 + 64.

    Sizes of tiles are powers of two; one that holds all of 80, 96 or 192 would be padded by up to a half.
    """
    first = power_of_two(width + 1) // 2
    if first < SMALLEST_TILE:
        return SMALLEST_TILE, 0
    rest = width - first
    # Four warps share 32 columns of values, and would all compute the same 16.
    fewest = 2 * SMALLEST_TILE if first > 2 * SMALLEST_TILE else SMALLEST_TILE
    second = 0 if rest == 0 else max(power_of_two(rest), fewest)
    return (2 * first, 0) if second == first else (first, second)


def power_of_two(n: int) -> int:
    """The smallest that is `n` or more."""
    return 1 << max(n - 1, 0).bit_length()


def _limits(spec: AttentionSpec, dtype: torch.dtype) -> TileLimits:
    widest = max(spec.head_size, spec.v_head_size)
    return next(
        limits for (size, width), limits in TILE_LIMITS.items() if size == dtype.itemsize and widest <= width
    )
