"""Block tables and lookups by kind of attention, and the fixed point over groups."""

from __future__ import annotations

import pytest

from batchgen.core.block_hash import extend_block_hashes
from batchgen.core.block_pool import BlockPool
from batchgen.core.coordinator import KVCacheCoordinator
from batchgen.core.kv_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from batchgen.core.single_type import FullAttentionManager, SlidingWindowManager, make_manager
from batchgen.types import Request, SamplingParams

BLOCK = 4


def group(window=None, layer=0):
    return KVCacheGroup(window, (layer,))


def chain(n):
    request = Request(0, list(range(n * BLOCK)), SamplingParams())
    extend_block_hashes(request, BLOCK)
    return request.block_hashes


def manager_with(cached, window=None, num_blocks=20, n=8):
    """A manager in whose index the given blocks of one chain are."""
    pool = BlockPool(num_blocks)
    manager = make_manager(0, group(window), BLOCK, pool, max_chunk=8)
    hashes = chain(n)
    for i in cached:
        [block] = pool.get_new_blocks(1)
        pool.register(block, hashes, i, 0)
    return manager, hashes


def shape(hit):
    return "".join("-" if block.is_null else "x" for block in hit)


def test_full_attention_looks_from_the_left_and_stops_at_the_first_gap():
    manager, hashes = manager_with([0, 1, 3])
    assert isinstance(manager, FullAttentionManager)
    assert shape(manager.find_longest_hit(hashes, 8)) == "xx"
    assert shape(manager.find_longest_hit(hashes, 1)) == "x"
    assert manager.find_longest_hit(hashes, 0) == []


@pytest.mark.parametrize(
    ("window", "cached", "expected"),
    [
        (1, [], "--------"),
        (2, [4], "----x"),
        (5, [0, 1, 4, 7], "-------x"),
        (6, [0, 1, 4, 7], "xx"),
        (6, [3, 4], "---xx"),
        (9, [0, 5], "x"),
        (100, [0, 1, 2, 4, 5], "xxx"),
        (100, [1, 2], ""),
    ],
)
def test_sliding_window_looks_from_the_right_for_as_much_as_it_reads(window, cached, expected):
    """A query at a block border reads the window - 1 positions before it, or all if there are fewer."""
    manager, hashes = manager_with(cached, window)
    assert isinstance(manager, SlidingWindowManager)
    assert shape(manager.find_longest_hit(hashes, 8)) == expected


def test_sliding_window_frees_below_the_window_and_keeps_the_rest():
    manager, _ = manager_with([], window=6)
    manager.open_table(1, [])
    manager.allocate(1, 16)
    for computed, expected in [
        (5, "xxxx"),
        (8, "xxxx"),
        (9, "-xxx"),
        (13, "--xx"),
        (16, "--xx"),
        (17, "---x"),
    ]:
        manager.free_skipped(1, computed)
        assert shape(manager.tables[1].blocks) == expected
    assert manager.pool.num_used == 1
    manager.free(1)
    assert manager.pool.num_used == 0


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 17])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_sliding_sequence_never_holds_more_than_its_peak(window, chunk):
    pool = BlockPool(40)
    manager = make_manager(0, group(window), BLOCK, pool, max_chunk=chunk)
    manager.open_table(1, [])
    for start in range(0, 100, chunk):
        manager.free_skipped(1, start)
        before = pool.num_used
        missing = manager.num_missing_blocks(1, 100)
        stop = min(100, start + chunk)
        manager.allocate(1, stop)
        assert pool.num_used - before <= missing
        assert pool.num_used <= manager.peak_blocks(stop)


def test_a_sliding_sequence_misses_no_more_than_it_has_tokens_left():
    manager, _ = manager_with([], window=100)
    manager.open_table(1, [])
    manager.allocate(1, 16)
    assert manager.num_missing_blocks(1, 16) == 0
    assert manager.num_missing_blocks(1, 17) == 1


def test_a_sliding_sequence_misses_no_more_than_its_peak():
    """Window of 5 and chunks of 8 in blocks of 4: at most 4 blocks at once."""
    manager, _ = manager_with([], window=5)
    manager.open_table(1, [])
    manager.allocate(1, 12)
    assert manager.peak_blocks(1000) == 4
    assert manager.num_missing_blocks(1, 1000) == 1


def coordinator(*windows, num_blocks=40):
    groups = tuple(group(window, i) for i, window in enumerate(windows))
    pool = BlockPool(num_blocks)
    return KVCacheCoordinator(KVCacheConfig(num_blocks, BLOCK, groups), pool, max_chunk=8)


def cache(coordinator, hashes, group, indices):
    for i in indices:
        [block] = coordinator.pool.get_new_blocks(1)
        coordinator.pool.register(block, hashes, i, group)
        coordinator.pool.free_blocks([block])


@pytest.mark.parametrize(
    ("full", "sliding", "expected"),
    [
        (range(6), range(6), 6),
        (range(6), [0, 1, 2], 3),
        (range(2), range(6), 2),
        (range(6), [3], 4),
        (range(5), [4, 2], 5),
        ([1, 2], range(6), 0),
        (range(6), [], 0),
    ],
)
def test_groups_agree_on_the_longest_common_hit(full, sliding, expected):
    both, hashes = coordinator(None, 5), chain(6)
    cache(both, hashes, 0, full)
    cache(both, hashes, 1, sliding)
    hits = both.find_longest_hit(hashes, 6)
    assert [len(hit) for hit in hits] == [expected, expected]


def test_shrinking_for_one_group_may_shrink_another_again():
    """Windows of 5 need the one block before the end: 6 blocks suit the first, 4 the second, 1 both."""
    three, hashes = coordinator(5, 5, None), chain(6)
    cache(three, hashes, 0, [0, 5])
    cache(three, hashes, 1, [0, 3])
    cache(three, hashes, 2, range(6))
    assert [shape(hit) for hit in three.find_longest_hit(hashes, 6)] == ["x", "x", "x"]


def test_hits_of_all_groups_are_taken_before_anything_is_allocated():
    """Else the first group's new block evicts the second group's hit."""
    both, hashes = coordinator(None, None, num_blocks=5), chain(2)
    cache(both, hashes, 1, [0])
    cache(both, hashes, 0, [0])
    hit = both.find_longest_hit(hashes, 1)
    assert both.num_missing_after_hit(hit, 2 * BLOCK) == 4
    both.open_tables(7, hit)
    both.allocate(7, 2 * BLOCK)
    ids = [i for group in both.block_ids(7) for i in group]
    assert sorted(ids) == [1, 2, 3, 4]
    assert [hit[0][0].block_id, hit[1][0].block_id] == [both.block_ids(7)[0][0], both.block_ids(7)[1][0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVCacheSpec(64, 0), "sliding_window: 0"),
        (lambda: KVCacheSpec(0), "page_bytes: 0"),
        (lambda: KVCacheConfig(1, 4, (group(),)), "num_blocks: 1"),
        (lambda: KVCacheConfig(4, 0, (group(),)), "block_size: 0"),
        (lambda: KVCacheConfig(4, 4, ()), "groups: ()"),
    ],
)
def test_impossible_configurations_are_refused(make, message):
    with pytest.raises(ValueError) as info:
        make()
    assert message in str(info.value)
    assert "use" in str(info.value) or "give" in str(info.value)
