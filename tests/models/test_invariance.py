"""Tokens and bits do not depend on the schedule: seven kinds of models under random schedules.

`BATCHGEN_SCHEDULES` sets how many schedules are tried in all (20 in the usual suite, 500 in
`make invariance`).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from engine_harness import record_logits, reschedule
from families import FAMILIES, Family
from parity import POOL, open_engine

from batchgen.engine.build import Engine
from batchgen.types import Request, SamplingParams

KINDS = ("llama", "gemma2", "mixtral", "minicpm3", "granite_swa", "llama in int8", "mixtral in int8")
"""Plain, windows and full layers, experts, latent attention, sinks; in int8 as one program and not."""
SCHEDULES = int(os.environ.get("BATCHGEN_SCHEDULES", "20"))
ROWS = 10
MAX_TOKENS = 18


def make_rows() -> dict[int, list[int]]:
    """Prompts of 1 to 110 tokens, half of them with a long common beginning."""
    rng = random.Random(11)
    shared = [rng.randrange(256) for _ in range(52)]
    rows = {}
    for row in range(ROWS):
        own = [rng.randrange(256) for _ in range(rng.choice((1, 5, 17, 40, 58)))]
        rows[row] = shared + own if row % 2 else own
    return rows


def run_rows(engine: Engine, rows: list[int]) -> dict[int, list[int]]:
    """Token ids by row, added in the order of `rows`; every third is sampled at a temperature of 0.8."""
    prompts, done = make_rows(), {}
    for row in rows:
        temperature = 0.8 if row % 3 == 0 else 0.0
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, ignore_eos=True)
        assert engine.core.add(Request(row, list(prompts[row]), sampling)) is None
    while engine.core.num_unfinished:
        for output in engine.core.step():
            done[output.request_id] = output.token_ids
    return done


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_schedule(kind: str, tmp_path: Path) -> None:
    name, _, quantization = kind.partition(" in ")
    family: Family = next(family for family in FAMILIES if family.name == name)
    rng = random.Random(f"{os.environ.get('BATCHGEN_SEED', '0')}:{kind}")
    loaded = open_engine(family, tmp_path, quantization=quantization or None)
    assert loaded.facts["batch_invariant"]
    alone = reschedule(loaded, POOL, max_num_seqs=1, max_num_batched_tokens=512, prefix_caching=False)
    truth = record_logits(alone)
    expected = run_rows(alone, list(range(ROWS)))
    preemptions = hits = compared = 0
    for _ in range(-(-SCHEDULES // len(KINDS))):
        engine = reschedule(
            loaded,
            rng.choice((144, 144, 192, POOL)),
            max_num_seqs=rng.choice((2, 3, 7, 13)),
            max_num_batched_tokens=rng.choice((13, 24, 61, 128, 512)),
            prefix_caching=rng.random() < 0.7,
        )
        seen = record_logits(engine)
        rows = rng.sample(range(ROWS), rng.randint(2, ROWS))
        assert run_rows(engine, rows) == {row: expected[row] for row in rows}
        assert [key for key, logits in seen.items() if not torch.equal(truth[key], logits)] == []
        preemptions += engine.core.scheduler.stats.preemptions
        hits += engine.core.scheduler.stats.cached_tokens
        compared += len(seen)
    print(
        f"\n{kind}: the logits of {compared} sampled positions equal to the bit, with {preemptions} "
        f"preemptions and {hits} cached tokens"
    )
