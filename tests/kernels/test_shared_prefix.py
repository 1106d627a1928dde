"""Which sequences share keys, and when attending to those once is chosen: without a kernel."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_kernels import AttentionMetadata
from batchgen_kernels.shared_prefix import (
    LAUNCH_SECONDS,
    WAIT_SECONDS,
    SharedGroup,
    SharingCost,
    choose_groups,
    find_groups,
    most_groups,
    pack_groups,
)

H100_LLAMA_8B = SharingCost(
    tile=16, key_bytes=4096, sum_bytes=8 * 32 * 128, columns=8, processors=132, bandwidth=3.35e12
)
"""As `tiles.sharing_cost` says of bfloat16, which `interpreted/triton_shared.py` checks."""
FREE = SharingCost(tile=64, key_bytes=1 << 30, sum_bytes=0, columns=1, processors=1, bandwidth=1e12)


def group(count: int, keys: int) -> SharedGroup:
    return SharedGroup(range(count), keys)


def test_the_time_that_one_group_saves() -> None:
    """64 sequences of 2,048 keys of 4 KiB: 537 MB by each, a sixteenth of that together."""
    cost = H100_LLAMA_8B
    assert cost.splits(64, 2048) == 4, "four tiles for each of eight heads, on 132 processors"
    read = 64 * 2048 * 4096 / 2 / 3.35e12
    slowest = 2048 * 132 / (4 * 8) * 4096 / 2 / 3.35e12
    sums = 8 * 64 * 4 * 32 * 128 / 3.35e12
    saved = read - slowest - sums - LAUNCH_SECONDS - 4 * WAIT_SECONDS
    assert cost.seconds_saved([group(64, 2048)], 64) == pytest.approx(saved)
    assert saved == pytest.approx(67e-6, rel=0.02)


@pytest.mark.parametrize(
    ("count", "keys", "chosen"),
    [(2, 256, False), (8, 512, False), (8, 4096, True), (64, 16, False), (64, 256, True), (256, 64, True)],
)
def test_what_is_chosen_on_an_h100(count: int, keys: int, chosen: bool) -> None:
    assert (H100_LLAMA_8B.seconds_saved([group(count, keys)], count) > 0) is chosen


def test_many_small_groups_pay_where_one_would_leave_most_processors_idle() -> None:
    cost = H100_LLAMA_8B
    assert cost.seconds_saved([group(8, 512)], 256) < 0
    assert cost.seconds_saved([group(8, 512)] * 32, 256) > 0
    assert cost.seconds_saved([], 256) == 0


def test_a_group_in_tiles_of_one_sequence_never_pays() -> None:
    cost = replace(H100_LLAMA_8B, tile=1, columns=1)
    assert not cost.pays(group(64, 9000), 64)
    assert H100_LLAMA_8B.pays(group(64, 9000), 64)
    assert not H100_LLAMA_8B.pays(group(2, 16), 64)


@given(st.integers(1, 600), st.integers(1, 40_000), st.integers(1, 64), st.integers(1, 128))
def test_splits_give_each_processor_one_program_and_each_split_enough_keys(
    sequences: int, longest: int, tile: int, columns: int
) -> None:
    splits = replace(H100_LLAMA_8B, tile=tile, columns=columns).splits(sequences, longest)
    assert splits == 1 or splits * columns * -(-sequences // tile) <= 132
    assert splits == 1 or (splits - 1) * 256 < longest
    assert 1 <= splits <= 16


def step(*parts: tuple[list[int], int]) -> tuple[list[list[int]], list[int]]:
    """Tables of the given first blocks and one block of its own, with so many keys in that."""
    tables = [[*first, 1000 + i] for i, (first, _) in enumerate(parts)]
    return tables, [16 * len(first) + own for first, own in parts]


def found(tables: list[list[int]], lens: list[int]) -> set[tuple[tuple[int, ...], int]]:
    return {(tuple(sorted(members)), keys) for members, keys in find_groups(tables, lens, 16)}


def test_sequences_are_found_wherever_they_stand() -> None:
    one, two = [1, 2, 3], [7, 8]
    assert found(*step((one, 3), (two, 1), ([5], 9), (one, 16), (two, 2), ([6, 2, 3], 4))) == {
        ((0, 3), 48),
        ((1, 4), 32),
    }


def test_the_block_of_the_last_key_is_not_shared() -> None:
    table = [1, 2, 3, 4]
    for length, keys in ((48, 32), (49, 48), (64, 48)):
        assert found([table] * 3, [length] * 3) == {((0, 1, 2), keys)}
    assert found([table] * 3, [16] * 3) == set()
    assert found([table, table, []], [49, 33, 49]) == {((0, 1), 32)}


def test_a_group_ends_where_more_would_share_less() -> None:
    system, deep = [1], [1, 2, 3, 4, 5, 6]
    assert found(*step((deep, 1), (deep, 1), (deep, 1), ([1, 9], 1))) == {((0, 1, 2), 96)}
    many = [([*system, 100 + i], 1) for i in range(20)]
    assert found(*step(*many, (deep, 1), (deep, 1))) == {(tuple(range(20)), 16), ((20, 21), 96)}
    # Two blocks for two are as much as one block for three.
    assert found(*step(*many, (deep[:2], 1), (deep[:2], 1))) == {(tuple(range(22)), 16)}


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), max_size=12),
    st.data(),
)
def test_groups_are_of_equal_blocks_before_the_last_key(tables: list[list[int]], data: st.DataObject) -> None:
    lens = [data.draw(st.integers(1, 16 * len(table))) for table in tables]
    seen: set[int] = set()
    for members, keys in find_groups(tables, lens, 16):
        assert len(members) > 1
        assert not seen & set(members)
        seen |= set(members)
        assert keys % 16 == 0 < keys
        assert len({tuple(tables[s][: keys // 16]) for s in members}) == 1
        assert all(lens[s] > keys for s in members)
    # Who is alone has no other like it, or would make a group worse.
    alone = [tuple(t) for s, (t, n) in enumerate(zip(tables, lens, strict=True)) if s not in seen and n > 16]
    assert len({table[0] for table in alone}) >= len(alone) - 2 * len(seen)


def test_at_most_as_many_groups_as_a_captured_step_has_room_for() -> None:
    tables, lens = step(*[([50 + i // 2] * (1 + i // 2), 1) for i in range(16)])
    chosen = choose_groups(tables, lens, 16, FREE, 16)
    assert [keys for _, keys in chosen] == [128, 112, 96, 80]
    assert most_groups(16) == 4
    assert len(choose_groups(tables, lens, 16, FREE)) == 8
    assert choose_groups(tables, lens, 16, replace(FREE, bandwidth=1e30)) == []
    assert [most_groups(n) for n in (1, 3, 512)] == [1, 1, 128]


def test_what_kernels_are_given() -> None:
    groups = [SharedGroup([4, 1], 32), SharedGroup([0, 5, 2], 16)]
    members, starts, lens, count, skipped = (array.tolist() for array in pack_groups(groups, 6))
    assert (members, starts, lens, count) == ([4, 1, 0, 5, 2], [0, 2, 5], [32, 16], [2])
    assert skipped == [16, 32, 16, 0, 32, 16]
    wide = pack_groups(groups, 12, fixed=True)
    assert [array.shape for array in wide] == [array.shape for array in pack_groups([], 12, fixed=True)]
    assert wide[1].tolist() == [0, 2, 5, 5]
    assert wide[2].tolist() == [32, 16, 0]
    assert wide[3].tolist() == [2]
    assert {array.dtype for array in wide} == {np.dtype(np.int32)}


def metadata(groups: list[SharedGroup], **changed: Any) -> AttentionMetadata:
    given: dict[str, Any] = {
        "query_lens": [1, 1, 1, 2],
        "seq_lens": [40, 50, 40, 40],
        "block_tables": [[1, 2, 3], [1, 2, 4, 5], [6, 7, 8], [1, 2, 9]],
    }
    return AttentionMetadata.build(**given | changed, block_size=16, groups=groups)


def test_groups_are_checked_where_they_are_on_the_host() -> None:
    metadata([SharedGroup([1, 0], 32), SharedGroup([2], 16)]).check(10)
    for groups, said in (
        ([SharedGroup([0, 2], 16)], "group 0 has members with other blocks"),
        ([SharedGroup([0, 1], 24)], "group 0 shares 24 keys, not whole blocks"),
        ([SharedGroup([0, 3], 32)], "group 0 of 32 keys cannot have sequence 3"),
        ([SharedGroup([0, 1], 16), SharedGroup([0, 1], 16)], "group 1 of 16 keys cannot have sequence 0"),
    ):
        with pytest.raises(ValueError, match=said):
            metadata(groups).check(10)
    with pytest.raises(ValueError, match="group 0 of 32 keys cannot have sequence 0"):
        metadata([SharedGroup([0, 1], 32)], seq_lens=[32, 50, 40, 40]).check(10)
    meta = metadata([SharedGroup([0, 1], 32)])
    assert meta.shared is not None
    meta.shared.count[0] = 0
    with pytest.raises(ValueError, match="0 groups are said to have members"):
        meta.check(10)
    for number, value, said in (
        (3, 16, "sequences \\[3\\] skip keys"),
        (0, 16, "group 0 of 32 keys cannot have sequence 0"),
    ):
        meta = metadata([SharedGroup([0, 1], 32)])
        assert meta.shared is not None
        meta.shared.skipped[number] = value
        with pytest.raises(ValueError, match=said):
            meta.check(10)


def test_pairs_are_found_among_many() -> None:
    tables, lens = step(*[([i // 2 + 1, 99], 1) for i in range(40)])
    assert found(tables, lens) == {((2 * i, 2 * i + 1), 32) for i in range(20)}
    pairs = list(itertools.pairwise(find_groups(tables, lens, 16)))
    assert len(pairs) == 19
