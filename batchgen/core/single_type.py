"""Block tables of one group of layers, by kind of attention. Used by `KVCacheCoordinator`.

The base class does what all kinds share; a kind says how it looks up a prefix, which blocks its queries
no longer need, and how many blocks a sequence can hold at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from batchgen.core.block import KVCacheBlock
from batchgen.core.block_hash import BlockHash, BlockKey, block_key
from batchgen.core.block_pool import BlockPool
from batchgen.core.kv_spec import KVCacheGroup


@dataclass(slots=True)
class BlockTable:
    """Blocks of one request, one per `block_size` positions from position 0.

    `ids` repeats the block ids for the engine, kept up to date in place, as int32 that a step copies whole.
    The first `num_null` blocks are the null block, the first `num_registered` have had their name set.
    """

    blocks: list[KVCacheBlock] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("i"))
    num_null: int = 0
    num_registered: int = 0

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks.extend(blocks)
        self.ids.extend(block.block_id for block in blocks)

    def replace(self, index: int, block: KVCacheBlock) -> KVCacheBlock:
        old = self.blocks[index]
        self.blocks[index] = block
        self.ids[index] = block.block_id
        return old

    def truncate(self, num_blocks: int) -> list[KVCacheBlock]:
        dropped = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        del self.ids[num_blocks:]
        return dropped


class SingleTypeKVCacheManager(ABC):
    """Block tables of the requests that hold blocks, for one group.

    Args:
        group_id: index of the group; part of every block's key.
        group: how far back its layers look.
        block_size: tokens in a block.
        pool: shared with the other groups.
        max_chunk: most tokens that one request computes in one step.
    """

    def __init__(
        self, group_id: int, group: KVCacheGroup, block_size: int, pool: BlockPool, max_chunk: int
    ) -> None:
        self.group_id = group_id
        self.group = group
        self.block_size = block_size
        self.pool = pool
        self.max_chunk = max_chunk
        self.tables: dict[int, BlockTable] = {}

    @abstractmethod
    def find_longest_hit(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[KVCacheBlock]:
        """Blocks for the longest prefix of at most `max_blocks` that is cached; no side effects.

        Null blocks stand where the group needs nothing to go on from the end of the hit.
        """

    @abstractmethod
    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no query from position `num_computed_tokens` on reads."""

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at once while its first `num_tokens` are computed."""
        return self.group.peak_blocks(num_tokens, self.block_size, self.max_chunk)

    def num_missing_blocks(self, request_id: int, num_tokens: int) -> int:
        """Most blocks that a request takes, beyond those it holds, on its way to `num_tokens`."""
        table = self.tables[request_id]
        length = len(table.blocks)
        return self._missing(num_tokens, length, length - table.num_null)

    def num_missing_after_hit(self, hit: Sequence[KVCacheBlock], num_tokens: int) -> int:
        """The same for a request that would start from `hit`."""
        return self._missing(num_tokens, len(hit), sum(not block.is_null for block in hit))

    def open_table(self, request_id: int, hit: Sequence[KVCacheBlock]) -> None:
        """Start a request from touched hit blocks, which have their names already."""
        num_null = sum(block.is_null for block in hit)
        table = BlockTable(num_null=num_null, num_registered=len(hit))
        table.extend(hit)
        self.tables[request_id] = table

    def num_new_blocks(self, request_id: int, num_tokens: int) -> int:
        """Blocks that `allocate` would take now."""
        return max(0, self._blocks(num_tokens) - len(self.tables[request_id].blocks))

    def allocate(self, request_id: int, num_tokens: int) -> None:
        """Append new blocks until the table covers positions 0 to `num_tokens`."""
        table = self.tables[request_id]
        table.extend(self.pool.get_new_blocks(self.num_new_blocks(request_id, num_tokens)))

    def shared_tail(self, request_id: int, num_computed_tokens: int) -> KVCacheBlock | None:
        """The partial block that the next write goes to, if somebody else holds it too."""
        if num_computed_tokens % self.block_size == 0:
            return None
        block = self.tables[request_id].blocks[num_computed_tokens // self.block_size]
        return block if block.ref_cnt > 1 else None

    def copy_tail(self, request_id: int, num_computed_tokens: int) -> tuple[int, int]:
        """Give the request a block of its own for its shared partial one: (source, destination)."""
        [own] = self.pool.get_new_blocks(1)
        shared = self.tables[request_id].replace(num_computed_tokens // self.block_size, own)
        self.pool.free_blocks([shared])
        return shared.block_id, own.block_id

    def register(
        self, request_id: int, hashes: Sequence[BlockHash], num_full_blocks: int
    ) -> list[KVCacheBlock]:
        """Name the first `num_full_blocks` blocks; returns those named now, first to last."""
        table = self.tables[request_id]
        named = table.blocks[table.num_registered : num_full_blocks]
        for i, block in enumerate(named, table.num_registered):
            self.pool.register(block, hashes, i, self.group_id)
        table.num_registered = max(table.num_registered, num_full_blocks)
        return named

    def free_skipped(self, request_id: int, num_computed_tokens: int) -> None:
        """Free blocks that no later query reads; the null block takes their place."""
        table = self.tables[request_id]
        stop = min(self.num_skipped_blocks(num_computed_tokens), len(table.blocks))
        if stop <= table.num_null:
            return
        null = self.pool.null_block
        dropped = [table.replace(i, null) for i in range(table.num_null, stop)]
        table.num_null = stop
        self.pool.free_blocks(reversed(dropped))

    def truncate(self, request_id: int, num_tokens: int) -> None:
        """Free the blocks beyond positions 0 to `num_tokens`, and take names beyond full blocks as unset."""
        table = self.tables[request_id]
        self.pool.free_blocks(reversed(table.truncate(self._blocks(num_tokens))))
        table.num_registered = min(table.num_registered, num_tokens // self.block_size)

    def free(self, request_id: int) -> None:
        """Drop the request's table, last block first."""
        self.pool.free_blocks(reversed(self.tables.pop(request_id).blocks))

    def fork(self, parent_id: int, child_id: int, num_computed_tokens: int) -> KVCacheBlock | None:
        """Let the child share all blocks of the parent; returns the partial one, if there is one."""
        source = self.tables[parent_id]
        self.pool.touch(source.blocks)
        num_registered = min(source.num_registered, num_computed_tokens // self.block_size)
        self.tables[child_id] = BlockTable(
            list(source.blocks), source.ids[:], source.num_null, num_registered
        )
        return self.shared_tail(child_id, num_computed_tokens)

    def check(self, request_id: int, hashes: Sequence[BlockHash]) -> None:
        """Assert that a table's parts agree and its named blocks are those of the request's tokens."""
        table = self.tables[request_id]
        assert list(table.ids) == [block.block_id for block in table.blocks], (
            f"request {request_id}: stale ids"
        )
        for i, block in enumerate(table.blocks):
            assert block.is_null == (i < table.num_null), f"request {request_id}: null block at {i}"
            if table.num_null <= i < table.num_registered:
                assert block.block_hash == self._key(hashes, i), f"request {request_id}: wrong name at {i}"
            elif i >= table.num_registered:
                assert block.block_hash is None, f"request {request_id}: {block!r} named too early"

    def named_blocks(self) -> Iterator[tuple[BlockKey, KVCacheBlock]]:
        """Everything of this group in the prefix index."""
        suffix = block_key(b"", self.group_id)
        return ((key, block) for key, block in self.pool.index if key.endswith(suffix))

    def _missing(self, num_tokens: int, length: int, held: int) -> int:
        return max(0, min(self._blocks(num_tokens) - length, self.peak_blocks(num_tokens) - held))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _key(self, hashes: Sequence[BlockHash], index: int) -> BlockKey:
        return block_key(hashes[index], self.group_id)


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every query reads all positions before it."""

    def find_longest_hit(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[KVCacheBlock]:
        """From the left, up to the first block that is not cached."""
        hit: list[KVCacheBlock] = []
        for block_hash in hashes[:max_blocks]:
            block = self.pool.index.get(block_key(block_hash, self.group_id))
            if block is None:
                break
            hit.append(block)
        return hit

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A query reads its own position and the `sliding_window - 1` before it."""

    def __init__(
        self, group_id: int, group: KVCacheGroup, block_size: int, pool: BlockPool, max_chunk: int
    ) -> None:
        super().__init__(group_id, group, block_size, pool, max_chunk)
        assert group.sliding_window is not None
        self.window = group.sliding_window

    def find_longest_hit(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[KVCacheBlock]:
        """From the right: the last place with as many cached blocks in a row as the next query reads.

        A run that reaches position 0 is enough whatever its length.
        """
        hashes = hashes[:max_blocks]
        run: list[KVCacheBlock] = []
        stop = len(hashes)
        for i in range(len(hashes) - 1, -1, -1):
            if stop - i > self._blocks_below(stop):
                break
            block = self.pool.index.get(block_key(hashes[i], self.group_id))
            if block is None:
                run, stop = [], i
            else:
                run.append(block)
        return [self.pool.null_block] * (stop - len(run)) + run[::-1]

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.window + 1) // self.block_size

    def _blocks_below(self, num_blocks: int) -> int:
        """Blocks before position `num_blocks * block_size` that the query there reads."""
        return num_blocks - self.num_skipped_blocks(num_blocks * self.block_size)


def make_manager(
    group_id: int, group: KVCacheGroup, block_size: int, pool: BlockPool, max_chunk: int
) -> SingleTypeKVCacheManager:
    """The manager for a group's kind of attention."""
    kind = FullAttentionManager if group.sliding_window is None else SlidingWindowManager
    return kind(group_id, group, block_size, pool, max_chunk)
