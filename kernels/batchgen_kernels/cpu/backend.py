"""Paged attention in float32 on the processor; the engine's default there.

A row's output has the same bits whatever shares the step, however the prompt was cut into steps, on any
number of threads: each row sums over its keys by position from 0, in tiles that start at multiples of
`TILE`, with roundings that `simd.py` spells out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from weakref import WeakKeyDictionary

import numpy as np
import torch

from batchgen_kernels import backend as common
from batchgen_kernels.backend import KVCache
from batchgen_kernels.capability import CAPABILITIES
from batchgen_kernels.cpu import kernel
from batchgen_kernels.cpu.kernel import Attend, Write
from batchgen_kernels.cpu.plan import Int64, Plan, make_plan
from batchgen_kernels.cpu.simd import LANES
from batchgen_kernels.cpu.threads import run_on_caller, team
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.spec import AttentionSpec

_SERIAL_COST = 8192
"""Query-key pairs below which waking the team costs more than it saves."""
_ROWS_PER_WRITE = 16


@dataclass(slots=True)
class _Step:
    """What is worked out once for a step and used by all its layers."""

    slots: Int64
    num_blocks: int
    plans: dict[tuple[AttentionSpec, int], Plan] = field(default_factory=dict)


class CpuBackend:
    """See `AttentionBackend`. Runs on as many threads as torch does; one caller at a time."""

    name = "cpu"

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[AttentionMetadata, _Step] = WeakKeyDictionary()
        self._scratch = np.empty(0, dtype=np.float32)

    def supports(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> str | None:
        return CAPABILITIES[self.name].refusal(spec, device, dtype)

    def bytes_per_block(self, spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> int:
        width = _padded(spec.v_head_size)
        return block_size * spec.num_kv_heads * (spec.head_size + width) * dtype.itemsize

    def allocate(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        refusal = self.supports(spec, device, dtype)
        if refusal is None and (block_size < LANES or block_size % LANES):
            refusal = f"the cpu attention backend takes block sizes that are multiples of {LANES}, not {block_size}"
        if refusal is not None:
            raise ValueError(refusal)
        heads, width = spec.num_kv_heads, _padded(spec.v_head_size)
        key = torch.zeros(num_blocks, heads, spec.head_size, block_size, dtype=dtype)
        value = torch.zeros(num_blocks, heads, block_size, width, dtype=dtype)
        return KVCache(key, value, block_size)

    def write(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        step = self._step(kv, meta)
        rows, heads, head_size = meta.num_rows, int(kv.key.shape[1]), int(kv.key.shape[2])
        key, value = _rows("key", key, (rows, heads, head_size)), _rows("value", value, (rows, heads, None))
        chunks = -(-rows // _ROWS_PER_WRITE)
        counters = np.zeros(2, dtype=np.int64)
        argument = _pack(
            Write,
            {
                Write.COUNTERS: counters.ctypes.data,
                Write.NUM_CHUNKS: chunks,
                Write.ROWS_PER_CHUNK: _ROWS_PER_WRITE,
                Write.NUM_ROWS: rows,
                Write.SLOTS: step.slots.ctypes.data,
                Write.BLOCK_SIZE: kv.block_size,
                Write.NUM_KV_HEADS: heads,
                Write.HEAD_SIZE: head_size,
                Write.V_HEAD_SIZE: value.shape[2],
                Write.V_WIDTH: kv.value.shape[3],
                Write.KEY_IN: key.data_ptr(),
                Write.KEY_TOKEN_STRIDE: key.stride(0),
                Write.KEY_HEAD_STRIDE: key.stride(1),
                Write.VALUE_IN: value.data_ptr(),
                Write.VALUE_TOKEN_STRIDE: value.stride(0),
                Write.VALUE_HEAD_STRIDE: value.stride(1),
                Write.KEY: kv.key.data_ptr(),
                Write.VALUE: kv.value.data_ptr(),
            },
        )
        _run(kernel.write.address, argument, min(chunks, torch.get_num_threads()))

    def attend(
        self,
        query: torch.Tensor,
        kv: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        common.check_sinks(spec, sinks)
        query = _rows("query", query, (meta.num_rows, spec.num_heads, spec.head_size))
        threads = torch.get_num_threads()
        plan = self._plan(kv, meta, spec, threads)
        stride = kernel.scratch_floats(plan.largest_unit, spec.head_size, _padded(spec.v_head_size))
        if self._scratch.size < threads * stride:
            self._scratch = np.empty(threads * stride, dtype=np.float32)
        out = torch.empty(meta.num_rows, spec.num_heads, spec.v_head_size)
        out[meta.num_tokens :] = 0
        sinks = None if sinks is None else sinks.float().contiguous()
        factors = np.array(_factors(spec), dtype=np.float32)
        counters = np.zeros(2, dtype=np.int64)
        argument = _pack(
            Attend,
            {
                Attend.COUNTERS: counters.ctypes.data,
                Attend.NUM_CHUNKS: len(plan.chunks),
                Attend.CHUNKS: plan.chunks.ctypes.data,
                Attend.UNITS: plan.units.ctypes.data,
                Attend.STARTS: plan.starts.ctypes.data,
                Attend.LENS: plan.lens.ctypes.data,
                Attend.TABLE: plan.table.ctypes.data,
                Attend.TABLE_WIDTH: plan.table.shape[1],
                Attend.BLOCK_SIZE: kv.block_size,
                Attend.WINDOW: spec.sliding_window or 0,
                Attend.NUM_KV_HEADS: spec.num_kv_heads,
                Attend.GROUP: spec.group_size,
                Attend.HEAD_SIZE: spec.head_size,
                Attend.V_HEAD_SIZE: spec.v_head_size,
                Attend.V_WIDTH: kv.value.shape[3],
                Attend.QUERY: query.data_ptr(),
                Attend.QUERY_TOKEN_STRIDE: query.stride(0),
                Attend.QUERY_HEAD_STRIDE: query.stride(1),
                Attend.KEY: kv.key.data_ptr(),
                Attend.VALUE: kv.value.data_ptr(),
                Attend.FACTORS: factors.ctypes.data,
                Attend.SINKS: 0 if sinks is None else sinks.data_ptr(),
                Attend.OUT: out.data_ptr(),
                Attend.SCRATCH: self._scratch.ctypes.data,
                Attend.SCRATCH_STRIDE: stride,
            },
        )
        _run(kernel.attend.address, argument, threads if plan.cost > _SERIAL_COST else 1)
        return out

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        common.copy_blocks(kv, src, dst)

    def _step(self, kv: KVCache, meta: AttentionMetadata) -> _Step:
        step = self._steps.get(meta)
        if step is None or kv.num_blocks < step.num_blocks:
            meta.check(kv.num_blocks)
            step = _Step(np.ascontiguousarray(meta.slot_mapping, dtype=np.int64), kv.num_blocks)
            self._steps[meta] = step
        if kv.block_size != meta.block_size:
            raise ValueError(f"the cache has blocks of {kv.block_size}, the step's metadata of {meta.block_size}")
        return step

    def _plan(self, kv: KVCache, meta: AttentionMetadata, spec: AttentionSpec, threads: int) -> Plan:
        plans = self._step(kv, meta).plans
        if (spec, threads) not in plans:
            plans[spec, threads] = make_plan(meta, spec, threads, kernel.UNIT_ROWS)
        return plans[spec, threads]


def _padded(v_head_size: int) -> int:
    return -(-v_head_size // LANES) * LANES


def _factors(spec: AttentionSpec) -> tuple[float, float]:
    """What queries are multiplied by, and the cap (0 if none), for a softmax in base 2."""
    if spec.softcap is None:
        return spec.scale * kernel.LOG2_E, 0.0
    return spec.scale / spec.softcap, spec.softcap * kernel.LOG2_E


def _rows(name: str, tensor: torch.Tensor, shape: tuple[int, int, int | None]) -> torch.Tensor:
    fits = tensor.dim() == 3 and all(b is None or a == b for a, b in zip(tensor.shape, shape, strict=True))
    if not fits or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(f"the cpu attention backend takes a float32 {name} of shape {shape}, not {got}")
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _pack(names: type[IntEnum], fields: dict[IntEnum, int]) -> Int64:
    return np.array([fields[name] for name in names], dtype=np.int64)


def _run(function: int, argument: Int64, threads: int) -> None:
    run = team() if threads > 1 else run_on_caller
    run(function, argument.ctypes.data, threads)
