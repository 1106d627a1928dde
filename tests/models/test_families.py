"""Every family computes what transformers computes: logits within 1e-4, the same greedy tokens.

`BATCHGEN_FAMILIES=all` adds schedules, the reference backend, larger blocks and transformers' `generate`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, Family
from parity import (
    MAX_TOKENS,
    MORE_SCHEDULES,
    SCHEDULES,
    Oracle,
    compare,
    make_prompts,
    open_engine,
    run_schedule,
)

ALL = os.environ.get("BATCHGEN_FAMILIES") == "all"
ENGINES: tuple[dict[str, Any], ...] = ({}, {"attention": "reference"}, {"block_size": 32})

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@each_family
def test_equals_transformers(family: Family, tmp_path: Path) -> None:
    oracle = Oracle(family.build())
    for settings in ENGINES if ALL else ENGINES[:1]:
        engine = open_engine(family, tmp_path, **settings)
        layers = engine.core.runner.layers
        assert tuple(layer.spec.sliding_window for layer in layers) == family.windows
        assert tuple(layer.source for layer in layers) == (family.sources or (None,) * len(layers))
        for schedule in (*SCHEDULES, *MORE_SCHEDULES) if ALL else SCHEDULES:
            outcome = run_schedule(engine, schedule)
            seen = compare(oracle, outcome)
            assert seen.spread >= 1
            assert {len(tokens) for tokens in outcome.tokens} == {MAX_TOKENS}
            assert seen.ok, (settings, schedule.name, seen)
            if "preempted" in schedule.name and None in family.windows:
                assert outcome.preemptions > 0
            if "cached" in schedule.name:
                assert outcome.cached_tokens > 0
        engine.core.close()


@each_family
@pytest.mark.skipif(not ALL, reason="by teacher forcing in the usual suite; BATCHGEN_FAMILIES=all")
def test_equals_generate(family: Family, tmp_path: Path) -> None:
    oracle = Oracle(family.build())
    engine = open_engine(family, tmp_path)
    outcome = run_schedule(engine, SCHEDULES[0])
    assert outcome.tokens == [oracle.generate(prompt, MAX_TOKENS) for prompt in make_prompts()]
