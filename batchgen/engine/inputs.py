"""Pack one step's requests into the tensors of a single forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.transfer import Array, Transfer
from batchgen_kernels.metadata import (
    AttentionMetadata,
    NeededRows,
    PackedSequences,
    RowsApart,
    rows_apart,
)
from batchgen_kernels.shared_prefix import SharedGroup, SharingCost, choose_groups

Sharing = Sequence[SharingCost | None]
"""Of each group of layers: when keys that requests have in common are attended to once; None: never."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """What the step before samples, for a step that is decided before it is known.

    Args:
        tokens: `(R,)` int64 on the device; negative where there is none, which nobody will ask for.
        rows: row of `tokens`, by request.
    """

    tokens: torch.Tensor
    rows: Mapping[int, int]

    def fill_in(
        self,
        ids: torch.Tensor,
        scheduled: Sequence[ScheduledRequest],
        ends: npt.NDArray[np.int64],
        transfer: Transfer,
    ) -> None:
        """Put the tokens that are pending in their places, without waiting for them.

        Args:
            ids: `(T,)` int64 on the device.
            scheduled: whose.
            ends: where each ends in `ids`.
            transfer: to the device.
        """
        pending = [i for i, s in enumerate(scheduled) if s.pending]
        if pending:
            sources = [self.rows[scheduled[i].request.request_id] for i in pending]
            places, rows = transfer([ends[pending].astype(np.int64) - 1, np.array(sources, dtype=np.int64)])
            ids.index_copy_(0, places, self.tokens.index_select(0, rows).clamp_min_(0))


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step as tensors on its device; T and R are padded up to a multiple that keeps results
    batch-invariant.

    Args:
        input_ids: `(1, T)` int64, padding rows hold token 0.
        position_ids: `(1, T)` int64, padding rows hold 0.
        logits_rows: `(R,)` int64, rows whose logits are needed; padding repeats the first; empty if none.
        needed: rows whose hidden states are read, be it for logits.
        samplers: the requests that sample, in the order of `logits_rows` before padding.
        metadata: what attention needs, per group of layers.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_rows: torch.Tensor
    needed: NeededRows
    samplers: list[ScheduledRequest]
    metadata: tuple[AttentionMetadata, ...]


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def pack_step(
    output: SchedulerOutput,
    block_size: int,
    row_multiple: int,
    transfer: Transfer,
    sharing: Sharing = (),
    pending: PendingTokens | None = None,
    *,
    whole: bool = False,
) -> PackedStep:
    """Lay the scheduled tokens out one request after the other.

    Args:
        output: what the scheduler decided; not empty.
        block_size: tokens in a block.
        row_multiple: T and R are multiples of this.
        transfer: to the device of the step.
        sharing: what shared keys cost; none: they are not looked for.
        pending: tokens that are not known yet; None: all are.
        whole: whether all rows are needed, not only those that sample or are read for a task.
    """
    scheduled = output.scheduled
    counts = [s.num_tokens for s in scheduled]
    ends = np.cumsum(counts)
    padded = round_up(int(ends[-1]), row_multiple)
    ids = np.zeros(padded, dtype=np.int64)
    positions = np.zeros(padded, dtype=np.int64)
    for s, end in zip(scheduled, ends.tolist(), strict=True):
        rows = slice(end - s.num_tokens, end)
        ids[rows] = s.token_ids()
        positions[rows] = np.arange(s.start, s.start + s.num_tokens)
    sequences = _sequences(scheduled, block_size, padded, sharing)
    needed = np.arange(ends[-1]) if whole else _needed_rows(scheduled, ends)
    apart = (
        rows_apart(needed, sequences[0].query_start_loc, sequences[0].seq_lens)
        if len(needed) < ends[-1]
        else []
    )
    arrays: list[Array] = [ids, positions, _logits_rows(scheduled, ends, row_multiple), *apart]
    for packed in sequences:
        arrays += packed.arrays
    input_ids, position_ids, logits_rows, *others = transfer(arrays)
    if pending is not None:
        pending.fill_in(input_ids, scheduled, ends, transfer)
    rest = iter(others)
    there = list(islice(rest, len(apart)))
    return PackedStep(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        logits_rows=logits_rows,
        needed=NeededRows(needed, _on_device(there, apart)),
        samplers=[s for s in scheduled if s.samples],
        metadata=tuple(packed.metadata(list(islice(rest, len(packed.arrays)))) for packed in sequences),
    )


def shared_groups(
    scheduled: Sequence[ScheduledRequest],
    group: int,
    block_size: int,
    cost: SharingCost | None,
    fixed: int | None = None,
) -> list[SharedGroup]:
    """Requests of one token each that begin with the same blocks, where attending to those once takes less
    time.

    Args:
        scheduled: in the step.
        group: of layers.
        block_size: tokens in a block.
        cost: of sharing in these layers.
        fixed: as of `choose_groups`.
    """
    if cost is None or len(scheduled) < 2:
        return []
    tables = [s.block_ids[group] if s.num_tokens == 1 else [] for s in scheduled]
    lens = [s.start + 1 for s in scheduled]
    return choose_groups(tables, lens, block_size, cost, fixed)


def _sequences(
    scheduled: list[ScheduledRequest], block_size: int, num_rows: int, sharing: Sharing
) -> list[PackedSequences]:
    """One for each group of layers."""
    query_lens = [s.num_tokens for s in scheduled]
    seq_lens = [s.start + s.num_tokens for s in scheduled]
    return [
        PackedSequences.pack(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=[
                ids[: -(-seq_len // block_size)] for ids, seq_len in zip(tables, seq_lens, strict=True)
            ],
            block_size=block_size,
            num_rows=num_rows,
            groups=shared_groups(scheduled, group, block_size, sharing[group]) if sharing else (),
        )
        for group, tables in enumerate(zip(*(s.block_ids for s in scheduled), strict=True))
    ]


def _on_device(tensors: Sequence[torch.Tensor], arrays: Sequence[Array]) -> RowsApart | None:
    """What `rows_apart` has given, behind the transfer; None where that is nothing."""
    if not arrays:
        return None
    rows, sequences, starts, lens = tensors
    runs = np.diff(np.asarray(arrays[2], dtype=np.int64))
    return RowsApart(rows, sequences, starts, lens, int(runs.max(initial=0)))


def _needed_rows(scheduled: list[ScheduledRequest], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    rows: list[int] = []
    for s, end in zip(scheduled, ends.tolist(), strict=True):
        stop = s.start + s.num_tokens
        first = end - stop
        read = s.request.reads(s.start, stop)
        rows.extend(range(first + read.start, first + read.stop))
        if s.samples and stop - 1 not in read:
            rows.append(end - 1)
    return np.array(rows, dtype=np.int64)


def _logits_rows(
    scheduled: list[ScheduledRequest], ends: npt.NDArray[np.int64], row_multiple: int
) -> npt.NDArray[np.int64]:
    last = ends[[s.samples for s in scheduled]].astype(np.int64) - 1
    if not len(last):
        return last
    padding = round_up(len(last), row_multiple) - len(last)
    return np.concatenate([last, np.full(padding, last[0])])
