"""Cuts one step's attention into units of work, shared out by cost. `backend.py` calls it once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchgen_kernels.metadata import AttentionMetadata, runs_of
from batchgen_kernels.spec import AttentionSpec

TEAMS_PER_THREAD = 8
"""At least so many are left where sequences that share blocks are put together."""
CHUNKS_PER_THREAD = 32
"""Enough that threads end together, few enough that claiming one costs nothing beside it."""
_COST_OF_START = 24
"""What beginning a query row costs, in keys."""

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one layer.

    Args:
        table: the block table.
        units: [U, 5] of (sequence, first row of the step, number of rows, position of the first row, first
            row of the result).
        teams: [N, 3] of (first unit, end of units, tiles that all of them begin with): these tiles lie in the
            same blocks for all units of a team, which is given them once, as one unit of many rows.
        chunks: [C, 3] of (KV head, first team, end of teams); KV heads outermost, so that sequences which
            share blocks read them from the processor's cache.
        largest_team: query rows (tokens times group) of the largest team.
        cost: query-key pairs of all heads.
    """

    table: Int32
    units: Int64
    teams: Int64
    chunks: Int64
    largest_team: int
    cost: int


def make_plan(
    meta: AttentionMetadata,
    spec: AttentionSpec,
    threads: int,
    unit_rows: int,
    tile: int,
    needed: Int64 | None = None,
) -> Plan:
    """Plan for `threads` threads, units and teams of about `unit_rows` query rows, tiles of `tile` keys.

    Only the rows of the step that are `needed`, in ascending order, are given a result, one after the other.
    """
    starts, lens, table = _array(meta.query_start_loc), _array(meta.seq_lens), _array(meta.block_table)
    per_unit = max(1, unit_rows // spec.group_size)
    units = _units(_runs(starts, lens) if needed is None else runs_of(needed, starts, lens), per_unit)
    wanted = max(1, -(-threads * TEAMS_PER_THREAD // spec.num_kv_heads))
    most_chunks = max(1, -(-threads * CHUNKS_PER_THREAD // spec.num_kv_heads))
    if spec.sliding_window is None and len(units) > wanted:
        units = units[np.argsort(table[units[:, 0], 0], kind="stable")]
        common = _common_tiles(units, table, meta.block_size, tile)
        teams = _teams(units, common, per_unit, -(-len(units) // wanted))
    else:
        teams = _teams_of_one(len(units))
    cost = _costs(units, spec)
    members = np.add.reduceat(units[:, 2], teams[:, 0]) if len(units) else units[:, 2]
    done = np.concatenate([[0], np.cumsum(cost)])
    return Plan(
        table=table,
        units=np.ascontiguousarray(units),
        teams=teams,
        chunks=_chunks(done[teams[:, 1]] - done[teams[:, 0]], spec.num_kv_heads, most_chunks),
        largest_team=int(members.max(initial=1)) * spec.group_size,
        cost=int(cost.sum()) * spec.num_kv_heads,
    )


def _array(tensor: torch.Tensor) -> Int32:
    return np.ascontiguousarray(tensor, dtype=np.int32)


def _runs(starts: Int32, lens: Int32) -> Int64:
    """All rows of each sequence, as one unit."""
    rows = np.diff(starts)
    return np.stack([np.arange(len(rows)), starts[:-1], rows, lens - rows, starts[:-1]], axis=1).astype(
        np.int64
    )


def _units(runs: Int64, per_unit: int) -> Int64:
    """Runs cut into units of at most so many rows."""
    rows = runs[:, 2]
    count = -(-rows // per_unit)
    run = np.repeat(np.arange(len(runs)), count)
    first = (np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)) * per_unit
    units = runs[run]
    units[:, [1, 3, 4]] += first[:, None]
    units[:, 2] = np.minimum(per_unit, rows[run] - first)
    return units


def _common_tiles(units: Int64, table: Int32, block_size: int, tile: int) -> Int64:
    """[U - 1]: tiles that each unit and the next see whole, in the same blocks, and have others after."""
    seq, position = units[:, 0], units[:, 3]
    same = np.logical_and.accumulate(table[seq[1:]] == table[seq[:-1]], axis=1).sum(axis=1)
    whole = np.minimum(position[1:], position[:-1]) // tile
    common: Int64 = np.minimum(same * block_size // tile, whole).astype(np.int64)
    return common


def _teams_of_one(units: int) -> Int64:
    first = np.arange(units, dtype=np.int64)
    return np.stack([first, first + 1, np.zeros_like(first)], axis=1)


def _teams(units: Int64, common: Int64, most_tokens: int, most_units: int) -> Int64:
    """Neighbours that begin with the same tiles; one more joins only if no fewer tiles are shared in all.

    A team of n units with t common tiles saves (n - 1) * t readings of a tile.
    """
    teams: list[tuple[int, int, int]] = []
    first, tiles, tokens = 0, 0, 0
    lengths, links = units[:, 2].tolist(), common.tolist()
    for unit, length in enumerate(lengths):
        others = unit - first
        link = 0 if unit == 0 else links[unit - 1] if others == 1 else min(tiles, links[unit - 1])
        fits = 0 < others < most_units and tokens + length <= most_tokens
        if fits and link > 0 and others * link >= (others - 1) * tiles:
            tiles, tokens = link, tokens + length
            continue
        if unit > 0:
            teams.append((first, unit, tiles))
        first, tiles, tokens = unit, 0, length
    if lengths:
        teams.append((first, len(lengths), tiles))
    return np.array(teams, dtype=np.int64).reshape(-1, 3)


def _costs(units: Int64, spec: AttentionSpec) -> Int64:
    tokens, position = units[:, 2], units[:, 3]
    end = position + tokens
    keys = end if spec.sliding_window is None else np.minimum(end, spec.sliding_window + tokens)
    cost: Int64 = tokens * spec.group_size * (keys + _COST_OF_START)
    return cost


def _chunks(cost: Int64, num_kv_heads: int, per_head: int) -> Int64:
    """At least one chunk a KV head, of neighbouring teams and about equal cost."""
    done = np.concatenate([[0], np.cumsum(cost)])
    wanted = done[-1] * np.arange(1, per_head) / per_head
    inner = np.searchsorted((done[1:] + done[:-1]) / 2, wanted)
    edges = np.unique(np.concatenate([[0], inner, [len(cost)]]))
    one = np.stack([edges[:-1], edges[1:]], axis=1)
    head = np.repeat(np.arange(num_kv_heads), len(one))
    return np.ascontiguousarray(
        np.concatenate([head[:, None], np.tile(one, (num_kv_heads, 1))], axis=1), dtype=np.int64
    )
