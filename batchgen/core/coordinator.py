"""Keeps the groups of layers in step: one request, one number of computed tokens, a table per group.

Used by `KVCacheManager`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

from batchgen.core.block import KVCacheBlock
from batchgen.core.block_hash import BlockHash
from batchgen.core.block_pool import BlockPool
from batchgen.core.kv_spec import KVCacheConfig
from batchgen.core.single_type import make_manager

HitBlocks = tuple[list[KVCacheBlock], ...]


class KVCacheCoordinator:
    """One single-type manager per group over one pool."""

    def __init__(self, config: KVCacheConfig, pool: BlockPool, max_chunk: int) -> None:
        self.block_size = config.block_size
        self.pool = pool
        self.slides = any(group.sliding_window is not None for group in config.groups)
        self.managers = tuple(
            make_manager(i, group, config.block_size, pool, max_chunk)
            for i, group in enumerate(config.groups)
        )

    def find_longest_hit(self, hashes: Sequence[BlockHash], max_blocks: int) -> HitBlocks:
        """The longest prefix that every group has, as equally long lists of blocks; no side effects.

        A group may have to give up length for another, and then its own best hit may be shorter still:
        repeat until nobody shrinks.
        """
        length = max_blocks
        hits: list[list[KVCacheBlock] | None] = [None] * len(self.managers)
        settled = False
        while not settled:
            for i, manager in enumerate(self.managers):
                hit = hits[i]
                if hit is None or len(hit) != length:
                    hits[i] = hit = manager.find_longest_hit(hashes, length)
                length = len(hit)
            settled = all(hit is not None and len(hit) == length for hit in hits)
        return tuple(hit for hit in hits if hit is not None)

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at once, in all groups, while `num_tokens` are computed."""
        return sum(manager.peak_blocks(num_tokens) for manager in self.managers)

    def num_missing_blocks(self, request_id: int, num_tokens: int) -> int:
        """New blocks for a request with tables to get to `num_tokens`, in all groups."""
        return sum(manager.num_missing_blocks(request_id, num_tokens) for manager in self.managers)

    def num_missing_after_hit(self, hit: HitBlocks, num_tokens: int) -> int:
        """Blocks taken from the free ones if a new request starts from `hit` and gets to `num_tokens`.

        Hit blocks that nobody references are free now, and using them takes them from the free ones.
        """
        unused = sum(block.ref_cnt == 0 and not block.is_null for block in chain(*hit))
        return unused + sum(
            manager.num_missing_after_hit(blocks, num_tokens)
            for manager, blocks in zip(self.managers, hit, strict=True)
        )

    def open_tables(self, request_id: int, hit: HitBlocks) -> None:
        """Start a request from a hit, which is touched in all groups before anything is allocated.

        Otherwise the new blocks of one group could evict the hit of another.
        """
        for blocks in hit:
            self.pool.touch(blocks)
        for manager, blocks in zip(self.managers, hit, strict=True):
            manager.open_table(request_id, blocks)

    def covers(self, request_id: int, num_tokens: int) -> bool:
        """Whether the tables have blocks for positions 0 to `num_tokens` already."""
        return self.num_blocks(request_id) * self.block_size >= num_tokens

    def num_blocks(self, request_id: int) -> int:
        """Length of a request's tables, which is the same in all groups."""
        return len(self.managers[0].tables[request_id].blocks)

    def num_registered(self, request_id: int) -> int:
        """Leading blocks that have had their name set, the same in all groups."""
        return self.managers[0].tables[request_id].num_registered

    def num_new_blocks(self, request_id: int, num_tokens: int) -> int:
        """Blocks that `allocate` would take now."""
        return sum(manager.num_new_blocks(request_id, num_tokens) for manager in self.managers)

    def allocate(self, request_id: int, num_tokens: int) -> None:
        """Make the tables of all groups cover positions 0 to `num_tokens`."""
        for manager in self.managers:
            manager.allocate(request_id, num_tokens)

    def shared_tails(self, request_id: int, num_computed_tokens: int) -> list[KVCacheBlock]:
        """Partial blocks that the next write goes to and that somebody else holds too."""
        tails = (manager.shared_tail(request_id, num_computed_tokens) for manager in self.managers)
        return [tail for tail in tails if tail is not None]

    def copy_tails(self, request_id: int, num_computed_tokens: int) -> list[tuple[int, int]]:
        """Replace shared partial blocks by own ones: (source, destination) of each."""
        return [
            manager.copy_tail(request_id, num_computed_tokens)
            for manager in self.managers
            if manager.shared_tail(request_id, num_computed_tokens) is not None
        ]

    def register(self, request_id: int, hashes: Sequence[BlockHash], num_full: int) -> list[KVCacheBlock]:
        """Name the first `num_full` blocks of each group; returns those named now."""
        named: list[KVCacheBlock] = []
        for manager in self.managers:
            named += manager.register(request_id, hashes, num_full)
        return named

    def free_skipped(self, request_id: int, num_computed_tokens: int) -> None:
        """Free what no query from position `num_computed_tokens` on reads."""
        for manager in self.managers:
            manager.free_skipped(request_id, num_computed_tokens)

    def truncate(self, request_id: int, num_tokens: int) -> None:
        """Free what lies beyond positions 0 to `num_tokens`."""
        for manager in self.managers:
            manager.truncate(request_id, num_tokens)

    def free(self, request_id: int) -> None:
        """Free all blocks of a request."""
        for manager in self.managers:
            manager.free(request_id)

    def fork(self, parent_id: int, child_id: int, num_computed_tokens: int) -> list[KVCacheBlock]:
        """Let the child share all blocks of the parent; returns the partial ones."""
        tails = (manager.fork(parent_id, child_id, num_computed_tokens) for manager in self.managers)
        return [tail for tail in tails if tail is not None]

    def block_ids(self, request_id: int) -> list[array[int]]:
        """Live block ids of a request, per group."""
        return [manager.tables[request_id].ids for manager in self.managers]
