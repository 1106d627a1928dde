"""All blocks of the cache: which are free, who may reuse what, and which hold a known prefix.

Used by the cache managers. A free block with a name is still a hit: it loses its name only when it is
handed out again, so the whole pool is a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchgen.core.block import FreeKVCacheBlockQueue, KVCacheBlock
from batchgen.core.block_hash import BlockHash, BlockKey
from batchgen.core.prefix_index import PrefixIndex


class BlockPool:
    """`num_blocks` blocks of one size, shared by all groups.

    Block 0 is the null block: it stands for positions that no kernel may read, is never handed out,
    freed, counted or named.

    Raises:
        ValueError: fewer than 2 blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: {num_blocks} is not allowed; use 2 or more, block 0 is reserved")
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.index = PrefixIndex()
        self._free = FreeKVCacheBlockQueue(self.blocks[1:])

    @property
    def num_usable(self) -> int:
        """Blocks that requests can have: all but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, those with a name included."""
        return self._free.num_free

    @property
    def num_used(self) -> int:
        """Blocks that somebody references."""
        return self.num_usable - self._free.num_free

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Hand out `n` blocks, each referenced once; whatever they cached is forgotten now.

        Raises:
            IndexError: fewer are free; nothing changes.
        """
        blocks = self._free.popleft_n(n)
        for block in blocks:
            self.index.remove(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Reference blocks once more; free ones leave the queue and can no longer be evicted."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give one reference back for each block.

        Pass a request's blocks last first: then the end of a chain is evicted before its beginning,
        and no cached block is ever left without the blocks that lead to it. Blocks without a name go
        to the front of the queue, so that they are reused before anything cached is evicted.
        """
        unnamed: list[KVCacheBlock] = []
        named: list[KVCacheBlock] = []
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt < 1:
                raise ValueError(f"{block!r} is freed but not referenced")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (unnamed if block.block_hash is None else named).append(block)
        self._free.prepend_n(unnamed)
        self._free.append_n(named)

    def register(self, block: KVCacheBlock, chain: Sequence[BlockHash], depth: int, group_id: int) -> None:
        """Name a full, referenced block, so that others find it.

        Args:
            block: of the group `group_id`.
            chain: names of the blocks of its sequence; may grow at its end afterwards, and nowhere else.
            depth: which of them is its own.
            group_id: of the group whose layers it is for.
        """
        self.index.insert(block, chain, depth, group_id)

    def unregister(self, block: KVCacheBlock) -> None:
        """Take the name away: the contents are not what the name says. No effect without a name."""
        if block.block_hash is None:
            return
        self.index.remove(block)
        if block.ref_cnt == 0:
            self._free.remove(block)
            self._free.prepend_n([block])

    def evict(self, keys: Iterable[BlockKey]) -> list[KVCacheBlock]:
        """Unregister all blocks of these names; returns them."""
        evicted = [block for key in keys for block in self.index.all(key)]
        for block in evicted:
            self.unregister(block)
        return evicted

    def check(self) -> None:
        """Assert the pool's invariants: each block is the null block, free, or referenced."""
        self._free.check()
        self.index.check()
        free = {block.block_id for block in self._free}
        assert len(free) == self.num_free
        null = self.null_block
        assert null.is_null, "the null block lost its mark"
        assert null.block_id == 0, "the null block moved"
        assert null.block_hash is None, "the null block has a name"
        assert 0 not in free, "the null block was freed"
        for block in self.blocks[1:]:
            assert not block.is_null
            assert block.ref_cnt >= 0
            is_free = block.block_id in free
            assert is_free == (block.ref_cnt == 0), f"{block!r}: free and referenced, or neither"
            if block.block_hash is not None:
                assert block in self.index.all(block.block_hash), f"{block!r} has a name nobody finds"
