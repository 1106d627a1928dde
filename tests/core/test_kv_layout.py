"""The layout of the cache: what lies where, what it costs, and that no layer is in the way of another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.core.kv_layout import GROUP_COST, plan_layout
from batchgen.core.kv_spec import KVCacheSpec, peak_blocks

BLOCK, CHUNK, LONGEST = 16, 64, 2048
pages = st.sampled_from([64, 128, 192, 1024])
windows = st.sampled_from([None, 1, 16, 100, 512, 5000])


def plan(specs, max_tokens=LONGEST):
    return plan_layout(specs, block_size=BLOCK, max_chunk=CHUNK, max_tokens=max_tokens)


def hybrid(full, sliding, full_page=1024, sliding_page=1024, window=512):
    """Layers as in gemma: one that sees everything after every few with a window."""
    period = (full + sliding) // full
    specs = [
        KVCacheSpec(full_page) if i % period == period - 1 else KVCacheSpec(sliding_page, window)
        for i in range(full + sliding)
    ]
    assert sum(spec.sliding_window is None for spec in specs) == full
    return specs


@st.composite
def models(draw):
    """Up to 24 layers; a reader's page is its source's, as its keys and values are."""
    specs = []
    for i in range(draw(st.integers(1, 24))):
        owners = [j for j in range(i) if specs[j].source is None]
        if owners and draw(st.integers(0, 3)) == 0:
            source = draw(st.sampled_from(owners))
            specs.append(KVCacheSpec(specs[source].page_bytes, draw(windows), source))
        else:
            specs.append(KVCacheSpec(draw(pages), draw(windows)))
    return specs


@settings(deadline=None)
@given(models(), st.sampled_from([32, 600, LONGEST]))
def test_every_layer_has_its_place_and_shares_it_with_nobody_of_its_group(specs, max_tokens):
    layout = plan(specs, max_tokens)
    owners = [i for i, spec in enumerate(specs) if spec.source is None]
    assert sorted(layer for group in layout.groups for layer in group.layers) == owners
    for g, group in enumerate(layout.groups):
        taken = set()
        for layer in group.layers:
            place = layout.places[layer]
            assert place.group == g
            end = place.offset + specs[layer].page_bytes
            assert end <= layout.buffers[place.buffer]
            units = {(place.buffer, byte) for byte in range(place.offset, end, 64)}
            assert not taken & units, "two layers of a group in one place"
            taken |= units
        assert layout.padding(g) == layout.block_bytes - 64 * len(taken) >= 0
    for i, spec in enumerate(specs):
        assert layout.places[i] == layout.places[i if spec.source is None else spec.source]


@settings(deadline=None)
@given(models())
def test_a_group_keeps_what_the_farthest_looking_of_its_readers_sees(specs):
    layout = plan(specs)
    for i, spec in enumerate(specs):
        reach = [
            s.sliding_window or LONGEST
            for j, s in enumerate(specs)
            if i in (j, s.source) and spec.source is None
        ]
        if reach:
            kept = layout.groups[layout.places[i].group].sliding_window
            assert kept == (max(reach) if max(reach) < LONGEST else None)


def needed(specs, num_tokens):
    """Memory of the keys and values of a sequence alone, each layer by itself."""
    reach = {i: [spec.sliding_window] for i, spec in enumerate(specs) if spec.source is None}
    for spec in specs:
        if spec.source is not None:
            reach[spec.source].append(spec.sliding_window)
    return sum(
        specs[i].page_bytes * max(peak_blocks(window, num_tokens, BLOCK, CHUNK) for window in windows)
        for i, windows in reach.items()
    )


@settings(deadline=None)
@given(models())
def test_never_more_memory_than_a_buffer_for_each_layer(specs):
    layout = plan(specs)
    kinds = {layout.groups[place.group].sliding_window for place in layout.places}
    own = sum(spec.page_bytes for spec in specs if spec.source is None)
    assert layout.block_bytes <= own
    # A group is given up for a little memory, never for much: one of each kind, side by side, is no better.
    chosen, apart = (
        max(memory(n) / needed(specs, n) for n in (BLOCK, LONGEST))
        for memory in (
            lambda n: layout.block_bytes * layout.peak_blocks(n, BLOCK, CHUNK),
            lambda n: own * sum(peak_blocks(kind, n, BLOCK, CHUNK) for kind in kinds),
        )
    )
    assert chosen + GROUP_COST * len(layout.groups) <= apart + GROUP_COST * len(kinds) + 1e-9


def overhead(specs, num_tokens):
    """Memory of a sequence over that of its keys and values alone."""
    layout = plan(specs)
    return layout.block_bytes * layout.peak_blocks(num_tokens, BLOCK, CHUNK) / needed(specs, num_tokens)


@pytest.mark.parametrize(
    ("specs", "groups", "block_bytes"),
    [
        ([KVCacheSpec(1024)] * 32, 1, 32 * 1024),
        ([KVCacheSpec(1024, 512)] * 32, 1, 32 * 1024),
        ([KVCacheSpec(1024, 4096)] * 32, 1, 32 * 1024),
        (hybrid(13, 13), 2, 13 * 1024),
        (hybrid(12, 12, window=128), 2, 12 * 1024),
        (hybrid(5, 25), 6, 5 * 1024),
        (hybrid(5, 25, full_page=2048), 4, 10 * 1024),
        ([KVCacheSpec(1024), KVCacheSpec(192, 512), KVCacheSpec(512)], 2, 1536),
    ],
    ids=["full", "sliding", "long window", "gemma2", "gpt_oss", "gemma3", "gemma4", "odd"],
)
def test_known_shapes(specs, groups, block_bytes):
    layout = plan(specs)
    assert (len(layout.groups), layout.block_bytes) == (groups, block_bytes)


@pytest.mark.parametrize("full_page", [512, 1024, 2048, 3072])
@pytest.mark.parametrize(("full", "sliding"), [(4, 22), (3, 15), (10, 52), (5, 25), (1, 11), (8, 8)])
@pytest.mark.parametrize("num_tokens", [BLOCK, 700, LONGEST])
def test_hybrids_take_little_more_than_they_need(full, sliding, full_page, num_tokens):
    specs = [KVCacheSpec(full_page)] * full + [KVCacheSpec(1024, 512)] * sliding
    assert overhead(specs, num_tokens) <= 1.2


def test_full_attention_is_asked_first_for_a_prefix():
    layout = plan([KVCacheSpec(64, 5), KVCacheSpec(64, 9), KVCacheSpec(64)])
    assert layout.groups[0].sliding_window is None


def test_pages_of_equal_size_are_stacked_and_others_laid_in_a_row():
    assert [tuple(p) for p in plan(hybrid(2, 2)).places] == [(1, 0, 0), (0, 0, 0), (1, 1, 0), (0, 1, 0)]
    odd = plan([KVCacheSpec(1024), KVCacheSpec(640, 16), KVCacheSpec(384, 16)])
    assert odd.buffers == (1024,)
    assert [tuple(p) for p in odd.places] == [(0, 0, 0), (1, 0, 0), (1, 0, 640)]
