"""One block of the key-value cache, and the queue of blocks that nobody references.

Used by `BlockPool` alone. The order of the queue is the order of reuse, and so of eviction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchgen.core.block_hash import BlockHash, BlockKey
from batchgen.grammar import counted


class KVCacheBlock:
    """A slot of `block_size` tokens in every layer of one group.

    `block_hash` (with group id) is set while the block can be found in the prefix index; only full
    blocks have one. `chain` are then the names of the blocks of the sequence that filled it, at least up to
    its own, which is at `depth`. The links belong to the free queue and are `None` outside it.
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "chain",
        "depth",
        "is_null",
        "next_free_block",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockKey | None = None
        self.chain: Sequence[BlockHash] = ()
        self.depth = 0
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None
        self.is_null = False

    def __repr__(self) -> str:
        # The links are given as ids: printing the neighbours would print the whole queue.
        def link(block: KVCacheBlock | None) -> int | None:
            return None if block is None else block.block_id

        name = None if self.block_hash is None else self.block_hash.hex()
        return (
            f"KVCacheBlock(id={self.block_id}, ref_cnt={self.ref_cnt}, hash={name}, null={self.is_null}, "
            f"prev={link(self.prev_free_block)}, next={link(self.next_free_block)})"
        )


class FreeKVCacheBlockQueue:
    """Doubly linked list through the blocks themselves: O(1) removal from the middle, no allocation.

    Two sentinels stand at the ends, so no operation has a special case for the first or last block.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-2)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first `n` blocks.

        Raises:
            IndexError: fewer than `n` are free; nothing is taken.
        """
        if n > self.num_free:
            raise IndexError(f"{counted(n, 'free block')} wanted, {self.num_free} there")
        taken: list[KVCacheBlock] = []
        block = self._head.next_free_block
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        assert block is not None
        self._link(self._head, block)
        self.num_free -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out, wherever it is.

        Raises:
            ValueError: it is not in the queue.
        """
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise ValueError(f"block {block.block_id} is not free")
        self._link(before, after)
        block.prev_free_block = block.next_free_block = None
        self.num_free -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the back, in order: they are reused last."""
        assert self._tail.prev_free_block is not None
        self._insert(self._tail.prev_free_block, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the front, in order: they are reused first."""
        assert self._head.next_free_block is not None
        self._insert(self._head, blocks, self._head.next_free_block)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block

    def check(self) -> None:
        """Assert that the links agree in both directions and the count is theirs."""
        before, count = self._head, 0
        for block in self:
            assert block.prev_free_block is before, f"broken link before {block!r}"
            before = block
            count += 1
            assert count <= self.num_free, "the free queue is longer than its count"
        assert self._tail.prev_free_block is before, "broken link at the end of the free queue"
        assert count == self.num_free, f"{counted(count, 'block')} queued, {self.num_free} counted"

    def _insert(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            if block.next_free_block is not None:
                raise ValueError(f"block {block.block_id} is freed twice")
            self._link(before, block)
            before = block
            # Marks the block as queued at once, so that a repetition within `blocks` is seen too.
            block.next_free_block = after
        self._link(before, after)
        self.num_free += len(blocks)

    @staticmethod
    def _link(before: KVCacheBlock, after: KVCacheBlock) -> None:
        before.next_free_block = after
        after.prev_free_block = before
