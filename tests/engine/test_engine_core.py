"""What the loop does with stop conditions, faults of a row, and memory that runs out."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from engine_harness import make_engine, run
from tiny_models import save_tiny_llama

from batchgen.core.scheduler import SchedulerOutput
from batchgen.engine import core as core_module
from batchgen.sampling.sampler import SamplingRow
from batchgen.types import EngineError, ErrorClass, FinishReason, Request, RowError, SamplingParams

EOS = 258


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def prompts(n: int = 6) -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(256) for _ in range(rng.randrange(3, 40))] for _ in range(n)]


def test_stop_token_ends_the_row_and_is_not_part_of_it(folder: Path) -> None:
    engine = make_engine(folder)
    free = run(engine, prompts(1), SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    stop = free[5]
    first = free.index(stop)
    output = run(
        engine,
        prompts(1),
        SamplingParams(max_tokens=12, stop_token_ids=(stop,), ignore_eos=True),
        first_row=9,
    )[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        free[:first],
        FinishReason.STOP,
        stop,
    )
    assert output.completion_tokens == first + 1


def test_stop_string_cuts_text_and_ids_together(folder: Path) -> None:
    engine = make_engine(folder)
    free = run(engine, prompts(), SamplingParams(max_tokens=24, ignore_eos=True))
    for row, whole in enumerate(free):
        plain = [i for i, c in enumerate(whole.text) if c.isascii() and c.isprintable()]
        if not plain:
            continue
        stop = whole.text[plain[-1]]
        params = SamplingParams(max_tokens=24, stop=(stop,), ignore_eos=True)
        output = run(engine, [prompts()[row]], params, first_row=100 + row)[0]
        assert output.text == whole.text[: whole.text.index(stop)]
        assert output.stop_reason == stop
        assert engine.tokenizer.decode(output.token_ids).startswith(output.text)


def test_min_tokens_bars_the_end(folder: Path) -> None:
    engine = make_engine(folder)
    free = run(engine, prompts(), SamplingParams(max_tokens=12, ignore_eos=True))
    ends = [(o.token_ids[3],) for o in free]
    early = [SamplingParams(max_tokens=12, stop_token_ids=end) for end in ends]
    assert all(len(o.token_ids) <= 3 for o in run(engine, prompts(), early, first_row=50))
    late = [SamplingParams(max_tokens=12, min_tokens=12, stop_token_ids=end) for end in ends]
    outputs = run(engine, prompts(), late, first_row=100)
    assert all(len(o.token_ids) == 12 for o in outputs)
    assert all(not {EOS, *end} & set(o.token_ids[:11]) for end, o in zip(ends, outputs, strict=True))


def test_a_row_that_is_not_finite_is_an_error_and_takes_no_other_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(make_engine(folder), prompts(), SamplingParams(max_tokens=8, ignore_eos=True))
    engine = make_engine(folder)
    execute = engine.core.runner.execute

    def poisoned(output: SchedulerOutput) -> torch.Tensor:
        logits = execute(output).clone()
        samplers = [s.request.request_id for s in output.scheduled if s.samples]
        if 2 in samplers and len(engine.core._live[2].first.output_token_ids) == 3:
            logits[samplers.index(2), 7] = torch.nan
        return logits

    monkeypatch.setattr(engine.core.runner, "execute", poisoned)
    outputs = run(engine, prompts(), SamplingParams(max_tokens=8, ignore_eos=True))
    assert outputs[2].error is not None
    assert outputs[2].error.error_class is ErrorClass.NONFINITE
    assert [o.token_ids for i, o in enumerate(outputs) if i != 2] == [
        o.token_ids for i, o in enumerate(expected) if i != 2
    ]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")]
)
def test_a_step_without_memory_is_halved_and_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = run(make_engine(folder), prompts(), SamplingParams(max_tokens=8))
    engine = make_engine(folder)
    execute = engine.core.runner.execute

    def short_of_memory(output: SchedulerOutput) -> torch.Tensor:
        if output.total_tokens > 5:
            raise error
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute", short_of_memory)
    outputs = run(engine, prompts(), SamplingParams(max_tokens=8))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


@pytest.mark.parametrize("bad", [(), (1,), (0, 3)])
def test_a_row_that_makes_steps_raise_is_an_error_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]
) -> None:
    """A failure that does not come back costs no row; rows of which each raises alone are errors."""
    expected = run(make_engine(folder), prompts(), SamplingParams(max_tokens=8))
    engine = make_engine(folder)
    execute = engine.core.runner.execute
    failures = iter([False, True, False, False, False, True])

    def flaky(output: SchedulerOutput) -> torch.Tensor:
        rows = {s.request.request_id for s in output.scheduled if s.start + s.num_tokens >= 4}
        if rows & set(bad) or (not bad and next(failures, False)):
            raise RuntimeError("a strange row")
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute", flaky)
    outputs = run(engine, prompts(), SamplingParams(max_tokens=8))
    for row, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        if row in bad:
            assert output.error == RowError(
                ErrorClass.INTERNAL, "the engine failed on this row alone: RuntimeError: a strange row"
            )
        else:
            assert output.token_ids == right.token_ids


def test_a_fault_in_the_sampling_of_a_row_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder)
    real = core_module.sample

    def picky(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
        if any(row.row == 2 for row in rows):
            raise ValueError("no such distribution")
        return real(logits, rows)

    monkeypatch.setattr(core_module, "sample", picky)
    outputs = run(engine, prompts(), SamplingParams(max_tokens=4))
    assert [o.request_id for o in outputs if not o.ok] == [2]


@pytest.mark.parametrize("error", [RuntimeError("everything fails"), EngineError("gone")])
def test_an_engine_that_fails_on_every_row_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = make_engine(folder)

    def broken(output: SchedulerOutput) -> torch.Tensor:
        raise error

    monkeypatch.setattr(engine.core.runner, "execute", broken)
    with pytest.raises(type(error), match=str(error)):
        run(engine, prompts(), SamplingParams(max_tokens=4))


def test_one_row_without_memory_is_an_error_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder)
    execute = engine.core.runner.execute

    def hungry(output: SchedulerOutput) -> torch.Tensor:
        if any(s.request.request_id == 1 for s in output.scheduled):
            raise MemoryError
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute", hungry)
    outputs = run(engine, prompts(), SamplingParams(max_tokens=4))
    assert [o.error and o.error.error_class for o in outputs if not o.ok] == [ErrorClass.ENGINE_OOM]


def test_partials_are_reported_once_and_in_order(folder: Path) -> None:
    engine = make_engine(folder)
    for row, prompt in enumerate(prompts()):
        engine.core.add(Request(row, list(prompt), SamplingParams(max_tokens=16, ignore_eos=True)))
    told: dict[int, list[int]] = {row: [] for row in range(len(prompts()))}
    done = {}
    for step in range(1000):
        if step % 3 == 0:
            for row, _, start, ids in engine.core.partials():
                assert start == len(told[row])
                told[row] += ids
        for output in engine.core.step():
            done[output.request_id] = output.token_ids
        if not engine.core.num_unfinished:
            break
    assert all(done[row][: len(ids)] == ids for row, ids in told.items())
    assert sum(map(len, told.values())) > 50


def test_a_token_that_the_model_does_not_know_is_an_error_of_its_row(folder: Path) -> None:
    outputs = run(make_engine(folder), [[1, 2, 3], [1, 300, 3]], SamplingParams(max_tokens=2))
    assert outputs[0].ok
    assert outputs[1].error is not None
    assert outputs[1].error.error_class is ErrorClass.INVALID_PARAM
    assert "token id 300" in outputs[1].error.message


def test_the_time_of_a_request_is_told_by_phase(folder: Path) -> None:
    engine = make_engine(folder, max_num_seqs=2, max_num_batched_tokens=4)
    begun = time.monotonic()
    outputs = run(engine, prompts(), SamplingParams(max_tokens=5, ignore_eos=True))
    took = time.monotonic() - begun
    assert all(out.prefill_seconds > 0 and out.decode_seconds > 0 for out in outputs)
    assert outputs[-1].queue_seconds > outputs[0].queue_seconds >= 0
    for out in outputs:
        assert out.queue_seconds + out.prefill_seconds + out.decode_seconds <= took
