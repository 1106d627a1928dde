"""Steps of an engine, captured or not, say which requests begin with the same blocks, and it is true."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, reschedule, run
from hypothesis import given
from hypothesis import strategies as st
from stand_in_gpu import StandInCapture, stand_in_gpu
from tiny_models import oracle, save_tiny_llama

from batchgen.engine.build import Engine
from batchgen.engine.graphs import bucket_sizes, shared_sizes
from batchgen.types import SamplingParams
from batchgen_kernels import AttentionMetadata, AttentionSpec, KVCache
from batchgen_kernels.reference import ReferenceBackend
from batchgen_kernels.shared_prefix import SharingCost

SYSTEM = [[(7 * i + j) % 250 for i in range(40)] for j in range(2)]
PROMPTS = [[*SYSTEM[i % 2], 3 + i, *range(i)] for i in range(6)]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "attention": "reference",
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
}
CHEAP = SharingCost(tile=4, key_bytes=1 << 20, sum_bytes=1, columns=2, processors=1, bandwidth=1e9)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """A reference that asks for shared keys, and reads them by way of the first of a group.

    Of each call with groups, how many members each has and how many keys.
    """
    calls: list[list[tuple[int, int]]] = []
    attend: Callable[..., torch.Tensor] = ReferenceBackend.attend

    def by_way_of_the_first(
        self: ReferenceBackend, query: torch.Tensor, kv: KVCache, meta: AttentionMetadata, *more: Any
    ) -> torch.Tensor:
        if meta.shared is None:
            return attend(self, query, kv, meta, *more)
        meta.check(kv.num_blocks)
        kept, found = meta.block_table.clone(), []
        starts, members = meta.shared.starts.tolist(), meta.shared.members.tolist()
        for group, keys in enumerate(meta.shared.lens.tolist()):
            of_group = members[starts[group] : starts[group + 1]]
            blocks = keys // meta.block_size
            for member in of_group[1:]:
                meta.block_table[member, :blocks] = meta.block_table[of_group[0], :blocks]
            found += [(len(of_group), keys)] if of_group else []
        calls.append(sorted(found))
        out = attend(self, query, kv, meta, *more)
        meta.block_table.copy_(kept)
        return out

    def cost(_: ReferenceBackend, spec: AttentionSpec, *__: Any) -> SharingCost | None:
        return CHEAP if spec.sliding_window is None else None

    monkeypatch.setattr(ReferenceBackend, "attend", by_way_of_the_first)
    monkeypatch.setattr(ReferenceBackend, "sharing", cost)
    return calls


def tokens(engine: Engine, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [s.token_ids for output in run(engine, PROMPTS, sampling) for s in output.samples]


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_those_of_transformers(
    graphs: bool, tmp_path: Path, said: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = StandInCapture()
    stand_in_gpu(monkeypatch, capture)
    folder = save_tiny_llama(tmp_path)
    engine = make_engine(folder, cuda_graphs=graphs, **SETTINGS)
    said.clear()
    want, greedy = oracle(folder, PROMPTS, 20), SamplingParams(max_tokens=20)
    assert tokens(engine, greedy) == want
    assert [(3, 32), (3, 32)] in said
    assert (capture.launched > 0) is graphs
    # Preempted requests come back with other blocks; two at a time share with one other at most.
    for pool, settings in ((80 * 3, {"max_num_seqs": 8}), (400, {"max_num_seqs": 2})):
        driven = reschedule(engine, pool, max_num_batched_tokens=31, **settings)
        assert tokens(driven, greedy) == want
        assert driven.core.scheduler.stats.preemptions > 0 or pool > 240


def test_samples_of_one_prompt_share_it(
    tmp_path: Path, said: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_gpu(monkeypatch, StandInCapture())
    folder = save_tiny_llama(tmp_path)
    forked = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, n=4, seed=1)
    engine = make_engine(folder, cuda_graphs=True, **SETTINGS)
    said.clear()
    got = tokens(engine, forked)
    assert any((4, 32) in groups for groups in said)
    plain = make_engine(folder, cuda_graphs=False, device="cpu", **SETTINGS)
    monkeypatch.setattr(ReferenceBackend, "sharing", lambda *_: None)
    assert got == tokens(plain, forked)


def test_layers_with_a_window_are_told_nothing(
    tmp_path: Path, said: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from families import FAMILIES

    capture = StandInCapture()
    stand_in_gpu(monkeypatch, capture)
    folder = next(f for f in FAMILIES if f.name == "gemma3").save(tmp_path)
    engine = make_engine(folder, cuda_graphs=True, **SETTINGS)
    sharing = engine.core.runner.sharing
    assert None in sharing
    assert CHEAP in sharing
    said.clear()
    got = tokens(engine)
    assert [(3, 32), (3, 32)] in said
    assert capture.launched > 0
    monkeypatch.setattr(ReferenceBackend, "sharing", lambda *_: None)
    assert got == tokens(make_engine(folder, cuda_graphs=False, **SETTINGS))


def test_steps_that_share_nothing_are_launched_as_ever(
    tmp_path: Path, said: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = StandInCapture()
    stand_in_gpu(monkeypatch, capture)
    engine = make_engine(save_tiny_llama(tmp_path), cuda_graphs=True, **SETTINGS)
    sizes = bucket_sizes(8)
    shared = shared_sizes(sizes, [CHEAP], 96)
    # The largest alone, it with the next, then all; those with shared keys beside them.
    of_memory = [len(some) + len(shared_sizes(some, [CHEAP], 96)) for some in (sizes[:1], sizes[:2])]
    assert capture.captured == sum(of_memory) + len(sizes) + len(shared) + sum(of_memory[:1])
    said.clear()
    run(engine, [[5] * 20, [6] * 30, [7] * 40], GREEDY)
    assert capture.launched > 0
    assert said == []


@given(st.integers(1, 2000), st.integers(1, 9000))
def test_sizes_of_steps_that_share(most: int, longest: int) -> None:
    sizes = bucket_sizes(most)
    chosen = shared_sizes(sizes, [None, CHEAP], longest)
    assert set(chosen) <= set(sizes)
    if chosen:
        assert chosen == sorted(chosen, reverse=True)
        assert all(4 * b <= 3 * a for a, b in itertools.pairwise(chosen))
        assert chosen[0] == most
        assert chosen[-1] > 1
    assert shared_sizes(sizes, [None], longest) == []
