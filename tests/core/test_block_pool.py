"""Blocks, the free queue, the index and the pool, one property at a time."""

from __future__ import annotations

import pytest

from batchgen.core.block import FreeKVCacheBlockQueue, KVCacheBlock
from batchgen.core.block_hash import block_key, hash_block
from batchgen.core.block_pool import BlockPool

A, B, C, D = (block_key(hash_block(b"", bytes([i])), 0) for i in range(4))


def queue_of(n):
    blocks = [KVCacheBlock(i) for i in range(n)]
    return FreeKVCacheBlockQueue(blocks), blocks


def ids(blocks):
    return [block.block_id for block in blocks]


def test_queue_takes_from_the_front():
    queue, _ = queue_of(4)
    taken = queue.popleft_n(3)
    assert ids(taken) == [0, 1, 2]
    assert all(block.prev_free_block is block.next_free_block is None for block in taken)
    assert ids(queue) == [3]
    queue.check()


def test_queue_removes_from_the_middle_and_puts_at_both_ends():
    queue, blocks = queue_of(5)
    queue.remove(blocks[2])
    queue.remove(blocks[0])
    queue.append_n([blocks[0]])
    queue.prepend_n([blocks[2]])
    assert ids(queue) == [2, 1, 3, 4, 0]
    queue.check()


def test_queue_refuses_what_it_does_not_have():
    queue, blocks = queue_of(2)
    with pytest.raises(IndexError):
        queue.popleft_n(3)
    assert ids(queue) == [0, 1]
    with pytest.raises(ValueError, match="freed twice"):
        queue.append_n([blocks[1]])
    queue.popleft_n(1)
    with pytest.raises(ValueError, match="not free"):
        queue.remove(blocks[0])


def test_queue_can_be_emptied_and_filled():
    queue, blocks = queue_of(3)
    queue.append_n(list(reversed(queue.popleft_n(3))))
    assert ids(queue) == [2, 1, 0]
    for block in blocks:
        queue.remove(block)
    assert queue.num_free == 0
    assert ids(queue.popleft_n(0)) == []
    queue.check()


def test_repr_names_the_neighbours_without_printing_them():
    _, blocks = queue_of(3000)
    assert repr(blocks[1]) == ("KVCacheBlock(id=1, ref_cnt=0, hash=None, null=False, prev=0, next=2)")


def test_a_pool_needs_a_block_beside_the_null_block():
    with pytest.raises(ValueError, match=r"num_blocks: 1 is not allowed"):
        BlockPool(1)


def test_the_null_block_is_never_handed_out_freed_or_counted():
    pool = BlockPool(4)
    assert 0 not in ids(pool.get_new_blocks(3))
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert pool.null_block.ref_cnt == 0
    assert (pool.num_used, pool.num_free, pool.num_usable) == (3, 0, 3)
    pool.check()


def test_a_freed_block_is_a_hit_until_it_is_handed_out():
    pool = BlockPool(3)
    [block] = pool.get_new_blocks(1)
    pool.register(block, A, None)
    pool.free_blocks([block])
    assert pool.index.get(A) is block
    assert pool.get_new_blocks(1) != [block]
    assert pool.get_new_blocks(1) == [block]
    assert pool.index.get(A) is None
    assert len(pool.index) == 0


def test_unnamed_blocks_are_reused_before_cached_ones_and_tails_before_heads():
    pool = BlockPool(5)
    head, tail, partial = pool.get_new_blocks(3)
    pool.register(head, A, None)
    pool.register(tail, B, A)
    pool.free_blocks([partial, tail, head])
    assert pool.get_new_blocks(4) == [partial, pool.blocks[4], tail, head]


def test_touch_saves_a_block_from_eviction():
    pool = BlockPool(3)
    a, b = pool.get_new_blocks(2)
    pool.register(a, A, None)
    pool.free_blocks([b, a])
    pool.touch([a, a])
    assert pool.get_new_blocks(1) == [b]
    assert a.ref_cnt == 2
    with pytest.raises(IndexError):
        pool.get_new_blocks(1)
    pool.free_blocks([a])
    assert pool.num_free == 0
    pool.check()


def test_equal_blocks_are_kept_side_by_side():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.register(block, A, None)
    assert pool.index.all(A) == blocks
    for block in blocks:
        assert pool.index.get(A) is not None
        pool.unregister(block)
        pool.check()
    assert pool.index.get(A) is None


def test_a_block_has_one_name_and_is_freed_once_per_reference():
    pool = BlockPool(2)
    [block] = pool.get_new_blocks(1)
    pool.register(block, A, None)
    with pytest.raises(ValueError, match="already has a name"):
        pool.register(block, B, A)
    pool.free_blocks([block])
    with pytest.raises(ValueError, match="not referenced"):
        pool.free_blocks([block])


def test_descendants_are_found_through_the_chain():
    pool = BlockPool(5)
    for block, key, parent in zip(pool.get_new_blocks(4), (A, B, C, D), (None, A, B, A), strict=True):
        pool.register(block, key, parent)
    assert pool.index.with_descendants([B]) == {B, C}
    assert pool.index.with_descendants([A]) == {A, B, C, D}
    assert {block.block_id for block in pool.evict({B, C})} == {2, 3}
    assert B not in pool.index
    assert D in pool.index
    pool.check()


def test_an_unregistered_free_block_is_reused_first():
    pool = BlockPool(3)
    [block] = pool.get_new_blocks(1)
    pool.register(block, A, None)
    pool.free_blocks([block])
    pool.unregister(block)
    assert pool.get_new_blocks(1) == [block]


@pytest.mark.parametrize("break_it", ["ref", "link", "count", "name", "null"])
def test_check_finds_damage(break_it):
    pool = BlockPool(4)
    [block] = pool.get_new_blocks(1)
    pool.register(block, A, None)
    pool.check()
    if break_it == "ref":
        pool.blocks[2].ref_cnt = 1
    elif break_it == "link":
        pool.blocks[3].prev_free_block = pool.blocks[1]
    elif break_it == "count":
        pool._free.num_free = 1
    elif break_it == "name":
        block.block_hash = B
    else:
        pool.null_block.is_null = False
    with pytest.raises((AssertionError, KeyError)):
        pool.check()
