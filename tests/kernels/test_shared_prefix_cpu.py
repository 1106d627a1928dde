"""Rows that see the same blocks are given them together: which these are, and that no bit depends on it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_kernels_cpu import BASE, KV_DTYPES, Cache, History, whole

from batchgen_kernels import AttentionMetadata, AttentionSpec
from batchgen_kernels.cpu import CpuBackend, plan
from batchgen_kernels.cpu.plan import Plan, make_plan
from batchgen_kernels.cpu.simd import TILE

SPECS = [
    BASE,
    replace(BASE, num_heads=3, num_kv_heads=3, softcap=5.0),
    replace(BASE, num_heads=7, num_kv_heads=1, has_sinks=True, v_head_size=20),
    replace(BASE, sliding_window=70),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def family(spec: AttentionSpec, common: int, own: list[int]) -> list[History]:
    """Histories that are the same up to position `common`."""
    root = History.make(spec, common, 99)
    tails = [History.make(spec, n, seed) for seed, n in enumerate(own)]
    return [
        History(*(torch.cat([getattr(h, name) for h in (root, tail)]) for name in ("query", "key", "value")))
        for tail in tails
    ]


def shared_step(
    spec: AttentionSpec,
    common: int,
    lengths: list[tuple[int, int]],
    block_size: int = 16,
    kv_dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A step of sequences whose first `common` positions lie in the same blocks, and each alone."""
    backend = CpuBackend()
    sinks = torch.linspace(-1, 2, spec.num_heads) if spec.has_sinks else None
    histories = family(spec, common, [sum(n) for n in lengths])
    blocks = 1 + common // block_size + sum(-(-sum(n) // block_size) for n in lengths)
    cache = Cache.make(backend, spec, block_size, blocks, kv_dtype=kv_dtype)
    root = cache.table(common)
    tables = [root + cache.table(sum(n)) for n in lengths]
    cache.step([(histories[0], root, 0, common)], sinks)
    earlier = [
        (h, t, common, common + n[0]) for h, t, n in zip(histories, tables, lengths, strict=True) if n[0]
    ]
    if earlier:
        cache.step(earlier, sinks)
    now = [(h, t, common + n[0], common + sum(n)) for h, t, n in zip(histories, tables, lengths, strict=True)]
    alone = [
        whole(backend, spec, h, block_size, sinks, kv_dtype)[common + n[0] :]
        for h, n in zip(histories, lengths, strict=True)
    ]
    return cache.step(now, sinks), alone


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SPECS),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 80), st.sampled_from([1, 1, 1, 2, 17])), min_size=9, max_size=20),
    st.sampled_from([16, 32, 48]),
    st.sampled_from(KV_DTYPES),
)
def test_bits_do_not_depend_on_who_shares_blocks(
    spec: AttentionSpec,
    tiles: int,
    lengths: list[tuple[int, int]],
    block_size: int,
    kv_dtype: torch.dtype,
) -> None:
    common = -(-tiles * TILE // block_size) * block_size
    together, alone = shared_step(spec, common, lengths, block_size, kv_dtype)
    for got, want in zip(together, alone, strict=True):
        assert torch.equal(got, want)


def test_a_tile_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(70 + i, 1) for i in range(20)]
    together, alone = shared_step(BASE, 128, lengths)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    right = plan._common_tiles
    monkeypatch.setattr(plan, "_common_tiles", lambda *a: right(*a) + 1)
    together, alone = shared_step(BASE, 128, lengths)
    assert not all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def planned(tables: list[list[int]], lens: list[int], rows: list[int], spec: AttentionSpec = BASE) -> Plan:
    meta = AttentionMetadata.build(rows, lens, tables, 16)
    return make_plan(meta, spec, 1, 48, TILE)


def test_sequences_with_the_same_first_blocks_are_teams_wherever_they_stand() -> None:
    roots = [list(range(1, 9)), list(range(11, 19))]
    tables = [roots[i % 2] + [100 + i] for i in range(24)]
    made = planned(tables, [130] * 24, [1] * 24)
    assert all(common == 2 for *_, common in made.teams.tolist())
    for first, end, _ in made.teams.tolist():
        assert len({seq % 2 for seq in made.units[first:end, 0].tolist()}) == 1
    # Enough are left for each thread to have something to do.
    assert len(made.chunks) == 2 * 4
    assert made.largest_team == 6 * BASE.group_size


def test_a_tile_that_a_row_does_not_see_whole_or_that_is_its_last_is_not_shared() -> None:
    table = list(range(1, 9))
    for length, shared in ((64, 0), (65, 1), (127, 1), (128, 1)):
        made = planned([table] * 12, [length] * 12, [1] * 12)
        assert {common for *_, common in made.teams.tolist()} == {shared}


def test_layers_with_a_window_and_few_sequences_are_left_as_they_are() -> None:
    table = list(range(1, 9))
    window = planned([table] * 12, [128] * 12, [1] * 12, replace(BASE, sliding_window=500))
    few = planned([table] * 4, [128] * 4, [1] * 4)
    for made in (window, few):
        assert made.teams[:, 2].tolist() == [0] * len(made.units)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 8), st.data())
def test_teams_are_neighbours_and_save_as_many_readings_as_each_member_allows(
    common: list[int], most: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(1, 3), min_size=len(common) + 1, max_size=len(common) + 1))
    units = np.zeros((len(tokens), 4), dtype=np.int64)
    units[:, 2] = tokens
    teams = plan._teams(units, np.array(common, dtype=np.int64), 8, most).tolist()
    assert [first for first, *_ in teams] == [0, *(end for _, end, _ in teams[:-1])]
    assert teams[-1][1] == len(tokens)
    for first, end, tiles in teams:
        links = common[first : end - 1]
        assert tiles == (min(links) if links else 0)
        assert end - first <= max(1, most)
        assert end - first == 1 or sum(tokens[first:end]) <= 8
        saved = [n * min(links[:n]) for n in range(1, len(links) + 1)]
        assert all(later >= earlier for earlier, later in itertools.pairwise(saved))
