"""Paged attention on the processor, computed in float32; the engine's default there.

A row's output has the same bits whatever shares the step, however the prompt was cut into steps, on any
number of threads: each row sums over its keys by position from 0, in tiles that start at multiples of
`TILE`, with roundings that `simd.py` spells out. This holds whatever keys and values are stored as.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from batchgen_kernels import backend as common
from batchgen_kernels.backend import KVCache, PagedBackend, Shapes
from batchgen_kernels.capability import CAPABILITIES
from batchgen_kernels.cpu import kernel
from batchgen_kernels.cpu.kernel import AttendArgument, WriteArgument
from batchgen_kernels.cpu.plan import Int64, Plan, make_plan
from batchgen_kernels.cpu.program import Code, Program, compiled
from batchgen_kernels.cpu.simd import LANES, TILE
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.spec import AttentionSpec

_SERIAL_COST = 2048
"""Query-key pairs below which handing work to other threads costs more than it saves."""
_SERIAL_FLOATS = 1 << 17
"""The same for the keys of a write."""
_ROWS_PER_WRITE = 16


@dataclass(slots=True)
class _LayerPlan:
    """The plan of all layers of one spec, and the part of the kernel's argument that they share."""

    plan: Plan
    factors: npt.NDArray[np.float32]
    template: AttendArgument
    scratch_floats: int


@dataclass(slots=True)
class _Step:
    """What is worked out once for a step."""

    slots: Int64
    num_blocks: int
    layer_plans: dict[tuple[AttentionSpec, int, bytes | None], _LayerPlan] = field(default_factory=dict)


class CpuBackend(PagedBackend):
    """See `AttentionBackend`. Runs on as many threads as torch does; one caller at a time."""

    name = "cpu"

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[AttentionMetadata, _Step] = WeakKeyDictionary()
        self._scratch = np.empty(0, dtype=np.float32)

    def shapes(self, spec: AttentionSpec, block_size: int) -> Shapes:
        vectors = (spec.num_kv_heads, block_size)
        return vectors, (spec.num_kv_heads, spec.head_size, block_size), (*vectors, _padded(spec.v_head_size))

    def view(
        self, spec: AttentionSpec, pages: torch.Tensor, block_size: int, kv_dtype: torch.dtype
    ) -> KVCache:
        cache = super().view(spec, pages, block_size, kv_dtype)
        # Compiling takes seconds the first time: while the engine is loaded, not in its first step.
        compiled(kv_dtype)
        return cache

    def write(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        step = self._step(kv, meta)
        rows, heads, head_size = meta.num_rows, int(kv.key.shape[1]), int(kv.key.shape[2])
        width = int(kv.value.shape[3])
        given = torch.float32 if kv.dtype == torch.int8 else kv.dtype
        key = _rows("key", key, (rows, heads, head_size), given)
        value = _rows("value", value, (rows, heads, None), given)
        if _padded(int(value.shape[2])) != width:
            raise ValueError(f"values of width {value.shape[2]} do not fit a cache of padded width {width}")
        chunks = -(-rows // _ROWS_PER_WRITE)
        argument = WriteArgument(
            rows_per_chunk=_ROWS_PER_WRITE,
            num_rows=rows,
            slots=step.slots.ctypes.data,
            block_size=kv.block_size,
            num_kv_heads=heads,
            head_size=head_size,
            v_head_size=value.shape[2],
            v_width=width,
            key_in=key.data_ptr(),
            key_token_stride=key.stride(0) * given.itemsize,
            key_head_stride=key.stride(1) * given.itemsize,
            value_in=value.data_ptr(),
            value_token_stride=value.stride(0) * given.itemsize,
            value_head_stride=value.stride(1) * given.itemsize,
        )
        point_to(argument, kv)
        threads = torch.get_num_threads() if key.numel() > _SERIAL_FLOATS else 1
        Program.of_one(Code.WRITE, chunks, argument, kv.dtype).run(threads)

    def attend(
        self,
        query: torch.Tensor,
        kv: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        common.check_sinks(spec, sinks)
        dtype = query.dtype
        query = _rows("query", query, (meta.num_rows, spec.num_heads, spec.head_size), torch.float32)
        argument, plan = self.argument(kv, meta, spec)
        out = torch.empty(meta.num_rows, spec.num_heads, spec.v_head_size)
        if meta.num_tokens < meta.num_rows:
            out[meta.num_tokens :] = 0
        sinks = None if sinks is None else sinks.float().contiguous()
        argument.query = query.data_ptr()
        argument.query_token_stride, argument.query_head_stride, _ = query.stride()
        point_to(argument, kv)
        argument.sinks = 0 if sinks is None else sinks.data_ptr()
        argument.out = out.data_ptr()
        argument.scratch = self.scratch
        threads = torch.get_num_threads() if plan.cost > _SERIAL_COST else 1
        Program.of_one(Code.ATTEND, len(plan.chunks), argument, kv.dtype).run(threads)
        return out.to(dtype)

    def argument(
        self, kv: KVCache, meta: AttentionMetadata, spec: AttentionSpec, needed: Int64 | None = None
    ) -> tuple[AttendArgument, Plan]:
        """What a layer attends to in this step, without queries, cache, scratch and result; and its plan.

        The result has a row for each that is `needed`, in ascending order, or for each of the step.
        """
        threads = torch.get_num_threads()
        layer = self._layer_plan(self._step(kv, meta), meta, spec, threads, needed)
        if self._scratch.size < threads * layer.scratch_floats:
            self._scratch = np.empty(threads * layer.scratch_floats, dtype=np.float32)
        argument = AttendArgument.from_buffer_copy(layer.template)
        return argument, layer.plan

    @property
    def scratch(self) -> int:
        """Address of what threads work in, enough for every argument until now."""
        return self._scratch.ctypes.data

    def slots(self, kv: KVCache, meta: AttentionMetadata) -> int:
        """Address of the int64 slot of each row of the step, checked against the cache."""
        return self._step(kv, meta).slots.ctypes.data

    def _step(self, kv: KVCache, meta: AttentionMetadata) -> _Step:
        step = self._steps.get(meta)
        if step is None or kv.num_blocks < step.num_blocks:
            meta.check(kv.num_blocks)
            step = _Step(np.ascontiguousarray(meta.slot_mapping, dtype=np.int64), kv.num_blocks)
            self._steps[meta] = step
        if kv.block_size != meta.block_size:
            raise ValueError(
                f"the cache has blocks of {kv.block_size}, the step's metadata of {meta.block_size}"
            )
        return step

    def _layer_plan(
        self,
        step: _Step,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        threads: int,
        needed: Int64 | None,
    ) -> _LayerPlan:
        key = spec, threads, None if needed is None else needed.tobytes()
        layer = step.layer_plans.get(key)
        if layer is None:
            plan = make_plan(meta, spec, threads, kernel.UNIT_ROWS, TILE, needed)
            layer = step.layer_plans[key] = _make_layer_plan(plan, spec, meta.block_size)
        return layer


def _padded(v_head_size: int) -> int:
    return -(-v_head_size // LANES) * LANES


def point_to(argument: AttendArgument | WriteArgument, kv: KVCache) -> None:
    """Tell the kernel where the cache lies."""
    argument.key, argument.value = kv.key.data_ptr(), kv.value.data_ptr()
    argument.page = kv.key.stride(0) * kv.dtype.itemsize
    argument.item_size = kv.dtype.itemsize
    if kv.key_scale is not None and kv.value_scale is not None:
        argument.key_scale, argument.value_scale = kv.key_scale.data_ptr(), kv.value_scale.data_ptr()


def _make_layer_plan(plan: Plan, spec: AttentionSpec, block_size: int) -> _LayerPlan:
    factors = np.array(_factors(spec), dtype=np.float32)
    width = _padded(spec.v_head_size)
    scratch = kernel.scratch_floats(plan.largest_team, spec.head_size, width)
    template = AttendArgument(
        chunks=plan.chunks.ctypes.data,
        units=plan.units.ctypes.data,
        teams=plan.teams.ctypes.data,
        table=plan.table.ctypes.data,
        table_width=plan.table.shape[1],
        block_size=block_size,
        window=spec.sliding_window or 0,
        num_kv_heads=spec.num_kv_heads,
        group=spec.group_size,
        head_size=spec.head_size,
        v_head_size=spec.v_head_size,
        v_width=width,
        factors=factors.ctypes.data,
        scratch_stride=scratch,
    )
    return _LayerPlan(plan, factors, template, scratch)


def _factors(spec: AttentionSpec) -> tuple[float, float]:
    """What queries are multiplied by, and the cap (0 if none), for a softmax in base 2."""
    if spec.softcap is None:
        return spec.scale * kernel.LOG2_E, 0.0
    return spec.scale / spec.softcap, spec.softcap * kernel.LOG2_E


def _rows(
    name: str, tensor: torch.Tensor, shape: tuple[int, int, int | None], wanted: torch.dtype
) -> torch.Tensor:
    """`tensor` in the dtype and layout that the kernel reads, refused unless it has the right shape."""
    fits = tensor.dim() == 3 and all(b is None or a == b for a, b in zip(tensor.shape, shape, strict=True))
    known = tensor.dtype in CAPABILITIES[CpuBackend.name].dtypes
    if not fits or not known or tensor.device.type != "cpu":
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(f"the cpu attention backend takes a float {name} of shape {shape}, not {got}")
    tensor = tensor.to(wanted)
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
