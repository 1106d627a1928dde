"""The real model's greedy output equals `generate`, token for token, however the engine is driven."""

from __future__ import annotations

import os
from typing import Any

import pytest
from engine_harness import make_engine, run, small_pool
from real_model import MAX_TOKENS, MODEL, gap, oracle, prompts

from batchgen.types import SamplingParams

COUNT = int(os.environ.get("BATCHGEN_PARITY_PROMPTS", "8"))
SETTINGS: list[dict[str, Any]] = [
    {"max_num_seqs": 64},
    {"max_num_seqs": 64, "prefix_caching": False},
    {"max_num_seqs": 64, "max_num_batched_tokens": 32},
    {"max_num_seqs": 1},
    {"max_num_seqs": 64, "pool_tokens": 720, "max_model_len": 640},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_generate(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"max_model_len": 1024, **settings}
    pool = settings.pop("pool_tokens", None)
    engine = small_pool(MODEL, pool, **settings) if pool else make_engine(MODEL, **settings)
    outputs = run(engine, prompts(COUNT), SamplingParams(max_tokens=MAX_TOKENS))
    stats = engine.core.scheduler.stats
    engine.core.close()
    rows = zip(prompts(COUNT), oracle(COUNT), outputs, strict=True)
    gaps = [gap(prompt, expected, output.token_ids) for prompt, expected, output in rows]
    with capsys.disabled():
        print(
            f"\n{settings} pool={pool}: {gaps.count(0.0)} of {COUNT} equal, largest excused gap "
            f"{max(gaps):.1e}, {stats.preemptions} preemptions, {stats.cached_tokens} cached tokens"
        )
    assert max(gaps) < 1e-4
    if pool:
        assert stats.preemptions > 0
