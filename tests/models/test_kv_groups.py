"""Models whose layers look back differently far: parity, what a sequence holds, and what must break it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_harness import make_engine, reschedule, run
from families import FAMILIES, FULL, SLIDING, WINDOW, Family
from parity import (
    MORE_SCHEDULES,
    SCHEDULES,
    TOLERANCE,
    Oracle,
    Schedule,
    compare,
    make_prompts,
    open_engine,
    run_schedule,
)

from batchgen.core.scheduler import SchedulerOutput
from batchgen.core.single_type import SlidingWindowManager
from batchgen.engine.build import Engine
from batchgen.types import Request, SamplingParams

NAMED = {family.name: family for family in FAMILIES}
CACHED, CHUNKED = SCHEDULES[1], MORE_SCHEDULES[1]
PERIOD = [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL]
SPARSE = replace(
    NAMED["gemma3"],
    name="gemma3-sparse",
    settings={**NAMED["gemma3"].settings, "num_hidden_layers": 6, "layer_types": PERIOD},
    windows=tuple(WINDOW if kind == SLIDING else None for kind in PERIOD),
    gain=0.8,
)
"""One layer of six sees everything, as in the models that people use: a group for each layer."""


@pytest.mark.parametrize(
    "family",
    [
        NAMED["mistral"].with_window(5),
        NAMED["mistral"].with_window(16),
        NAMED["mistral"].with_window(40),
        NAMED["gemma2"].with_window(33),
        NAMED["gpt_oss"].with_window(1),
        SPARSE,
        SPARSE.with_window(16),
    ],
    ids=lambda family: family.name,
)
def test_windows_below_at_and_above_the_block_size(family: Family, tmp_path: Path) -> None:
    oracle, engine = Oracle(family.build()), open_engine(family, tmp_path)
    assert engine.facts["batch_invariant"]
    for schedule in (CACHED, CHUNKED):
        outcome = run_schedule(engine, schedule)
        seen = compare(oracle, outcome)
        assert seen.ok, (schedule.name, seen)
        assert seen.spread >= 1
        assert outcome.cached_tokens > 0 or schedule is CHUNKED


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return open_engine(SPARSE, tmp_path_factory.mktemp("sparse"))


@pytest.mark.slow
def test_bits_do_not_depend_on_the_schedule(sparse: Engine) -> None:
    rng = random.Random(4)
    truth = run_schedule(sparse, MORE_SCHEDULES[0])
    preemptions = hits = 0
    for _ in range(5):
        settings = {
            "max_num_seqs": rng.choice((2, 5)),
            "max_num_batched_tokens": rng.choice((9, 48, 300)),
            "prefix_caching": rng.random() < 0.8,
        }
        outcome = run_schedule(sparse, Schedule("random", rng.choice((160, 240, 1200)), settings))
        assert outcome.tokens == truth.tokens
        assert all(torch.equal(truth.logits[key], logits) for key, logits in outcome.logits.items())
        preemptions += outcome.preemptions
        hits += outcome.cached_tokens
    assert preemptions > 0
    assert hits > 0


def test_a_layer_that_sees_everything_takes_no_memory_of_those_that_do_not(sparse: Engine) -> None:
    """Six groups of one layer each: a block is a sixth of what one block for all layers would be."""
    runner = sparse.core.runner
    layout = runner.layout
    assert [len(group.layers) for group in layout.groups] == [1] * 6
    assert layout.block_bytes == runner.backend.bytes_per_block(runner.layers[0].spec, 16, torch.float32)
    assert len(runner.kv.buffers) == 1
    assert any("the last 21 tokens: 5 (groups: 5), at most" in line for line in sparse.notes)


def held_blocks(engine: Engine, prompt: list[int], max_tokens: int) -> tuple[list[int], list[list[int]]]:
    """Output of one row, and how many blocks it held per group after every step."""
    core = engine.core
    assert core.add(Request(0, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))) is None
    held, outputs = [], []
    while core.num_unfinished:
        outputs += core.step()
        if core.num_unfinished:
            tables = core.scheduler.manager.block_ids(core.scheduler.requests[0])
            held.append([sum(i != 0 for i in ids) for ids in tables])
    return outputs[0].token_ids, held


def test_a_pool_much_smaller_than_a_sequence_suffices_where_all_layers_have_windows(tmp_path: Path) -> None:
    """Window and chunk of 5 + 16 - 1 positions lie in at most 3 blocks of 16; the row has 9."""
    family = NAMED["mistral"].with_window(5)
    prompt = make_prompts()[4][:100]
    truth = run(open_engine(family, tmp_path), [prompt], SamplingParams(max_tokens=40, ignore_eos=True))
    memory = 4 * 3 * 16 * 2 * (16 + 16) * 4
    engine = make_engine(tmp_path, max_model_len=160, max_num_batched_tokens=16, kv_cache_memory=memory)
    assert engine.core.scheduler.manager.pool.num_usable == 3
    tokens, held = held_blocks(engine, prompt, 40)
    assert tokens == truth[0].token_ids
    assert {sum(blocks) for blocks in held[8:]} <= {1, 2}
    assert engine.core.scheduler.stats.preemptions == 0


def test_a_hybrid_holds_all_blocks_only_where_a_layer_sees_all(sparse: Engine) -> None:
    driven = reschedule(sparse, 2048, max_num_batched_tokens=32, max_num_seqs=2)
    _, held = held_blocks(driven, make_prompts()[4], 32)
    assert held[-1][0] == 10
    assert all(blocks <= 3 for step in held[5:] for blocks in step[1:])


def test_forks_copy_their_partial_block_in_every_group(sparse: Engine) -> None:
    """A row and its fork, which differ from the token after the prompt on, against transformers."""
    driven = reschedule(sparse, 400, max_num_batched_tokens=48, max_num_seqs=4)
    scheduler, runner = driven.core.scheduler, driven.core.runner
    oracle, prompt = Oracle(SPARSE.build()), make_prompts()[2][:37]
    scheduler.add(Request(0, list(prompt), SamplingParams(max_tokens=40)))
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    num_copies = 0

    def step() -> None:
        nonlocal num_copies
        planned = scheduler.schedule()
        num_copies += len(planned.copies)
        logits = runner.execute(planned)
        rows = [s.request.request_id for s in planned.scheduled if s.samples]
        scheduler.update(planned, {row: int(x.argmax()) for row, x in zip(rows, logits, strict=True)})
        for row, x in zip(rows, logits, strict=True):
            seen[row].append(x.clone())

    step()
    first = scheduler.requests[0].output_token_ids[0]
    child = Request(1, list(prompt), SamplingParams(max_tokens=40), [(first + 1) % 256])
    scheduler.fork(0, [child])
    for _ in range(30):
        step()
    assert num_copies == 6
    for row, start in ((0, 37), (1, 38)):
        tokens = scheduler.requests[row].tokens(0, scheduler.requests[row].num_tokens)
        truth = oracle.logits(tokens)[start - 1 : -1]
        assert (torch.stack(seen[row]) - truth).abs().max() <= TOLERANCE
        scheduler.finish(row)


def test_samples_of_a_row_do_not_depend_on_the_pool(sparse: Engine) -> None:
    """Three samples a row: forked side by side in a roomy pool, squeezed and preempted in a small one."""
    params = SamplingParams(n=3, temperature=0.9, max_tokens=12, ignore_eos=True)
    seen, preemptions = [], 0
    for pool in (1200, 176):
        driven = reschedule(sparse, pool, max_num_batched_tokens=48, max_num_seqs=6)
        outputs = run(driven, make_prompts()[:4], params)
        seen.append([[sample.token_ids for sample in output.samples] for output in outputs])
        preemptions = driven.core.scheduler.stats.preemptions
    assert seen[0] == seen[1]
    assert all(len(set(map(tuple, samples))) == 3 for samples in seen[0])
    assert preemptions > 0


@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_nothing_is_read_of_blocks_that_were_given_back(attention: str, tmp_path: Path) -> None:
    """All that nobody holds or could hit is NaN, the null block included."""
    engine = open_engine(SPARSE, tmp_path, attention=attention)
    truth = run_schedule(engine, CHUNKED)
    buffers, execute = engine.core.runner.kv.buffers, type(engine.core.runner).execute
    driven = reschedule(engine, 240, max_num_batched_tokens=24, max_num_seqs=4)
    spoiled = 0

    def spoil(output: SchedulerOutput) -> torch.Tensor:
        nonlocal spoiled
        pool = driven.core.scheduler.manager.pool
        idle = [b.block_id for b in pool.blocks if b.ref_cnt == 0 and b.block_hash is None]
        for buffer in buffers:
            buffer[idle] = 0xFF
        spoiled += len(idle)
        return execute(driven.core.runner, output)

    driven.core.runner.execute = spoil  # type: ignore[method-assign]
    outputs = run(driven, make_prompts(), SamplingParams(max_tokens=32, ignore_eos=True))
    assert [o.token_ids for o in outputs] == truth.tokens
    assert spoiled > 500
    for buffer in buffers:
        buffer.zero_()


def test_a_row_that_is_not_finite_takes_no_other_with_it(
    sparse: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = run_schedule(sparse, CHUNKED)
    driven = reschedule(sparse, 400, max_num_batched_tokens=48, max_num_seqs=4)
    runner = driven.core.runner
    execute = type(runner).execute

    def poisoned(output: SchedulerOutput) -> torch.Tensor:
        logits = execute(runner, output).clone()
        samplers = [s.request for s in output.scheduled if s.samples]
        for row, request in enumerate(samplers):
            if request.request_id == 2 and len(request.output_token_ids) == 9:
                logits[row, 7] = torch.nan
        return logits

    monkeypatch.setattr(runner, "execute", poisoned)
    outputs = run(driven, make_prompts(), SamplingParams(max_tokens=32, ignore_eos=True))
    assert [o.request_id for o in outputs if not o.ok] == [2]
    assert [o.token_ids for o in outputs if o.ok] == [t for i, t in enumerate(truth.tokens) if i != 2]


def one_table_for_two(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Two layers of different groups, which lie over each other in memory, use the blocks of one."""
    runner = engine.core.runner
    a, b, *others = runner.layout.places
    runner.layout = replace(runner.layout, places=(a._replace(group=b.group), b, *others))
    assert runner.program is not None
    runner.program = runner._program(runner.program._weights, 0)


def freed_too_early(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """A block goes one token before the last query that reads it."""
    skipped = SlidingWindowManager.num_skipped_blocks
    patch.setattr(SlidingWindowManager, "num_skipped_blocks", lambda self, n: skipped(self, n + 1))


@pytest.mark.parametrize("mutation", [one_table_for_two, freed_too_early])
def test_a_wrong_table_fails_parity(
    mutation: Callable[[Engine, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, engine = Oracle(SPARSE.build()), open_engine(SPARSE, tmp_path)
    assert compare(oracle, run_schedule(engine, SCHEDULES[0])).ok
    mutation(engine, monkeypatch)
    assert not compare(oracle, run_schedule(engine, SCHEDULES[0])).ok


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_layer_that_reads_anothers_keys_takes_no_memory(name: str, tmp_path: Path) -> None:
    runner = open_engine(NAMED[name], tmp_path).core.runner
    sharers = [i for i, layer in enumerate(runner.layers) if layer.source is not None]
    assert sharers == [3, 4]
    assert sorted(i for group in runner.layout.groups for i in group.layers) == [0, 1, 2]
    for i in sharers:
        source = runner.layers[i].source
        assert runner.kv.caches[i].key.data_ptr() == runner.kv.caches[source].key.data_ptr()


def test_a_layer_that_reads_another_layers_keys_than_its_source_fails_parity(tmp_path: Path) -> None:
    family = NAMED["gemma3n"]
    oracle, engine = Oracle(family.build()), open_engine(family, tmp_path)
    runner = engine.core.runner
    places = list(runner.layout.places)
    places[3], runner.kv.caches[3] = places[0], runner.kv.caches[0]
    runner.layout = replace(runner.layout, places=tuple(places))
    assert not compare(oracle, run_schedule(engine, SCHEDULES[0])).ok
