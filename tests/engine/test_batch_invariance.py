"""In float32 on the CPU a row has the same bits whatever shares its batch, however it is cut up."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from engine_harness import make_engine, record_logits, reschedule, run, small_pool
from tiny_models import save_tiny_llama

from batchgen.engine import materials
from batchgen.promise import PROMISES, STORED, VARIES, promise
from batchgen.types import SamplingParams, UsageError

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


@pytest.mark.parametrize(
    "stored", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "float16", "int8"]
)
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


@pytest.mark.parametrize(
    ("dtype", "stored", "threads"),
    [("bfloat16", "bfloat16", 2), ("bfloat16", "int8", 3), ("float16", "auto", 1)],
)
def test_narrow_models_are_invariant_where_it_is_asked_for(
    folder: Path, dtype: str, stored: str, threads: int
) -> None:
    """On a machine where they cannot be, the engine says so instead."""
    settings = {"dtype": dtype, "kv_cache_dtype": stored, "num_threads": threads, "deterministic": True}
    prompts = make_prompts(random.Random(4))
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    before = torch.get_num_threads()
    try:
        engine = make_engine(folder, max_num_batched_tokens=512, max_num_seqs=16, **settings)
    except UsageError as error:
        pytest.skip(str(error))
    alone = reschedule(engine, 2048, max_num_seqs=1, max_num_batched_tokens=512, prefix_caching=False)
    truth = record_logits(alone)
    run(alone, prompts, greedy)
    for budget, most in ((512, 16), (24, 3)):
        together = reschedule(engine, 2048, max_num_seqs=most, max_num_batched_tokens=budget)
        seen = record_logits(together)
        run(together, prompts, greedy)
        assert [key for key, logits in seen.items() if not torch.equal(truth[key], logits)] == []
    torch.set_num_threads(before)


def test_what_cannot_be_kept_is_refused_if_it_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"engine\.deterministic: true asks .* engine\.attention: reference"):
        make_engine(folder, attention="reference", deterministic=True)
    assert not make_engine(folder, attention="reference").facts["batch_invariant"]
    monkeypatch.setattr(materials, "find_row_multiple", lambda *_: None)
    with pytest.raises(UsageError, match=r"engine\.deterministic: true asks"):
        make_engine(folder, deterministic=True)
    (note,) = [note for note in make_engine(folder).notes if "batch-invariant" in note]
    assert note == f"not batch-invariant: {VARIES}"


def test_every_combination_has_one_promise() -> None:
    for settings in itertools.product(["cpu", "cuda"], STORED[:3], STORED, ["auto", True, False]):
        (line,) = [line for line in PROMISES if line.fits(*settings)]
        assert promise(*settings) is line
        assert line.checked or not line.required


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
