"""Sizing the pool: what is capped, what is refused, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.engine.memory import available_memory, plan_memory
from batchgen.types import UsageError

KIB = 1024


def plan(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "bytes_per_block": 16 * KIB,
        "block_size": 16,
        "context": 1024,
        "max_model_len": None,
        "max_num_seqs": 4,
        "kv_cache_memory": None,
        "available": 1024**3,
    }
    return plan_memory(**{**given, **changes})


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
    assert "257 blocks of 16 tokens" in plan().table()[0]


def test_available_memory_is_plausible() -> None:
    assert 0 < available_memory() < 2**50


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_model_len": 2048}, r"model\.max_model_len: 2,048 is more than the 1,024 tokens"),
        ({"kv_cache_memory": 2 * 1024**3}, r"engine\.kv_cache_memory: 2,147,483,648 bytes are asked for"),
        ({"available": 0}, r"one sequence of 1,024 tokens needs|one sequence of 16 tokens needs"),
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
