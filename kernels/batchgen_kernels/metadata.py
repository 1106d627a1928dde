"""Which rows of a packed step belong to which sequence, and where their keys and values live.

Built by the model runner once a step and group of layers; every layer of the group reads the same object.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchgen_kernels.shared_prefix import SharedGroup, pack_groups


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Groups of sequences that begin with the same blocks, for backends that attend to those once.

    Args:
        members: int32 [N]; sequences with one row in the step, group after group. What is beyond the last
            group's is not read.
        starts: int32 [G + 1]; members of group g are starts[g] to starts[g + 1], and may be none.
        lens: int32 [G]; keys that all members of a group see, a multiple of the block size.
        count: int32 [1]; of groups, those beyond having no members.
        skipped: int32 [S]; the same of each sequence of the step, 0 for those in no group.
    """

    members: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    count: torch.Tensor
    skipped: torch.Tensor

    def check(self, meta: AttentionMetadata) -> None:
        """Refuse groups in which a row would see something else than its own keys.

        Raises:
            ValueError: names the group.
        """
        starts, members, skipped = self.starts.tolist(), self.members.tolist(), self.skipped.tolist()
        rows, lens = meta.query_start_loc.diff().tolist(), meta.seq_lens.tolist()
        _require(len(skipped) == len(lens), f"{len(skipped)} entries of skipped for {len(lens)} sequences")
        _require(starts[0] == 0 and starts[-1] <= len(members), "groups must run from 0 to their members")
        some = starts[int(self.count) :]
        _require(
            some[0] == some[-1], f"{int(self.count)} groups are said to have members, and there are more"
        )
        seen = set()
        for g, (first, end) in enumerate(itertools.pairwise(starts)):
            keys = int(self.lens[g])
            blocks = meta.block_table[members[first:end], : keys // meta.block_size]
            _require(first <= end, f"group {g} ends before it begins")
            _require(keys % meta.block_size == 0, f"group {g} shares {keys} keys, not whole blocks")
            _require(bool((blocks == blocks[:1]).all()), f"group {g} has members with other blocks")
            for s in members[first:end]:
                fits = rows[s] == 1 and lens[s] > keys == skipped[s] and s not in seen
                _require(fits, f"group {g} of {keys} keys cannot have sequence {s}")
                seen.add(s)
        alone = [s for s, keys in enumerate(skipped) if keys and s not in seen]
        _require(not alone, f"sequences {alone} skip keys and are in no group")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True, kw_only=True)
class AttentionMetadata:
    """One packed step of S sequences in T rows, the last T - num_tokens of which are padding.

    ```
    rows      0 ......... 5 | 6 | 7 ... 9 | padding
    query_start_loc  0        6   7        10 = num_tokens
    ```

    Args:
        query_start_loc: int32 [S + 1]; rows of sequence s are query_start_loc[s] to query_start_loc[s + 1].
        seq_lens: int32 [S]; keys of sequence s, this step's rows included. Its rows are its last positions.
        block_table: int32 [S, B]; block b holds positions b * block_size onwards. Entries that no row can
            see (below a sliding window, beyond seq_lens) may be any valid id; the null block 0 is usual.
        slot_mapping: int64 [T]; block_id * block_size + offset where a row's key and value go; -1 is nowhere.
        num_tokens: rows that are not padding.
        block_size: positions in one block.
        max_query_len: most rows of a sequence, for kernels that must know it on the host.
        max_seq_len: most keys of a sequence.
        shared: which sequences begin with the same blocks, where that is to be made use of.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int
    block_size: int
    max_query_len: int
    max_seq_len: int
    shared: SharedPrefixes | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the step, padding included."""
        return int(self.slot_mapping.shape[0])

    def check(self, num_blocks: int) -> None:
        """Refuse what would read or write outside the cache.

        Raises:
            ValueError: names the tensor and the value.
        """
        starts, lens = self.query_start_loc.tolist(), self.seq_lens.tolist()
        query_lens = [b - a for a, b in itertools.pairwise(starts)]
        _require(
            len(starts) == len(lens) + 1,
            f"query_start_loc has {len(starts)} entries for {len(lens)} seq_lens",
        )
        _require(
            starts[0] == 0 and starts[-1] == self.num_tokens, "query_start_loc must run from 0 to num_tokens"
        )
        _require(self.num_tokens <= self.num_rows, f"{self.num_tokens} tokens in {self.num_rows} rows")
        for s, (q, n) in enumerate(zip(query_lens, lens, strict=True)):
            _require(0 <= q <= n, f"sequence {s} has {q} rows but seq_lens {n}")
        room = self.block_table.shape[1] * self.block_size
        _require(
            max(lens, default=0) <= room, f"seq_lens {max(lens, default=0)} exceeds the block table's {room}"
        )
        _check_range("block_table", self.block_table, 0, num_blocks)
        _check_range("slot_mapping", self.slot_mapping, -1, num_blocks * self.block_size)
        if self.shared is not None:
            self.shared.check(self)

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        *,
        num_rows: int | None = None,
        groups: Sequence[SharedGroup] = (),
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Pack sequences given as Python lists; `num_rows` pads the step to that many rows."""
        packed = PackedSequences.pack(
            query_lens, seq_lens, block_tables, block_size, num_rows=num_rows, groups=groups
        )
        return packed.metadata([torch.from_numpy(array).to(device) for array in packed.arrays])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """What `AttentionMetadata` is made of, on the host. Arguments as there, `shared` from `pack_groups`."""

    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    num_tokens: int
    block_size: int
    max_query_len: int
    max_seq_len: int
    shared: Sequence[npt.NDArray[np.int32]] = ()

    @classmethod
    def pack(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        *,
        num_rows: int | None = None,
        groups: Sequence[SharedGroup] = (),
    ) -> PackedSequences:
        """Pack sequences given as Python lists; `num_rows` pads the step to that many rows."""
        starts = np.concatenate([[0], np.cumsum(query_lens, dtype=np.int64)])
        num_tokens = int(starts[-1])
        table = np.zeros((len(seq_lens), max(map(len, block_tables), default=0)), dtype=np.int32)
        write_tables(table, block_tables, list(map(len, block_tables)))
        seq = np.repeat(np.arange(len(seq_lens)), query_lens)
        position = np.arange(num_tokens) + (np.asarray(seq_lens, np.int64) - starts[1:])[seq]
        slots = np.full(num_tokens if num_rows is None else num_rows, -1, dtype=np.int64)
        blocks = table[seq, position // block_size].astype(np.int64)
        slots[:num_tokens] = blocks * block_size + position % block_size
        return cls(
            query_start_loc=starts.astype(np.int32),
            seq_lens=np.asarray(seq_lens, dtype=np.int32),
            block_table=table,
            slot_mapping=slots,
            num_tokens=num_tokens,
            block_size=block_size,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            shared=pack_groups(groups, len(seq_lens)) if groups else (),
        )

    @property
    def arrays(self) -> list[npt.NDArray[np.int32] | npt.NDArray[np.int64]]:
        """Those that belong on the device, in the order in which `metadata` takes them."""
        return [self.query_start_loc, self.seq_lens, self.block_table, self.slot_mapping, *self.shared]

    def metadata(self, tensors: Sequence[torch.Tensor]) -> AttentionMetadata:
        """With `arrays` as tensors on the device."""
        query_start_loc, seq_lens, block_table, slot_mapping, *shared = tensors
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            num_tokens=self.num_tokens,
            block_size=self.block_size,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            shared=SharedPrefixes(*shared) if shared else None,
        )


@dataclass(frozen=True, slots=True)
class RowsApart:
    """Some rows of a step as a step of their own, which attends and writes nothing.

    Neighbouring rows of a sequence are a sequence that ends with the last of them.

    Args:
        rows: int64 [N], ascending: where they are in the step.
        sequences: int64 [R]; which sequence of the step each is a part of.
        query_start_loc: int32 [R + 1], as in `AttentionMetadata`.
        seq_lens: int32 [R], the same.
        max_query_len: most rows of a sequence.
    """

    rows: torch.Tensor
    sequences: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int

    def metadata(self, whole: AttentionMetadata) -> AttentionMetadata:
        """Of these rows, from that of all."""
        count = len(self.rows)
        return AttentionMetadata(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=whole.block_table.index_select(0, self.sequences),
            # Only its length counts.
            slot_mapping=whole.slot_mapping[:count],
            num_tokens=count,
            block_size=whole.block_size,
            max_query_len=self.max_query_len,
            max_seq_len=whole.max_seq_len,
        )


@dataclass(frozen=True, slots=True)
class NeededRows:
    """Rows of a step that are read; of the last layer no others need more than keys and values.

    Args:
        on_host: int64 [N], ascending.
        apart: the same on the device of the step; None where nothing but padding is left out.
    """

    on_host: npt.NDArray[np.int64]
    apart: RowsApart | None = None


def write_tables(
    table: npt.NDArray[np.int32], block_tables: Sequence[Sequence[int]], counts: Sequence[int]
) -> None:
    """Write the first of the blocks of each sequence to its row; arrays of int32 as they lie in memory.

    Args:
        table: [S or more, B], without gaps.
        block_tables: of S sequences.
        counts: [S], how many of each; at most B.
    """
    flat, width, start = table.reshape(-1).data, table.shape[1], 0
    for blocks, count in zip(block_tables, counts, strict=True):
        ids = blocks if isinstance(blocks, array) else array("i", blocks)
        flat[start : start + count] = ids if len(ids) == count else ids[:count]
        start += width


def runs_of(
    rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int32], lens: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Rows of a sequence that are neighbours, put together.

    Args:
        rows: [N], ascending.
        starts: [S + 1], the first row of each sequence, and the end.
        lens: [S], keys of each.

    Returns:
        [R, 5] of (sequence, first row, number of rows, position of the first, its place among `rows`).
    """
    seq = np.searchsorted(starts, rows, side="right") - 1
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = (np.diff(rows) > 1) | (np.diff(seq) > 0)
    places = np.flatnonzero(begins)
    first, seq = rows[places], seq[places]
    counts = np.diff(places, append=len(rows))
    return np.stack([seq, first, counts, lens[seq] - starts[seq + 1] + first, places], axis=1).astype(
        np.int64
    )


def rows_apart(
    rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int32], lens: npt.NDArray[np.int32]
) -> list[npt.NDArray[np.int32] | npt.NDArray[np.int64]]:
    """The tensors of `RowsApart`, on the host; arguments as of `runs_of`."""
    seq, _, counts, positions, places = runs_of(rows, starts, lens).T
    ends = np.append(places, len(rows)).astype(np.int32)
    return [rows, seq.copy(), ends, (positions + counts).astype(np.int32)]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(f"attention metadata: {message}")


def _check_range(name: str, values: torch.Tensor, low: int, end: int) -> None:
    if values.numel():
        smallest, largest = int(values.min()), int(values.max())
        _require(
            low <= smallest and largest < end, f"{name} holds {smallest}..{largest}, outside {low}..{end - 1}"
        )
