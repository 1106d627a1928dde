"""The cache manager's promises, one at a time; its state machine does the rest."""

from __future__ import annotations

import pytest

from batchgen.core.kv_cache_manager import KVCacheManager
from batchgen.core.kv_spec import KVCacheConfig, KVCacheGroup
from batchgen.types import Request, SamplingParams


def make(num_blocks=10, block_size=4, windows=(None,), prefix_caching=True):
    groups = tuple(KVCacheGroup(window, (i,)) for i, window in enumerate(windows))
    config = KVCacheConfig(num_blocks, block_size, groups)
    return KVCacheManager(config, prefix_caching=prefix_caching, max_chunk=64)


def row(request_id, tokens):
    return Request(request_id, list(tokens), SamplingParams())


def admit(manager, request, num_new=None, **kwargs):
    """Whether it was admitted."""
    hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - hit.num_tokens if num_new is None else num_new
    if manager.allocate_slots(request, num_new, hit, **kwargs) is None:
        return False
    request.num_computed_tokens = hit.num_tokens + num_new
    manager.register(request, request.num_computed_tokens)
    return True


def test_a_lookup_finds_what_was_registered_and_never_the_last_token():
    manager = make()
    admit(manager, row(0, range(8)))
    assert manager.get_computed_blocks(row(1, range(8))).num_tokens == 4
    assert manager.get_computed_blocks(row(2, range(9))).num_tokens == 8
    assert manager.get_computed_blocks(row(3, range(1, 9))).num_tokens == 0


def test_only_full_blocks_are_registered():
    manager = make()
    request = row(0, range(11))
    admit(manager, request, num_new=7)
    assert len(manager.pool.index) == 1
    assert manager.allocate_slots(request, 4) == []
    request.num_computed_tokens = 11
    assert [block.block_id for block in manager.register(request, 11)] == [2]
    assert manager.register(request, 11) == []


def test_an_admission_counts_all_known_tokens_hits_and_headroom():
    manager = make(num_blocks=7)
    first = row(0, range(16))
    admit(manager, first)
    manager.free(first)
    assert manager.pool.num_free == 6
    assert not admit(manager, row(1, range(25)), num_new=1)
    assert not admit(manager, row(2, range(17)), headroom=2)
    assert admit(manager, row(3, range(17)), headroom=1)
    manager.check()


def test_a_refusal_is_repeated_until_blocks_are_free():
    manager = make(num_blocks=4)
    first, second = row(0, range(8)), row(1, range(100, 108))
    assert admit(manager, first)
    assert not admit(manager, second)
    manager.free(first)
    assert admit(manager, second)
    manager.check()


def test_growing_takes_a_block_only_at_a_border():
    manager = make(num_blocks=3)
    request = row(0, range(6))
    admit(manager, request)
    request.output_token_ids += [1, 2, 3]
    assert manager.allocate_slots(request, 2) == []
    assert manager.allocate_slots(request, 3) is None
    assert [list(ids) for ids in manager.block_ids(request)] == [[1, 2]]


def test_three_forks_make_two_copies_and_the_last_writes_in_place():
    manager = make(num_blocks=6)
    parent, a, b = row(0, range(6)), row(1, range(7)), row(2, range(7))
    admit(manager, parent)
    for child in (a, b):
        assert manager.fork(parent, child)
        child.num_computed_tokens = 6
    assert (manager.num_reserved, manager.num_available) == (2, 1)
    parent.output_token_ids.append(9)
    assert manager.allocate_slots(a, 1) == [(2, 3)]
    assert manager.allocate_slots(parent, 1) == [(2, 4)]
    assert manager.allocate_slots(b, 1) == []
    assert (manager.num_reserved, manager.num_available) == (0, 1)
    assert [list(ids) for ids in manager.block_ids(b)] == [[1, 2]]
    manager.check()


def test_a_fork_at_a_block_border_needs_no_copy():
    manager = make(num_blocks=4)
    parent, child = row(0, range(8)), row(1, range(9))
    admit(manager, parent)
    assert manager.fork(parent, child)
    child.num_computed_tokens = 8
    assert manager.num_reserved == 0
    assert manager.allocate_slots(child, 1) == []
    assert [list(ids) for ids in manager.block_ids(child)] == [[1, 2, 3]]
    manager.check()


def test_a_fork_at_a_block_border_needs_no_free_block():
    manager = make(num_blocks=3)
    parent, child = row(0, range(8)), row(1, range(9))
    admit(manager, parent)
    assert manager.fork(parent, child)
    child.num_computed_tokens = 8
    assert manager.num_available == 0
    manager.check()


def test_a_fork_does_not_inherit_names_of_tokens_it_does_not_have():
    """The parent's sampled token fills block 1, so its chain is longer than what both share."""
    manager = make()
    parent = row(0, range(7))
    admit(manager, parent)
    parent.output_token_ids.append(99)
    manager.get_computed_blocks(parent)
    assert len(parent.block_hashes) == 2
    child = row(1, range(8))
    manager.fork(parent, child)
    assert len(child.block_hashes) == 1


def test_a_fork_is_refused_when_its_copy_has_no_block():
    manager = make(num_blocks=3)
    parent = row(0, range(6))
    admit(manager, parent)
    assert not manager.fork(parent, row(1, range(7)))
    manager.check()


def test_groups_copy_their_own_partial_blocks():
    manager = make(windows=(None, 3))
    parent, child = row(0, range(6)), row(1, range(7))
    admit(manager, parent)
    manager.fork(parent, child)
    child.num_computed_tokens = 6
    assert manager.num_reserved == 2
    copies = manager.allocate_slots(child, 1)
    assert [source for source, _ in copies] == [ids[1] for ids in manager.block_ids(parent)]
    assert [destination for _, destination in copies] == [ids[1] for ids in manager.block_ids(child)]
    assert manager.block_ids(child)[1][0] == manager.pool.null_block.block_id
    manager.check()


def test_eviction_from_a_position_finds_holders_of_equal_and_later_blocks():
    manager = make(num_blocks=20)
    bad, longer, head, apart = row(0, range(8)), row(1, range(13)), row(2, range(5)), row(3, range(50, 60))
    for request in (bad, longer, head, apart):
        admit(manager, request)
    assert manager.evict_from(bad, 4) == [longer]
    left = [manager.get_computed_blocks(row(9, tokens)).num_tokens for tokens in (range(13), range(50, 60))]
    assert left == [4, 8]


@pytest.mark.parametrize("windows", [(5,), (None, 5), (3, 9)], ids=["window", "hybrid", "windows"])
def test_what_a_bad_row_did_not_write_stays_cached(windows):
    """In a sliding group too, where the blocks between a row's beginning and its end are long gone."""
    manager = make(num_blocks=60, windows=windows)
    bad, apart, longer, early = row(0, range(8)), row(1, range(50, 70)), row(2, range(21)), row(3, range(4))
    for request in (early, apart, bad, longer):
        admit(manager, request)
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
    admit(manager, bad)
    assert manager.evict_from(bad, 4) == []
    manager.free(bad)

    def hit(tokens):
        return manager.get_computed_blocks(row(9, tokens)).num_tokens

    assert hit(range(50, 80)) == 20
    assert hit(range(30)) == 4
    manager.check()


def test_a_row_that_no_longer_holds_what_it_read_of_a_bad_one_is_a_sharer():
    manager = make(num_blocks=20, windows=(2,))
    bad, follower, apart = row(0, range(8)), row(1, range(9)), row(2, range(50, 59))
    for request in (bad, follower, apart):
        admit(manager, request)
        request.output_token_ids += [1, 2]
        assert manager.allocate_slots(request, 1) == []
    named = {block.block_id for _, block in manager.pool.index}
    assert named.isdisjoint(*manager.block_ids(follower))
    assert manager.evict_from(bad, 0) == [follower]


def test_the_null_block_does_not_make_a_sharer():
    manager = make(num_blocks=20, windows=(3,), prefix_caching=False)
    bad, apart = row(0, range(9)), row(1, range(50, 59))
    for request in (bad, apart):
        admit(manager, request)
        request.output_token_ids.append(1)
        manager.allocate_slots(request, 1)
        assert manager.block_ids(request)[0][0] == 0
    assert manager.evict_from(bad, 0) == []


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_all_blocks_come_back(prefix_caching):
    manager = make(num_blocks=20, prefix_caching=prefix_caching, windows=(None, 4))
    requests = [row(0, range(6)), row(1, range(9))]
    assert [admit(manager, request) for request in requests] == [True, True]
    manager.check()
    for request in requests:
        manager.free(request)
    assert manager.pool.num_free == manager.pool.num_usable
    manager.check()


@pytest.mark.parametrize("damage", ["ref", "ids", "name", "orphan", "table"])
def test_check_finds_damage(damage):
    manager = make()
    request = row(0, range(9))
    admit(manager, request)
    manager.check()
    table = manager.coordinator.managers[0].tables[0]
    if damage == "ref":
        table.blocks[0].ref_cnt += 1
    elif damage == "ids":
        table.ids[0] = 7
    elif damage == "name":
        table.num_registered = 0
    elif damage == "orphan":
        manager.pool.unregister(table.blocks[0])
    else:
        manager.requests[1] = row(1, [1])
    with pytest.raises(AssertionError):
        manager.check()
