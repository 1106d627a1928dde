"""In float32 on the CPU a row has the same bits whatever shares its batch, however it is cut up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_harness import make_engine, record_logits, run, small_pool
from tiny_models import save_tiny_llama

from batchgen.types import SamplingParams

SCHEDULES = {"float32": 12, "bfloat16": 4, "float16": 4, "int8": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), hidden_size=96, intermediate_size=192)


def make_prompts(rng: random.Random) -> list[list[int]]:
    shared = [rng.randrange(256) for _ in range(33)]
    return [
        (shared if i % 2 else []) + [rng.randrange(256) for _ in range(rng.choice((1, 5, 16, 40)))]
        for i in range(10)
    ]


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "int8"])
def test_bits_do_not_depend_on_the_schedule(folder: Path, stored: str) -> None:
    rng = random.Random(3)
    prompts = make_prompts(rng)
    sampling = [
        SamplingParams(max_tokens=12, temperature=0.8 if i % 3 == 0 else 0.0, ignore_eos=True)
        for i in range(len(prompts))
    ]
    alone = make_engine(folder, max_num_seqs=1, prefix_caching=False, kv_cache_dtype=stored)
    assert alone.facts["batch_invariant"]
    truth = record_logits(alone)
    expected = [o.token_ids for o in run(alone, prompts, sampling)]
    preemptions = 0
    for _ in range(SCHEDULES[stored]):
        engine = small_pool(
            folder,
            tokens=rng.choice((128, 256, 2048)),
            max_model_len=112,
            max_num_seqs=rng.choice((2, 5, 16)),
            max_num_batched_tokens=rng.choice((16, 48, 512)),
            prefix_caching=rng.random() < 0.7,
            kv_cache_dtype=stored,
        )
        seen = record_logits(engine)
        order = rng.sample(range(len(prompts)), len(prompts))
        results = run_in_order(engine, prompts, sampling, order)
        assert [results[i] for i in range(len(prompts))] == expected
        assert all(torch.equal(truth[key], logits) for key, logits in seen.items())
        preemptions += engine.core.scheduler.stats.preemptions
    assert preemptions > 0


def run_in_order(engine, prompts, sampling, order):  # type: ignore[no-untyped-def]
    """Token ids by row when rows are submitted in `order`."""
    from batchgen.types import Request

    for i in order:
        assert engine.core.add(Request(i, list(prompts[i]), sampling[i])) is None
    done = {}
    while engine.core.num_unfinished:
        for output in engine.core.step():
            done[output.request_id] = output.token_ids
    return done
