"""`sampling.n`: samples of one row share its blocks, and each is what it would be alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, reschedule, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny_llama
from transformers import AutoModelForCausalLM

from batchgen.core.scheduler import SchedulerOutput
from batchgen.engine import core as core_module
from batchgen.engine.build import Engine
from batchgen.sampling.noise import uniform
from batchgen.types import ErrorClass, FinishReason, Output, Request, RowError, SamplingParams

PARAMS = SamplingParams(temperature=0.9, max_tokens=9, ignore_eos=True, seed=5, n=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    return reschedule(loaded, 1024, max_num_seqs=8, max_num_batched_tokens=256)


def prompts(lengths: tuple[int, ...] = (3, 16, 21, 40)) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def samples(output: Output) -> list[list[int]]:
    assert output.error is None, output.error
    return [sample.token_ids for sample in output.samples]


def all_samples(outputs: list[Output]) -> list[list[list[int]]]:
    return [samples(output) for output in outputs]


@torch.inference_mode()
def reference(model: Any, prompt: list[int], row: int, sample: int, params: SamplingParams) -> list[int]:
    """Temperature sampling written out over transformers' logits, without a cache."""
    ids = list(prompt)
    for _ in range(params.max_tokens):
        logits = model(torch.tensor([ids])).logits[0, -1]
        mass = torch.softmax(logits.double() / params.temperature, dim=-1).cumsum(0)
        noise = float(uniform(params.seed, row, sample, len(ids))[0])
        ids.append(int((mass <= noise * mass[-1]).sum()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return [
        [reference(model, prompt, row, sample, PARAMS) for sample in range(PARAMS.n)]
        for row, prompt in enumerate(prompts())
    ]


def test_each_sample_is_drawn_from_the_model_with_noise_of_its_own(
    engine: Engine, expected: list[list[list[int]]]
) -> None:
    assert all_samples(run(engine, prompts(), PARAMS)) == expected
    assert len({tuple(ids) for row in expected for ids in row}) == len(expected) * PARAMS.n


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_sample_does_not_depend_on_how_many_there_are(
    engine: Engine, expected: list[list[list[int]]], n: int
) -> None:
    fewer = SamplingParams(temperature=0.9, max_tokens=9, ignore_eos=True, seed=5, n=n)
    assert all_samples(run(engine, prompts(), fewer)) == [row[:n] for row in expected]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 64},
        {"max_num_seqs": 3, "max_num_batched_tokens": 64, "prefix_caching": False},
        {"max_num_seqs": 16, "max_num_batched_tokens": 16},
        {"max_num_seqs": 16, "max_num_batched_tokens": 16, "prefix_caching": False},
        {"max_num_seqs": 5, "max_num_batched_tokens": 7},
    ],
    ids=lambda limits: "-".join(f"{key}={value}" for key, value in limits.items()),
)
@pytest.mark.parametrize("tokens", [64, 2048])
def test_samples_do_not_depend_on_the_schedule(
    engine: Engine, expected: list[list[list[int]]], tokens: int, limits: dict[str, Any]
) -> None:
    engine = reschedule(engine, tokens, **limits)
    assert all_samples(run(engine, prompts(), PARAMS)) == expected
    assert engine.core.scheduler.manager.pool.num_used == 0


def record(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """The steps from now on, with the block ids as they were."""
    steps: list[SchedulerOutput] = []
    execute = engine.core.runner.execute

    def recording(output: SchedulerOutput) -> torch.Tensor:
        steps.append(output)
        for scheduled in output.scheduled:
            scheduled.block_ids = [list(ids) for ids in scheduled.block_ids]
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute", recording)
    return steps


def test_forks_share_blocks_and_copy_the_partial_one_before_they_write(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = record(engine, monkeypatch)
    [prompt] = prompts((21,))
    [output] = run(engine, [prompt], PARAMS)
    first, second, *others = steps
    assert first.copies == []
    [(whole, partial)] = first.scheduled[0].block_ids
    tables = [scheduled.block_ids[0] for scheduled in second.scheduled]
    assert [table[0] for table in tables] == [whole] * 4
    assert len({table[1] for table in tables}) == 4
    # The last holder of the partial block writes in place.
    assert tables[-1][1] == partial
    assert second.copies == [(partial, table[1]) for table in tables[:-1]]
    assert not any(step.copies for step in others)
    assert engine.core.scheduler.stats.pool_peak == 5
    # The prompt is computed once, and so is every token but the last of each sample.
    assert engine.core.counters.computed == 21 + 4 * 8
    assert engine.core.counters.sampled == output.completion_tokens == 4 * 9
    assert (output.prompt_tokens, engine.core.scheduler.stats.prompt_tokens) == (21, 21)
    assert engine.core.scheduler.stats.preemptions == 0


def test_a_prompt_of_whole_blocks_is_not_copied(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = record(engine, monkeypatch)
    run(engine, prompts((32,)), PARAMS)
    assert not any(step.copies for step in steps)
    assert engine.core.scheduler.stats.pool_peak == 2 + 4


def test_without_the_copy_samples_are_wrong(
    engine: Engine, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = engine.core.runner.execute

    def careless(output: SchedulerOutput) -> torch.Tensor:
        output.copies.clear()
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute", careless)
    wrong = [a != b for a, b in zip(all_samples(run(engine, prompts(), PARAMS)), expected, strict=True)]
    assert wrong == [len(prompt) % 16 != 0 for prompt in prompts()]


def test_places_are_kept_for_the_forks_of_a_prompt_under_way(engine: Engine) -> None:
    engine = reschedule(engine, 1024, max_num_seqs=8, max_num_batched_tokens=16)
    run(engine, prompts((40, 40, 40, 40, 40)), PARAMS)
    assert engine.core.scheduler.stats.preemptions == 0
    assert engine.core.scheduler.stats.resumed_tokens == 0


def test_samples_end_each_in_its_own_way(engine: Engine, expected: list[list[list[int]]]) -> None:
    # The first token of one sample ends it at once, before it is ever forked off; others go on.
    [_, _, row, _] = expected
    stops = (row[0][0], row[2][0], row[3][2])
    params = SamplingParams(temperature=0.9, max_tokens=9, ignore_eos=True, seed=5, n=4, stop_token_ids=stops)
    found = run(engine, prompts(), params)[2]
    for sample, ids in zip(found.samples, row, strict=True):
        end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        assert sample.token_ids == ids[:end]
        assert sample.finish_reason is (FinishReason.LENGTH if end == len(ids) else FinishReason.STOP)
        assert sample.stop_reason == (None if end == len(ids) else ids[end])
    assert not found.samples[0].token_ids
    assert (found.token_ids, found.text, found.stop_reason) == ([], "", stops[0])


@pytest.mark.parametrize(
    "cut", [(0, 0, 0, 0), (3, 3, 3, 3), (2, 0, 9, 4), (0, 1, 0, 0), (9, 9, 9, 9), (9, 9, 9, 8)]
)
@pytest.mark.parametrize("caching", [True, False])
def test_a_row_goes_on_from_the_tokens_of_each_sample(
    engine: Engine, expected: list[list[list[int]]], cut: tuple[int, ...], caching: bool
) -> None:
    engine = reschedule(engine, 1024, max_num_seqs=8, max_num_batched_tokens=256, prefix_caching=caching)
    found: list[Output] = []
    for row, (prompt, known) in enumerate(zip(prompts(), expected, strict=True)):
        first, *others = [ids[:end] for ids, end in zip(known, cut, strict=True)]
        output = engine.core.add(Request(row, prompt, PARAMS, first, fork_token_ids=others))
        found += [] if output is None else [output]
    sampled = sum(9 - end for end in cut) * 4
    while engine.core.num_unfinished:
        found += engine.core.step()
    found.sort(key=lambda output: output.request_id)
    assert all_samples(found) == expected
    assert engine.core.counters.sampled == sampled
    assert [output.completion_tokens for output in found] == [36] * 4


def test_partial_tokens_are_told_of_each_sample(engine: Engine, expected: list[list[list[int]]]) -> None:
    for row, prompt in enumerate(prompts()):
        engine.core.add(Request(row, prompt, PARAMS))
    told: dict[tuple[int, int], list[int]] = {}
    for _ in range(5):
        assert not engine.core.step()
        for row, sample, first, ids in engine.core.partials():
            known = told.setdefault((row, sample), [])
            assert first == len(known)
            known += ids
    assert len(told) > 4
    assert all(ids == expected[row][sample][: len(ids)] for (row, sample), ids in told.items())
    engine.core.abort_all()


def test_a_row_with_a_sample_that_is_not_finite_is_an_error_and_no_other(
    engine: Engine, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = engine.core.runner.execute

    def broken(output: SchedulerOutput) -> torch.Tensor:
        logits = execute(output).clone()
        for i, scheduled in enumerate(s for s in output.scheduled if s.samples):
            request = scheduled.request
            if request.row == 2 and request.sample in (1, 3) and len(request.output_token_ids) == 3:
                logits[i, 0] = torch.nan
        return logits

    monkeypatch.setattr(engine.core.runner, "execute", broken)
    outputs = run(engine, prompts(), PARAMS)
    assert outputs[2].error == RowError(
        ErrorClass.NONFINITE,
        "the model's logits are not finite; "
        "try model.dtype: float32 with engine.kv_cache_dtype: auto, or check the weights",
    )
    assert not outputs[2].samples
    assert [samples(outputs[row]) for row in (0, 1, 3)] == [expected[row] for row in (0, 1, 3)]
    assert engine.core.scheduler.manager.pool.num_used == 0


def test_a_step_that_fails_on_one_sample_ends_its_row_alone(
    engine: Engine, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = engine.core.runner.execute

    def picky(output: SchedulerOutput) -> torch.Tensor:
        requests = [scheduled.request for scheduled in output.scheduled]
        if any((r.row, r.sample, len(r.output_token_ids)) == (1, 2, 4) for r in requests):
            raise RuntimeError("a strange sample")
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute", picky)
    outputs = run(engine, prompts(), PARAMS)
    assert [output.ok for output in outputs] == [True, False, True, True]
    assert [samples(outputs[row]) for row in (0, 2, 3)] == [expected[row] for row in (0, 2, 3)]
    assert engine.core.scheduler.manager.pool.num_used == 0


def test_a_prompt_that_fails_with_all_its_samples_is_one_row(
    engine: Engine, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of the step is guilty; it is no fault of the engine, which has worked before."""
    run(engine, prompts(), PARAMS)
    execute = engine.core.runner.execute

    def picky(output: SchedulerOutput) -> torch.Tensor:
        if any(scheduled.request.output_token_ids for scheduled in output.scheduled):
            raise RuntimeError("no forks, please")
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute", picky)
    [output] = run(engine, prompts((21,)), PARAMS)
    assert output.error is not None
    assert output.error.error_class is ErrorClass.INTERNAL


def test_the_stop_conditions_of_a_sample_that_fail_end_its_row(
    engine: Engine, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, prompts(), PARAMS)
    real = core_module.live_row

    def sabotaged(request: Request, *rest: Any) -> Any:
        row = real(request, *rest)
        if request.request_id == 1:
            monkeypatch.setattr(row.samples[2].checker, "append", None)
        return row

    monkeypatch.setattr(core_module, "live_row", sabotaged)
    outputs = run(engine, prompts(), PARAMS)
    assert [output.ok for output in outputs] == [True, False, True, True]
    assert [samples(outputs[row]) for row in (0, 2, 3)] == [expected[row] for row in (0, 2, 3)]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(0, 2), st.integers(1, 8)),
        min_size=1,
        max_size=6,
    ),
    events=st.dictionaries(
        st.integers(1, 30), st.tuples(st.sampled_from(["fail", "preempt", "oom"]), st.integers(0, 9))
    ),
)
def test_rows_in_any_company_are_what_they_are_alone(
    engine: Engine, rows: list[tuple[int, int, int, int]], events: dict[int, tuple[str, int]]
) -> None:
    """Random n, priorities and lengths; rows end early, requests lose their blocks, steps run out of it."""
    core, shared = engine.core, prompts((37,))[0]

    def request(row: int) -> Request:
        prompt, n, priority, length = rows[row]
        temperature = 0.9
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, n=n)
        return Request(row, shared[: 33 + prompt], params, priority=priority)

    def alone(row: int) -> list[list[int]]:
        assert core.add(request(row)) is None
        while core.num_unfinished:
            for output in core.step():
                found = samples(output)
        return found

    wanted = [alone(row) for row in range(len(rows))]
    for row in range(len(rows)):
        core.add(request(row))
    execute = core.runner.execute
    done: dict[int, Output] = {}
    number = 0

    def starved(output: SchedulerOutput) -> torch.Tensor:
        core.runner.execute = execute  # type: ignore[method-assign]
        raise MemoryError

    while core.num_unfinished:
        number += 1
        what, index = events.get(number, ("", 0))
        running = list(core.scheduler.running.values())
        if what == "fail":
            row = list(core._live)[index % core.num_unfinished]
            done[row] = core.fail(row, RowError(ErrorClass.TIMEOUT, "late"))
        elif what == "preempt" and running:
            core.scheduler._preempt(running[index % len(running)])
        elif what == "oom":
            core.runner.execute = starved  # type: ignore[method-assign]
        for output in core.step():
            assert output.request_id not in done
            done[output.request_id] = output
    core.runner.execute = execute  # type: ignore[method-assign]
    assert done.keys() == set(range(len(rows)))
    for row, output in done.items():
        assert not output.ok or samples(output) == wanted[row]
    assert core.scheduler.manager.pool.num_used == 0
    core.scheduler.check()
