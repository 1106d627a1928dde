"""`TritonBackend`: what the engine calls. Checks, chooses tiles and splits, launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from batchgen_kernels import backend as common
from batchgen_kernels.backend import KVCache, PagedBackend, Shapes
from batchgen_kernels.capability import CAPABILITIES
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.shared_prefix import LEAST_KEYS, SharingCost
from batchgen_kernels.spec import AttentionSpec
from batchgen_kernels.storage import LARGEST
from batchgen_kernels.triton_kernels.attend_kernel import attend_kernel, merge_kernel
from batchgen_kernels.triton_kernels.tiles import (
    INTERPRETER,
    MERGE_HEADS,
    SMALLEST_TILE,
    WRITE_ROWS,
    Chip,
    Tile,
    choose_fixed_tile,
    choose_splits,
    choose_tile,
    columns_of,
    parts,
    power_of_two,
    sharing_cost,
)
from batchgen_kernels.triton_kernels.write_kernel import write_kernel

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _SharedSums:
    """What sequences see of the keys that they have in common, and in how many splits it lies there.

    `partial` is float32 [S, num_heads, splits, v_head_size], `stats` [S, num_heads, splits, 2].
    """

    partial: torch.Tensor
    stats: torch.Tensor
    splits: int


class TritonBackend(PagedBackend):
    """See `AttentionBackend`.

    `write` and `attend` never wait for the device. So metadata is checked only where it is in the memory of
    the processor; who builds it for a GPU answers for it.

    Args:
        fixed_split: keys of a split, counted from position 0, a multiple of 64. The result of a row then
            does not depend on its batch, as its order of summation depends on its position alone. It costs
            a float32 [T, num_heads, splits, v_head_size] beside each step. None chooses for each batch.

    Raises:
        ValueError: `fixed_split` is not a positive multiple of 64.
    """

    name = "triton"

    def __init__(self, *, fixed_split: int | None = None) -> None:
        if fixed_split is not None and (fixed_split < 64 or fixed_split % 64):
            raise ValueError(f"fixed_split: {fixed_split} is not a positive multiple of 64")
        self._fixed_split = fixed_split

    @property
    def invariant(self) -> bool:
        """Whether the bits of a row do not depend on its batch."""
        return self._fixed_split is not None

    def shapes(self, spec: AttentionSpec, block_size: int) -> Shapes:
        vectors = (spec.num_kv_heads, block_size)
        return vectors, (*vectors, spec.head_size), (*vectors, spec.v_head_size)

    def sharing(self, spec: AttentionSpec, dtype: torch.dtype, kv: KVCache) -> SharingCost | None:
        """See `AttentionBackend`; None where bits must not depend on who else is in the step."""
        if self._fixed_split is not None or spec.sliding_window is not None:
            return None
        return sharing_cost(spec, dtype, kv.dtype, _chip(kv.key.device))

    def write(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        _check_metadata(kv, meta)
        heads, head_size, v_head_size = int(kv.key.shape[1]), int(kv.key.shape[3]), int(kv.value.shape[3])
        key = _rows("key", key, (meta.num_rows, heads, head_size), kv.key.device)
        value = _rows("value", value, (meta.num_rows, heads, v_head_size), kv.key.device)
        if not meta.num_rows:
            return
        key_scale_page, value_scale_page = _scale_pages(kv)
        write_kernel[(-(-meta.num_rows // WRITE_ROWS), heads)](
            key,
            value,
            bytes_of(kv.key),
            bytes_of(kv.value),
            kv.key_scale,
            kv.value_scale,
            meta.slot_mapping,
            meta.num_rows,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            kv.key.stride(0),
            kv.value.stride(0),
            key_scale_page,
            value_scale_page,
            **write_constants(head_size, v_head_size, kv),
        )

    def attend(
        self,
        query: torch.Tensor,
        kv: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        common.check_sinks(spec, sinks)
        _check_metadata(kv, meta)
        query = _rows("query", query, (meta.num_rows, spec.num_heads, spec.head_size), kv.key.device)
        out = query.new_empty(meta.num_rows, spec.num_heads, spec.v_head_size)
        if meta.num_tokens < meta.num_rows:
            out[meta.num_tokens :] = 0
        if not meta.num_tokens:
            return out
        num_seqs = int(meta.seq_lens.shape[0])
        before = self._attend_shared(query, kv, meta, spec)
        tile = self._tile(
            spec, query.dtype, kv, -(-meta.num_tokens // num_seqs), continued=before is not None
        )
        columns = columns_of(spec, tile)
        splits = self._splits(meta, tile, columns, query.device)
        partial = stats = None
        if splits is not None:
            partial, stats = _sums(query, spec, meta.num_tokens, splits)
        one_row = meta.num_tokens == num_seqs and meta.max_query_len == 1
        tiles = meta.num_tokens
        if tile.tokens > 1 and not one_row:
            tiles = meta.num_tokens // tile.tokens + num_seqs
        key_scale_page, value_scale_page = _scale_pages(kv)
        attend_kernel[(tiles, columns, splits or 1)](
            out,
            partial,
            stats,
            query,
            bytes_of(kv.key),
            bytes_of(kv.value),
            kv.key_scale,
            kv.value_scale,
            sinks,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            None,
            None,
            None,
            meta.shared.skipped if meta.shared and before else None,
            before and before.partial,
            before and before.stats,
            num_seqs,
            splits or 1,
            before.splits if before else 1,
            query.stride(0),
            query.stride(1),
            meta.block_table.stride(0),
            kv.key.stride(0),
            kv.value.stride(0),
            key_scale_page,
            value_scale_page,
            *_factors(spec),
            **attend_constants(
                spec,
                kv,
                tile,
                _chip(query.device),
                split=splits is not None,
                fixed_split=self._fixed_split,
                one_row=one_row,
                continued=before is not None,
            ),
        )
        if splits is not None:
            constants = merge_constants(spec)
            merge_kernel[(meta.num_tokens, -(-spec.num_heads // constants["BLOCK_H"]))](
                out, partial, stats, sinks, splits, **constants
            )
        return out

    def _attend_shared(
        self, query: torch.Tensor, kv: KVCache, meta: AttentionMetadata, spec: AttentionSpec
    ) -> _SharedSums | None:
        """Attend to what groups of sequences have in common; None where that is not done in this layer."""
        shared = meta.shared
        cost = None if shared is None else self.sharing(spec, query.dtype, kv)
        if shared is None or cost is None:
            return None
        num_seqs, groups = int(meta.seq_lens.shape[0]), int(shared.lens.shape[0])
        splits = cost.splits(num_seqs, int(meta.block_table.shape[1]) * meta.block_size)
        partial, stats = _sums(query, spec, num_seqs, splits)
        chip, members = _chip(query.device), int(shared.members.shape[0])
        tile = choose_fixed_tile(spec, query.dtype, kv.dtype, chip)
        tiles = members if tile.tokens == 1 else members // tile.tokens + groups
        key_scale_page, value_scale_page = _scale_pages(kv)
        attend_kernel[(tiles, columns_of(spec, tile), splits)](
            None,
            partial,
            stats,
            query,
            bytes_of(kv.key),
            bytes_of(kv.value),
            kv.key_scale,
            kv.value_scale,
            None,
            shared.starts,
            shared.lens,
            meta.block_table,
            shared.members,
            shared.count,
            meta.query_start_loc,
            None,
            None,
            None,
            0,
            splits,
            1,
            query.stride(0),
            query.stride(1),
            meta.block_table.stride(0),
            kv.key.stride(0),
            kv.value.stride(0),
            key_scale_page,
            value_scale_page,
            *_factors(spec),
            **attend_constants(spec, kv, tile, chip, split=True, shared=True),
        )
        return _SharedSums(partial, stats, splits)

    def _tile(
        self, spec: AttentionSpec, dtype: torch.dtype, kv: KVCache, rows_per_sequence: int, *, continued: bool
    ) -> Tile:
        chip = _chip(kv.key.device)
        if self._fixed_split is not None:
            return choose_fixed_tile(spec, dtype, kv.dtype, chip)
        return choose_tile(spec, dtype, kv.dtype, rows_per_sequence, chip, continued=continued)

    def _splits(self, meta: AttentionMetadata, tile: Tile, columns: int, device: torch.device) -> int | None:
        """None where every program writes its result itself."""
        longest = int(meta.block_table.shape[1]) * meta.block_size
        if self._fixed_split is not None:
            return -(-longest // self._fixed_split)
        tiles = min(meta.num_tokens, meta.num_tokens // tile.tokens + int(meta.seq_lens.shape[0]))
        splits = choose_splits(tiles * columns, tile, longest, _chip(device))
        return splits if splits > 1 else None


def attend_constants(
    spec: AttentionSpec,
    kv: KVCache,
    tile: Tile,
    chip: Chip,
    *,
    split: bool,
    fixed_split: int | None = None,
    one_row: bool = False,
    shared: bool = False,
    continued: bool = False,
) -> dict[str, Any]:
    """What `attend_kernel` is compiled for: its constants, and triton's own options.

    Whether a product and a sum are one rounding is said everywhere: what triton does when nothing is said
    changes with its version.
    """
    (k1, k2), (v1, v2) = parts(spec.head_size), parts(spec.v_head_size)
    return {
        "HEADS": spec.num_heads,
        "GROUP": spec.group_size,
        "TILE_HEADS": tile.heads,
        "TILE_TOKENS": tile.tokens,
        "HEAD_SIZE": spec.head_size,
        "K1": k1,
        "K2": k2,
        "V_HEAD_SIZE": spec.v_head_size,
        "V1": v1,
        "V2": v2,
        "BLOCK_SIZE": kv.block_size,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "WINDOW": spec.sliding_window or 0,
        "SOFTCAP": spec.softcap is not None,
        "SINKS": spec.has_sinks and not shared,
        "SCALED": kv.dtype in LARGEST,
        "FP8": (1 if chip.capability >= 89 else 2) if kv.dtype == torch.float8_e4m3fn else 0,
        "SPLIT": split,
        "FIXED_TILES": (fixed_split or 0) // tile.keys,
        "ONE_ROW": one_row,
        "SHARED": shared,
        "LEAST_KEYS": LEAST_KEYS if shared or continued else 0,
        "CONTINUED": continued,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }


def merge_constants(spec: AttentionSpec) -> dict[str, Any]:
    """The same for `merge_kernel`."""
    return {
        "HEADS": spec.num_heads,
        "V_HEAD_SIZE": spec.v_head_size,
        "BLOCK_H": min(power_of_two(spec.num_heads), MERGE_HEADS),
        "BLOCK_V": power_of_two(spec.v_head_size),
        "SINKS": spec.has_sinks,
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def write_constants(head_size: int, v_head_size: int, kv: KVCache) -> dict[str, Any]:
    """The same for `write_kernel`."""
    return {
        "HEAD_SIZE": head_size,
        "V_HEAD_SIZE": v_head_size,
        "BLOCK_K": max(power_of_two(head_size), SMALLEST_TILE),
        "BLOCK_V": max(power_of_two(v_head_size), SMALLEST_TILE),
        "BLOCK_SIZE": kv.block_size,
        "ROWS": WRITE_ROWS,
        "SCALED": kv.dtype in LARGEST,
        "FP8": kv.dtype == torch.float8_e4m3fn,
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }


def _sums(
    query: torch.Tensor, spec: AttentionSpec, rows: int, splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for sums of values, and for largest scores and weights."""
    sizes = (rows, spec.num_heads, splits)
    return (
        query.new_empty(*sizes, spec.v_head_size, dtype=torch.float32),
        query.new_empty(*sizes, 2, dtype=torch.float32),
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A part of the cache as kernels take it: fp8 by its bytes, which every chip has."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _factors(spec: AttentionSpec) -> tuple[float, float]:
    """What products are multiplied by, and the cap (0 if none), for a softmax in base 2."""
    if spec.softcap is None:
        return spec.scale * LOG2_E, 0.0
    return 2 * spec.scale / spec.softcap * LOG2_E, spec.softcap * LOG2_E


def _scale_pages(kv: KVCache) -> tuple[int, int]:
    if kv.key_scale is None or kv.value_scale is None:
        return 0, 0
    return kv.key_scale.stride(0), kv.value_scale.stride(0)


@functools.cache
def _chip(device: torch.device) -> Chip:
    if device.type == "cpu":
        return INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    major, minor = torch.cuda.get_device_capability(index)
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    processors = found["multiprocessor_count"]
    # Two transfers for each beat of the clock, which is in kHz; not every driver tells it.
    bandwidth = 2e3 * found["mem_clock_rate"] * found["mem_bus_width"] / 8 or processors * 2.5e10
    return Chip(major * 10 + minor, found["max_shared_mem"], processors, bandwidth)


def _check_metadata(kv: KVCache, meta: AttentionMetadata) -> None:
    if meta.slot_mapping.device.type == "cpu":
        meta.check(kv.num_blocks)
    if kv.block_size != meta.block_size:
        raise ValueError(f"the cache has blocks of {kv.block_size}, the step's metadata of {meta.block_size}")


def _rows(name: str, tensor: torch.Tensor, shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """`tensor` with neighbouring elements, refused unless it has the right shape."""
    known = tensor.dtype in CAPABILITIES[TritonBackend.name].dtypes
    if tuple(tensor.shape) != shape or not known or tensor.device != device:
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(
            f"the triton attention backend takes a float {name} of shape {shape} on {device}, not {got}"
        )
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
