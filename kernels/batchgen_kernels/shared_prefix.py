"""Which sequences of a step begin with the same blocks, and whether attending to those once takes less time.

Found on the host while a step is packed; `triton_kernels.backend` has what is launched then.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LAUNCH_SECONDS = 3e-6
"""Of one more kernel behind another: its start, and the wait for the last program of the one before."""
WAIT_SECONDS = 5e-7
"""Until a number comes from memory that depends on one just read."""
CACHE_SPEED = 2
"""Bytes that the second-level cache gives while memory gives one; 1.6 on H100, more than 2 on A100."""
LEAST_KEYS = 256
"""Of a split, below which its sums take as long as its keys; see `SharingCost.splits`."""
MOST_SPLITS = 16
_ID_BYTES = array("i").itemsize

Groups = Sequence["SharedGroup"]


class SharedGroup(NamedTuple):
    """Sequences with one row each in a step, whose first `keys` positions are in the same blocks."""

    members: Sequence[int]
    keys: int


@dataclass(frozen=True, slots=True)
class SharingCost:
    """What a layer's shared keys cost on a chip, each read once or by each sequence for itself.

    n sequences begin with the same P keys of B bytes, on p processors with memory that gives W bytes a
    second. Alone, each reads all of them, n P B bytes, which come from the second-level cache: at
    `CACHE_SPEED` = c times W, n P B / (c W) seconds. Together,

    * a tile of t sequences reads them once: ceil(n / t) P B / (c W). Multiplying does not take longer: a
      tile has 64 rows, 64 operations for each byte of 16 bits, which at W are a quarter of what the products
      of an H100 do and four tenths of an A100's;
    * one program does not get all of W, but 1/p of it. It reads one of C columns (KV heads, times chunks of
      their query heads) of one of s splits, which takes P B p / (s C) / (c W), however few others there are.
      Groups run at the same time: what counts is the sum of the first over groups, or the largest of the
      second;
    * its sums, V floats for each head and split, are written and read again: 8 n s heads V bytes, at W;
    * it is a launch more, whose programs wait for each step of the search among G groups, and who goes on
      from there waits once for each split.

    So groups save

        sum(n P B) - max(sum(ceil(n / t) P B), max(P B p / (s C)))    sum(8 n s heads V)
        ---------------------------------------------------------- -  ------------------ - L - (s + log2 G) w
                                  c W                                          W

    seconds, and are chosen where this is more than 0. Estimates are on the side of not sharing: the first
    reading from memory, which is the same in both, is counted as if it came from the cache.

    Args:
        tile: sequences in one tile (t).
        key_bytes: of keys and values of one position, of all KV heads, scales included (B).
        sum_bytes: written and read for one sequence and split (8 heads V).
        columns: programs of a tile and split (C).
        processors: of the chip (p).
        bandwidth: bytes a second of its memory (W).
    """

    tile: int
    key_bytes: int
    sum_bytes: int
    columns: int
    processors: int
    bandwidth: float

    def splits(self, sequences: int, longest: int) -> int:
        """Into how many parts the keys of each group are divided.

        As many as give each processor one program if all sequences are one group. A split's sums take
        4 rows V / (W / p) seconds to be written and read (half of it in the cache), its k keys
        2 rows (K + V) k / (F / p) to be multiplied at F operations a second: at K = V the same for
        k = F / W, some 150 to 300 on chips from 8.0 on. So no split has less than `LEAST_KEYS`.

        Args:
            sequences: of the step.
            longest: keys of the longest sequence, or more.
        """
        programs = self.columns * -(-sequences // self.tile)
        return max(1, min(self.processors // programs, -(-longest // LEAST_KEYS), MOST_SPLITS))

    def seconds_saved(self, groups: Groups, sequences: int) -> float:
        """By groups in a step of so many sequences; less than 0 where they cost more than they save."""
        if not groups:
            return 0.0
        longest = max(group.keys for group in groups)
        splits = self.splits(sequences, longest)
        alone = sum(len(group.members) * group.keys for group in groups)
        together = sum(-(-len(group.members) // self.tile) * group.keys for group in groups)
        slowest = longest * self.processors / (splits * self.columns)
        members = sum(len(group.members) for group in groups)
        read = (alone - max(together, slowest)) * self.key_bytes / (CACHE_SPEED * self.bandwidth)
        sums = members * splits * self.sum_bytes / self.bandwidth
        waits = splits + math.ceil(math.log2(len(groups)))
        return read - sums - LAUNCH_SECONDS - waits * WAIT_SECONDS

    def pays(self, group: SharedGroup, sequences: int) -> bool:
        """Whether a group is worth its own sums, in a launch that there is anyway."""
        count, splits = len(group.members), self.splits(sequences, group.keys)
        read = (count - -(-count // self.tile)) * group.keys * self.key_bytes
        return read > CACHE_SPEED * count * splits * self.sum_bytes


def most_groups(sequences: int) -> int:
    """In a step of so many sequences whose sizes are fixed: programs of groups that do not exist end at
    once, but not for nothing."""
    return max(1, sequences // 4)


def choose_groups(
    tables: Sequence[Sequence[int]],
    lens: Sequence[int],
    block_size: int,
    cost: SharingCost,
    fixed: int | None = None,
) -> list[SharedGroup]:
    """The groups of a step that save time together; none where that is not so.

    The block of a sequence's last position is never shared: it is written in the step.

    Args:
        tables: block ids of the sequences that have one row in the step; empty for others.
        lens: keys of each, this row included.
        block_size: positions in a block.
        cost: of sharing.
        fixed: sequences for which sizes are fixed, padding included; None: they are those of the step.
    """
    sequences = fixed or len(tables)
    found = [group for group in find_groups(tables, lens, block_size) if cost.pays(group, sequences)]
    found.sort(key=lambda group: (len(group.members) - 1) * group.keys, reverse=True)
    if fixed:
        del found[most_groups(fixed) :]
    return found if cost.seconds_saved(found, sequences) > 0 else []


def find_groups(tables: Sequence[Sequence[int]], lens: Sequence[int], block_size: int) -> list[SharedGroup]:
    """Sequences that begin with the same whole blocks, in order of their tables, each in one group at most.

    One more joins a group only if no fewer keys are shared in all: n members with k common keys save
    (n - 1) * k readings.

    Args:
        tables: block ids of each sequence; empty for one that cannot share.
        lens: keys of each; the last one's block is left out.
        block_size: positions in a block.
    """
    by_first: defaultdict[int, list[int]] = defaultdict(list)
    for sequence, (table, length) in enumerate(zip(tables, lens, strict=True)):
        if table and length > block_size:
            by_first[table[0]].append(sequence)
    groups: list[SharedGroup] = []
    for alike in by_first.values():
        if len(alike) > 1:
            whole = {s: _packed(tables[s], (lens[s] - 1) // block_size) for s in alike}
            alike.sort(key=whole.__getitem__)
            groups += _neighbours(alike, whole, block_size)
    return groups


def _packed(table: Sequence[int], blocks: int) -> bytes:
    """The first so many block ids, which are then compared as memory."""
    return (table if isinstance(table, array) else array("i", table))[:blocks].tobytes()


def _neighbours(order: list[int], whole: dict[int, bytes], block_size: int) -> list[SharedGroup]:
    groups: list[SharedGroup] = []
    members, size = order[:1], len(whole[order[0]])
    for sequence in order[1:]:
        link, others = _common(whole[members[-1]], whole[sequence], size), len(members)
        if others == 1 or others * link >= (others - 1) * size:
            members.append(sequence)
            size = link
            continue
        groups.append(SharedGroup(members, size // _ID_BYTES * block_size))
        members, size = [sequence], len(whole[sequence])
    groups.append(SharedGroup(members, size // _ID_BYTES * block_size))
    return [group for group in groups if len(group.members) > 1 and group.keys]


def _common(a: bytes, b: bytes, most: int) -> int:
    """With how many equal bytes, of whole block ids and at most so many, both begin."""
    low, high = 0, min(len(a), len(b), most)
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low // _ID_BYTES * _ID_BYTES


def pack_groups(groups: Groups, sequences: int, *, fixed: bool = False) -> list[npt.NDArray[np.int32]]:
    """What `metadata.SharedPrefixes` is made of.

    Args:
        groups: of a step.
        sequences: of the step, padding included.
        fixed: whether sizes are to depend on `sequences` alone; what is too many has no members.
    """
    room = most_groups(sequences) if fixed else len(groups)
    sizes = [len(group.members) for group in groups]
    members = np.zeros(sequences if fixed else sum(sizes), dtype=np.int32)
    members[: sum(sizes)] = [s for group in groups for s in group.members]
    starts, lens = np.full(room + 1, sum(sizes), dtype=np.int32), np.zeros(room, dtype=np.int32)
    starts[: len(groups) + 1] = np.cumsum([0, *sizes])
    lens[: len(groups)] = [group.keys for group in groups]
    skipped = np.zeros(sequences, dtype=np.int32)
    for group in groups:
        skipped[list(group.members)] = group.keys
    return [members, starts, lens, np.array([len(groups)], dtype=np.int32), skipped]
