"""Cuts one step's attention into units of work, shared out by cost. `backend.py` calls it once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.spec import AttentionSpec

CHUNKS_PER_THREAD = 8
"""Enough that threads end together, few enough that neighbours stay on one thread and share its cache."""
_COST_OF_START = 24
"""What beginning a query row costs, in keys."""

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one layer.

    Args:
        table: the block table.
        units: [U, 4] of (sequence, first row of the step, number of rows, position of the first row).
        chunks: [C, 3] of (KV head, first unit, end of units); KV heads outermost, so that sequences which
            share blocks read them from the processor's cache.
        largest_unit: query rows (tokens times group) of the largest unit.
        cost: query-key pairs of all heads.
    """

    table: Int32
    units: Int64
    chunks: Int64
    largest_unit: int
    cost: int


def make_plan(meta: AttentionMetadata, spec: AttentionSpec, threads: int, unit_rows: int) -> Plan:
    """Plan for `threads` threads and units of about `unit_rows` query rows."""
    starts, lens = _array(meta.query_start_loc), _array(meta.seq_lens)
    per_unit = max(1, unit_rows // spec.group_size)
    units = _units(starts, lens, per_unit)
    cost = _costs(units, spec)
    chunks = _chunks(cost, spec.num_kv_heads, threads * CHUNKS_PER_THREAD)
    return Plan(
        table=_array(meta.block_table),
        units=units,
        chunks=chunks,
        largest_unit=int(units[:, 2].max(initial=1)) * spec.group_size,
        cost=int(cost.sum()) * spec.num_kv_heads,
    )


def _array(tensor: torch.Tensor) -> Int32:
    return np.ascontiguousarray(tensor, dtype=np.int32)


def _units(starts: Int32, lens: Int32, per_unit: int) -> Int64:
    rows = np.diff(starts).astype(np.int64)
    count = -(-rows // per_unit)
    seq = np.repeat(np.arange(len(rows)), count)
    within = np.arange(len(seq)) - np.repeat(np.cumsum(count) - count, count)
    first = within * per_unit
    tokens = np.minimum(per_unit, rows[seq] - first)
    position = lens[seq] - rows[seq] + first
    return np.stack([seq, starts[seq] + first, tokens, position], axis=1).astype(np.int64)


def _costs(units: Int64, spec: AttentionSpec) -> Int64:
    _, _, tokens, position = units.T
    end = position + tokens
    keys = end if spec.sliding_window is None else np.minimum(end, spec.sliding_window + tokens)
    cost: Int64 = tokens * spec.group_size * (keys + _COST_OF_START)
    return cost


def _chunks(cost: Int64, num_kv_heads: int, wanted: int) -> Int64:
    """At least one chunk a KV head, of neighbouring units and about equal cost."""
    per_head = max(1, -(-wanted // num_kv_heads))
    done = np.cumsum(cost)
    total = done[-1] if len(done) else 0
    inner = np.searchsorted(done, total * np.arange(1, per_head) / per_head)
    edges = np.unique(np.concatenate([[0], inner, [len(cost)]]))
    one = np.stack([edges[:-1], edges[1:]], axis=1)
    head = np.repeat(np.arange(num_kv_heads), len(one))
    return np.ascontiguousarray(
        np.concatenate([head[:, None], np.tile(one, (num_kv_heads, 1))], axis=1), dtype=np.int64
    )
