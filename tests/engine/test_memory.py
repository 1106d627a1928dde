"""Sizing the pool: what is capped, what is refused, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.core.kv_layout import plan_layout
from batchgen.core.kv_spec import KVCacheSpec
from batchgen.engine.memory import Budget, CacheShape, available_memory, plan_memory
from batchgen.types import UsageError

KIB = 1024


def shape(*specs: KVCacheSpec, block_size: int = 16, max_chunk: int = 64) -> CacheShape:
    layout = plan_layout(specs, block_size=block_size, max_chunk=max_chunk, max_tokens=1024)
    return CacheShape(layout, block_size, max_chunk)


def plan(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "shape": shape(KVCacheSpec(16 * KIB)),
        "context": 1024,
        "max_model_len": None,
        "max_num_seqs": 4,
        "kv_cache_memory": None,
        "budget": budget(),
    }
    return plan_memory(**{**given, **changes})


def budget(available: int = 1024**3, step: int = 0) -> Budget:
    return Budget(available, 513 * 2**20, step, "512 tokens, 64 sampled")


def test_never_more_than_all_sequences_need() -> None:
    assert plan().num_blocks == 4 * 64 + 1


def test_a_large_need_is_capped_by_what_is_there() -> None:
    assert plan(max_num_seqs=4096).num_blocks == 1024**3 // 4 // (16 * KIB)


def test_context_is_capped_by_memory_when_not_asked_for() -> None:
    small = plan(kv_cache_memory=33 * 16 * KIB)
    assert (small.num_blocks, small.max_model_len) == (33, 512)


def test_what_was_asked_for_and_does_not_fit_is_refused_with_the_knob() -> None:
    with pytest.raises(UsageError, match=r"raise engine\.kv_cache_memory or lower model\.max_model_len"):
        plan(kv_cache_memory=33 * 16 * KIB, max_model_len=513)


def test_one_long_sequence_may_take_more_than_the_automatic_share() -> None:
    roomy = plan(context=10**6, max_model_len=500_000)
    assert (roomy.num_blocks - 1) * 16 >= 500_000


def test_the_table_names_the_figures() -> None:
    assert "257 blocks of 16 tokens" in plan().table()[3]


def test_the_table_adds_up() -> None:
    table = plan(budget=budget(2**30, 24 * 2**20)).table()
    assert [line.split()[:3] for line in table[1:5]] == [
        ["weights", "513", "loaded"],
        ["largest", "step", "24"],
        ["KV", "cache", "4"],
        ["left", "996", "of"],
    ]


def test_what_scoring_needs_has_a_line_and_is_not_given_to_the_cache() -> None:
    given = Budget(2**30, 513 * 2**20, 24 * 2**20, "512 tokens, 64 sampled", 100 * 2**20)
    table = plan(budget=given).table()
    assert table[3] == "  scoring            100  logits and log-softmax of scored tokens"
    assert table[5].split()[:2] == ["left", "896"]
    lean = Budget(2**30, 0, 2**28, "", 2**28)
    assert plan(budget=lean, max_num_seqs=4096).num_blocks == 2**29 // 4 // (16 * KIB)


def test_what_a_step_needs_is_not_given_to_the_cache() -> None:
    lean = plan(budget=budget(2**30, 2**29), max_num_seqs=4096)
    assert lean.num_blocks == 2**29 // 4 // (16 * KIB)


def test_available_memory_is_plausible() -> None:
    assert 0 < available_memory() < 2**50


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_model_len": 2048}, r"model\.max_model_len: 2,048 is more than the 1,024 tokens"),
        ({"kv_cache_memory": 2 * 1024**3}, r"engine\.kv_cache_memory: 2,147,483,648 bytes are asked for"),
        ({"budget": budget(50 * KIB)}, r"one sequence of 16 tokens needs"),
        (
            {"budget": budget(2**20, 2**20)},
            r"engine\.max_num_batched_tokens: the largest step \(512 tokens, 64 sampled\) needs 1,048,576 "
            r"bytes and 1,048,576 are available; lower it or engine\.max_num_seqs",
        ),
        (
            {"budget": budget(2**30, 2**20), "kv_cache_memory": 2**30},
            r"1,073,741,824 bytes are asked for and 1,072,693,248 are available beside a step",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan(**changes)


def test_a_size_that_was_asked_for_is_taken() -> None:
    assert plan(kv_cache_memory=1000 * 16 * KIB, max_num_seqs=1).num_blocks == 1000


def test_a_context_shortened_by_memory_is_told() -> None:
    assert "longer rows than 512 become errors" in plan(kv_cache_memory=33 * 16 * KIB).table()[-1]


def test_one_short_sequence_fits() -> None:
    assert plan(max_model_len=8).max_model_len == 8


def hybrid() -> CacheShape:
    return shape(KVCacheSpec(4 * KIB), *[KVCacheSpec(4 * KIB, 100)] * 3)


def test_a_window_takes_what_it_and_a_chunk_hold_and_no_more() -> None:
    """100 + 64 - 1 positions lie in at most 12 blocks of 16, in each of three groups."""
    sliding = shape(KVCacheSpec(4 * KIB, 100))
    assert [sliding.blocks(n) for n in (16, 160, 192, 1024)] == [1, 10, 12, 12]
    assert hybrid().blocks(1024) == 64 + 3 * 12
    assert plan(shape=hybrid(), max_num_seqs=4).num_blocks == 4 * (64 + 3 * 12) + 1


@pytest.mark.parametrize("blocks", [11, 12, 37, 60, 100, 500])
def test_the_longest_sequence_is_the_longest_that_fits(blocks: int) -> None:
    longest = hybrid().longest(blocks, 1024)
    assert hybrid().blocks(longest) <= blocks
    assert longest == 1024 or hybrid().blocks(longest + 1) > blocks


def test_a_pool_much_smaller_than_a_sequence_suffices_for_windows_alone() -> None:
    sliding = shape(KVCacheSpec(4 * KIB, 100))
    assert plan(shape=sliding, kv_cache_memory=13 * 4 * KIB).max_model_len == 1024
    with pytest.raises(UsageError, match=r"49,152 bytes hold 176 tokens, but one sequence of 1,024 tokens"):
        plan(shape=sliding, kv_cache_memory=12 * 4 * KIB, max_model_len=1024)


def test_the_table_says_what_each_kind_of_layer_keeps() -> None:
    assert plan(shape=hybrid()).table()[5:7] == [
        "  layers that keep all tokens: 1 (groups: 1), at most 64 blocks a sequence, 0% padding",
        "  layers that keep the last 100 tokens: 3 (groups: 3), at most 36 blocks a sequence, 0% padding",
    ]
