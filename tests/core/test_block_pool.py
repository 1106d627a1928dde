"""Blocks, the free queue, the index and the pool, one property at a time."""

from __future__ import annotations

import pytest

from batchgen.core.block import FreeKVCacheBlockQueue, KVCacheBlock
from batchgen.core.block_hash import block_key, hash_block
from batchgen.core.block_pool import BlockPool

NAMES = [hash_block(b"", bytes([i])) for i in range(4)]
A, B, C, D = (block_key(name, 0) for name in NAMES)


def register(pool, block, *chain):
    """Name a block of group 0 by the last of its chain, each given as the key of that group."""
    names = [NAMES[[A, B, C, D].index(key)] for key in chain]
    pool.register(block, names, len(names) - 1, 0)


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
    register(pool, block, A)
    pool.free_blocks([block])
    assert pool.index.get(A) is block
    assert pool.get_new_blocks(1) != [block]
    assert pool.get_new_blocks(1) == [block]
    assert pool.index.get(A) is None
    assert len(pool.index) == 0


def test_unnamed_blocks_are_reused_before_cached_ones_and_tails_before_heads():
    pool = BlockPool(5)
    head, tail, partial = pool.get_new_blocks(3)
    register(pool, head, A)
    register(pool, tail, A, B)
    pool.free_blocks([partial, tail, head])
    assert pool.get_new_blocks(4) == [partial, pool.blocks[4], tail, head]


def test_touch_saves_a_block_from_eviction():
    pool = BlockPool(3)
    a, b = pool.get_new_blocks(2)
    register(pool, a, A)
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
        register(pool, block, A)
    assert pool.index.all(A) == blocks
    for block in blocks:
        assert pool.index.get(A) is not None
        pool.unregister(block)
        pool.check()
    assert pool.index.get(A) is None


def test_a_block_has_one_name_and_is_freed_once_per_reference():
    pool = BlockPool(2)
    [block] = pool.get_new_blocks(1)
    register(pool, block, A)
    with pytest.raises(ValueError, match="already has a name"):
        register(pool, block, A, B)
    pool.free_blocks([block])
    with pytest.raises(ValueError, match="not referenced"):
        pool.free_blocks([block])


def test_descendants_are_found_through_gaps_in_the_chain():
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(5)
    chains = ((A,), (A, B), (A, B, C), (A, D), (D, B))
    for block, chain in zip(blocks, chains, strict=True):
        register(pool, block, *chain)
    a, b, c, d = NAMES
    assert pool.index.descendants(b, 1) == {B, C}
    assert pool.index.descendants(a, 0) == {A, B, C, D}
    assert pool.index.descendants(c, 1) == set()
    pool.unregister(blocks[1])
    assert pool.index.descendants(a, 0) == {A, C, D}
    assert pool.index.descendants(d, 0) == {B}
    assert {block.block_id for block in pool.evict({C, D})} == {3, 4}
    assert A in pool.index
    assert C not in pool.index
    pool.check()


def test_a_chain_that_grows_later_changes_nothing():
    pool = BlockPool(3)
    block, other = pool.get_new_blocks(2)
    chain = NAMES[:1]
    pool.register(block, chain, 0, 0)
    chain.append(NAMES[1])
    pool.register(other, chain, 1, 1)
    assert pool.index.descendants(NAMES[1], 1) == {block_key(NAMES[1], 1)}
    assert pool.index.descendants(NAMES[0], 0) == {A, block_key(NAMES[1], 1)}
    pool.check()


def test_an_unregistered_free_block_is_reused_first():
    pool = BlockPool(3)
    [block] = pool.get_new_blocks(1)
    register(pool, block, A)
    pool.free_blocks([block])
    pool.unregister(block)
    assert pool.get_new_blocks(1) == [block]


@pytest.mark.parametrize("break_it", ["ref", "link", "count", "name", "null"])
def test_check_finds_damage(break_it):
    pool = BlockPool(4)
    [block] = pool.get_new_blocks(1)
    register(pool, block, A)
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
