"""The real model's greedy output equals `generate`, token for token, however the engine is driven.

`BATCHGEN_PARITY_PROMPTS` sets how many prompts are compared (8 in the usual suite, 64 in `make parity`). In
the usual suite only the engine's own schedule computes whole answers, the others their first tokens.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from engine_harness import reschedule, run
from real_model import MAX_TOKENS, gap, oracle, prompts

from batchgen.engine.build import Engine
from batchgen.types import SamplingParams

USUAL = 8
COUNT = int(os.environ.get("BATCHGEN_PARITY_PROMPTS", str(USUAL)))
ROOMY = 8192
ENGINE = {"pool_tokens": ROOMY, "max_num_seqs": 64, "max_num_batched_tokens": 512, "prefix_caching": True}
# What differs from the engine's own schedule, and how many tokens the usual suite compares.
SCHEDULES: dict[str, tuple[dict[str, Any], int]] = {
    "without the prefix cache": ({"prefix_caching": False}, 6),
    "in small steps": ({"max_num_batched_tokens": 32}, 6),
    "one by one": ({"max_num_seqs": 1}, 4),
    "in a small pool": ({"pool_tokens": 656}, 12),
}


def compare(engine: Engine, name: str, max_tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = run(engine, prompts(COUNT), SamplingParams(max_tokens=max_tokens))
    expected = [ids[:max_tokens] for ids in oracle(COUNT)]
    rows = zip(prompts(COUNT), expected, outputs, strict=True)
    gaps = [gap(prompt, ids, output.token_ids) for prompt, ids, output in rows]
    stats = engine.core.scheduler.stats
    with capsys.disabled():
        print(
            f"\n{name}: {gaps.count(0.0)} of {COUNT} equal in {max_tokens} tokens, largest excused gap "
            f"{max(gaps):.1e}, {stats.preemptions} preemptions, {stats.cached_tokens} cached tokens"
        )
    assert max(gaps) < 1e-4


def test_equals_generate(loaded: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    compare(loaded, "as a job runs it", MAX_TOKENS, capsys)


@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_generate_under_another_schedule(
    loaded: Engine, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, first_tokens = SCHEDULES[name]
    settings = ENGINE | changes
    engine = reschedule(loaded, settings.pop("pool_tokens"), **settings)
    compare(engine, name, first_tokens if COUNT <= USUAL else MAX_TOKENS, capsys)
    stats = engine.core.scheduler.stats
    assert (stats.preemptions > 0) == ("pool_tokens" in changes)
    assert (stats.cached_tokens > 0) == settings["prefix_caching"]
