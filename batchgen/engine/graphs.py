"""Steps that only decode, captured once and launched as a whole: a GPU then does not wait for the host.

A step of a few rows is a hundred short kernels, and launching them one by one takes the host longer than the
GPU computes. What was captured has fixed shapes and addresses. So there is a capture for each of some numbers
of rows (`bucket_sizes`), a step takes the least that holds it, and rows that are too many are sequences of
one token that read the null block and write nowhere. Block tables have the width of the longest sequence,
and what stands behind a sequence's blocks is what an earlier step has left: nobody reads it.

Where rows may begin with the same blocks, some numbers of rows are captured once more, with attention that
reads such blocks once. As many groups of them as there may be are launched then, and those that a step does
not have end at once; a step in which sharing saves no time is one of the others.

Captured from the largest on, all in one pool of memory, as they never run together. Logits of all go to the
same place, where the next step finds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.capture import Capture, Launch
from batchgen.engine.device import DeviceMemory
from batchgen.engine.inputs import PackedStep, PendingTokens, Sharing, round_up, shared_groups
from batchgen.engine.transfer import Array, Transfer, size
from batchgen_kernels.metadata import AttentionMetadata, NeededRows, SharedPrefixes, write_tables
from batchgen_kernels.shared_prefix import Groups, SharedGroup, pack_groups

_OF_DRIVER = 32 << 20
"""Most bytes that a driver takes for a captured step of a thousand kernels."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What all captured steps have in common.

    Args:
        sizes: numbers of rows, the largest first.
        shared: those of them for steps that attend to shared keys once.
        groups: of layers, with block tables of their own.
        blocks: that the longest sequence has in each for which a captured step is taken.
        block_size: positions in a block.
        sharing: what shared keys cost in each group.
    """

    sizes: Sequence[int]
    shared: Sequence[int]
    groups: int
    blocks: int
    block_size: int
    sharing: Sharing


def bucket_sizes(most: int, multiple: int = 1) -> list[int]:
    """Numbers of rows for which steps are captured, the largest first.

    Steps are at most an eighth longer than their rows need, which costs nothing: up to a few hundred rows
    reading the weights takes longer than multiplying with them.

    Args:
        most: that there may be.
        multiple: all are multiples of it, and the largest may be above `most` for that.
    """
    usual = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return sorted({round_up(min(n, most), multiple) for n in (*usual, most)}, reverse=True)


def shared_sizes(sizes: Sequence[int], sharing: Sharing, longest: int) -> list[int]:
    """Those of `sizes` in which steps with shared keys are captured, the largest first.

    Each is at least a quarter less than the one before: rows that are too many cost less than what is saved,
    and each captured step keeps memory. None where even rows that are all the same would save no time.

    Args:
        sizes: the largest first.
        sharing: what shared keys cost in each group of layers.
        longest: tokens of the longest sequence.
    """
    chosen: list[int] = []
    for rows in sizes:
        same = [SharedGroup(range(rows), longest)]
        pays = rows > 1 and any(cost.seconds_saved(same, rows) > 0 for cost in sharing if cost)
        if pays and (not chosen or 4 * rows <= 3 * chosen[-1]):
            chosen.append(rows)
    return chosen


def graph_bytes(
    memory: DeviceMemory,
    capture: Callable[[Sequence[int]], None],
    sizes: Sequence[int],
    more: int = 0,
) -> int:
    """What steps of all `sizes` keep once they are captured.

    The largest is captured alone, and then with the next: each further one takes the difference, as they
    share what they work in. What is gone from the device beside what this process knows of is the driver's,
    up to a limit; more is somebody else's, who has begun to use the GPU.

    Args:
        memory: of the device.
        capture: captures steps of these sizes, and forgets those that were before.
        sizes: the largest first.
        more: steps that are captured beside these and the first two.
    """

    def kept(some: Sequence[int]) -> int:
        capture([])
        free, held = memory.free(), memory.held()
        capture(some)
        taken, ours = free - memory.free(), memory.held() - held
        return ours + min(max(0, taken - ours), _OF_DRIVER * len(some))

    # What libraries take once for all is not of a graph.
    capture(sizes[:1])
    alone = kept(sizes[:1])
    further = kept(sizes[:2]) - alone if len(sizes) > 1 else 0
    capture([])
    return max(0, alone) + max(0, further) * (len(sizes) - 1 + more)


class StepGraphs:
    """Captured steps of one runner; one caller at a time.

    Args:
        compute: from a step to `(R, vocab)` logits of its `logits_rows`, without waiting for the device.
        shape: of the steps.
        transfer: to the device.
        capture: records them.
    """

    def __init__(
        self,
        compute: Callable[[PackedStep], torch.Tensor],
        shape: GraphShape,
        transfer: Transfer,
        capture: Capture,
    ) -> None:
        self._compute = compute
        self._shape = shape
        self._transfer = transfer
        sizes = shape.sizes
        self._largest = sizes[0]
        tables, none = [np.zeros((1, 1), np.int32)] * shape.groups, [()] * shape.groups
        whole = size(self._arrays([], sizes[0], tables, none))
        self._inputs = torch.empty(whole, dtype=torch.uint8, device=transfer.place)
        self._tables = [self._whole(sizes[0], shape.blocks) for _ in range(shape.groups)]
        # What a captured step reads lies in memory that is kept: it has addresses, and holds nothing.
        self._starts = torch.arange(sizes[0] + 1, dtype=torch.int32, device=transfer.place)
        self._every = torch.arange(sizes[0], device=transfer.place)
        self._logits = self._allocate_logits(sizes[0])
        self._launches = {rows: capture(self._launch(rows)) for rows in sizes}
        self._shared_launches = {rows: capture(self._launch(rows, shared=True)) for rows in shape.shared}

    def takes(self, output: SchedulerOutput) -> bool:
        """Whether a step only decodes, and is small enough: a row for each request, which is sampled from, of
        a sequence that is not too long.

        Where hidden states are read beside that, they must be where an ordinary step leaves them.
        """
        longest = self._shape.blocks * self._shape.block_size
        return 0 < len(output.scheduled) == output.total_tokens <= self._largest and all(
            s.samples
            and s.start < longest
            and not (s.request.is_read and s.request.reads(s.start, s.start + 1))
            for s in output.scheduled
        )

    @torch.inference_mode()
    def run(self, output: SchedulerOutput, pending: PendingTokens | None = None) -> torch.Tensor:
        """Compute a step that `takes` accepts.

        Args:
            output: the step.
            pending: tokens of it that are not known yet; None: all are.

        Returns:
            `(R, vocab)` float32 logits, valid until the next step runs.
        """
        scheduled = output.scheduled
        launches, groups = self._shared_launches, self._groups(scheduled)
        if groups is None:
            launches = self._launches
        rows = min(n for n in launches if n >= len(scheduled))
        ids = self._fill(scheduled, rows, groups)[0]
        if pending is not None:
            pending.fill_in(ids, scheduled, np.arange(1, len(scheduled) + 1), self._transfer)
        launches[rows]()
        return self._logits[: len(scheduled)]

    def _groups(self, scheduled: Sequence[ScheduledRequest]) -> list[Groups] | None:
        """Which rows share keys, per group of layers; None where no time would be saved."""
        if not self._shared_launches:
            return None
        rows = min(n for n in self._shared_launches if n >= len(scheduled))
        size = self._shape.block_size
        found: list[Groups] = [
            shared_groups(scheduled, group, size, cost, rows)
            for group, cost in enumerate(self._shape.sharing)
        ]
        return found if any(found) else None

    def _launch(self, rows: int, *, shared: bool = False) -> Launch:
        """What is captured for so many rows."""
        step = self._step(rows, shared=shared)

        @torch.inference_mode()
        def launch() -> None:
            self._logits[:rows].copy_(self._compute(step))

        return launch

    def _step(self, rows: int, *, shared: bool = False) -> PackedStep:
        """A step of so many rows that reads its inputs from where `_fill` puts them."""
        shape = self._shape
        filled = self._fill([], rows, [()] * shape.groups if shared else None)
        ids, positions, seq_lens = filled[:3]
        slots, members = filled[3 : 3 + shape.groups], iter(filled[3 + shape.groups :])
        metadata = (
            AttentionMetadata(
                query_start_loc=self._starts[: rows + 1],
                seq_lens=seq_lens,
                block_table=table[:rows],
                slot_mapping=own,
                num_tokens=rows,
                block_size=shape.block_size,
                max_query_len=1,
                max_seq_len=shape.blocks * shape.block_size,
                shared=SharedPrefixes(*islice(members, 5)) if shared and cost else None,
            )
            for table, own, cost in zip(self._tables, slots, shape.sharing, strict=True)
        )
        return PackedStep(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            logits_rows=self._every[:rows],
            needed=NeededRows(np.arange(rows)),
            samplers=[],
            metadata=tuple(metadata),
        )

    def _fill(
        self, scheduled: Sequence[ScheduledRequest], rows: int, groups: Sequence[Groups] | None = None
    ) -> list[torch.Tensor]:
        """Bring a step to the device; inputs of equal `rows` always lie at the same addresses.

        `groups` that share keys, per group of layers, are given to steps that are captured with them.
        """
        tables = [self._table(scheduled, group, rows) for group in range(self._shape.groups)]
        for whole, table in zip(self._tables, self._transfer(tables), strict=True):
            whole[:rows, : table.shape[1]].copy_(table)
        return self._transfer(self._arrays(scheduled, rows, tables, groups), self._inputs)

    def _table(self, scheduled: Sequence[ScheduledRequest], group: int, rows: int) -> npt.NDArray[np.int32]:
        """Blocks of one group, those of rows that are too many the null block."""
        block_size = self._shape.block_size
        counts = [s.start // block_size + 1 for s in scheduled]
        table = np.zeros((rows, max(counts, default=1)), dtype=np.int32)
        write_tables(table, [s.block_ids[group] for s in scheduled], counts)
        return table

    def _arrays(
        self,
        scheduled: Sequence[ScheduledRequest],
        rows: int,
        tables: Sequence[npt.NDArray[np.int32]],
        groups: Sequence[Groups] | None,
    ) -> list[Array]:
        """Ids, positions, lengths, of each group where keys and values go, and then which rows share keys."""
        count, block_size = len(scheduled), self._shape.block_size
        ids, positions = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        lens = np.ones(rows, dtype=np.int32)
        ids[:count] = [0 if s.pending else s.request.token(s.start) for s in scheduled]
        positions[:count] = [s.start for s in scheduled]
        lens[:count] = positions[:count] + 1
        arrays: list[Array] = [ids, positions, lens]
        blocks, places = np.divmod(positions[:count], block_size)
        for table in tables:
            slots = np.full(rows, -1, dtype=np.int64)
            slots[:count] = table[np.arange(count), blocks].astype(np.int64) * block_size + places
            arrays.append(slots)
        for found, cost in zip(groups or (), self._shape.sharing, strict=False):
            if cost:
                arrays += pack_groups(found, rows, fixed=True)
        return arrays

    def _whole(self, rows: int, blocks: int) -> torch.Tensor:
        return torch.zeros(rows, blocks, dtype=torch.int32, device=self._transfer.place)

    @torch.inference_mode()
    def _allocate_logits(self, rows: int) -> torch.Tensor:
        """For the largest step, which is computed to see how wide they are."""
        return torch.empty_like(self._compute(self._step(rows)), dtype=torch.float32)
