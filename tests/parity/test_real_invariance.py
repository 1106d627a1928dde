"""On the real model, every sampled position has the same bits under every schedule.

`BATCHGEN_SCHEDULES` sets how many random schedules are tried (3 in the usual suite, 200 in
`make invariance`).
"""

from __future__ import annotations

import os
import random

import torch
from engine_harness import record_logits, reschedule
from real_model import prompts

from batchgen.engine.build import Engine
from batchgen.types import Request, SamplingParams

SCHEDULES = int(os.environ.get("BATCHGEN_SCHEDULES", "3"))
ROWS = 10
TOKENS = 6


def run_rows(engine: Engine, rows: list[int]) -> dict[int, list[int]]:
    """Token ids by row; every third row is sampled at a temperature of 0.8."""
    done = {}
    for row in rows:
        sampling = SamplingParams(
            max_tokens=TOKENS, temperature=0.8 if row % 3 == 0 else 0.0, ignore_eos=True
        )
        assert engine.core.add(Request(row, list(prompts(ROWS)[row]), sampling)) is None
    while engine.core.num_unfinished:
        for output in engine.core.step():
            done[output.request_id] = output.token_ids
    return done


def test_bits_do_not_depend_on_the_schedule(any_products: Engine) -> None:
    loaded = any_products
    rng = random.Random(int(os.environ.get("BATCHGEN_SEED", "0")))
    assert loaded.facts["batch_invariant"]
    alone = reschedule(loaded, 4096, max_num_seqs=1, max_num_batched_tokens=512, prefix_caching=False)
    truth = record_logits(alone)
    expected = run_rows(alone, list(range(ROWS)))
    preemptions = hits = compared = 0
    for _ in range(SCHEDULES):
        engine = reschedule(
            loaded,
            rng.choice((656, 720, 4096)),
            max_num_seqs=rng.choice((2, 3, 7, 16)),
            max_num_batched_tokens=rng.choice((24, 100, 256, 512)),
            prefix_caching=rng.random() < 0.7,
        )
        seen = record_logits(engine)
        rows = rng.sample(range(ROWS), rng.randint(2, 6))
        assert run_rows(engine, rows) == {row: expected[row] for row in rows}
        different = [key for key, logits in seen.items() if not torch.equal(truth[key], logits)]
        assert different == []
        preemptions += engine.core.scheduler.stats.preemptions
        hits += engine.core.scheduler.stats.cached_tokens
        compared += len(seen)
    print(
        f"\n{SCHEDULES} schedules: the logits of {compared} sampled positions equal to the bit, "
        f"with {preemptions} preemptions and {hits} cached tokens"
    )
