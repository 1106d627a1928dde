"""Steps that are launched before the tokens of those before them are known, on a stand-in for a GPU.

Drawn tokens are tensors that nobody may look into but who has waited for them, and what steps do is told in
their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import make_engine, reschedule, run
from stand_in_gpu import StandInCapture, stand_in_gpu
from tiny_models import oracle, save_tiny_llama

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine import core as core_module
from batchgen.engine.build import Engine
from batchgen.engine.device import HOST
from batchgen.engine.inputs import PendingTokens
from batchgen.engine.lookahead import LookAhead
from batchgen.engine.transfer import Transfer
from batchgen.scores import Scoring
from batchgen.types import ErrorClass, Output, Request, SamplingParams

SHARED = [5, 9, 2, 7, 7, 3, 1] * 5
PROMPTS = [SHARED, [8, 8, 4], [*SHARED, 200, 6], [200, 100] * 9, [*SHARED, 200, 6, 1], [17, 3, 5], [250]]
SETTINGS: dict[str, Any] = {
    "attention": "reference",
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
}
READS = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "item", "numpy", "cpu", "to", "__bool__", "__int__", "__index__", "__float__")
}


class Unread(torch.Tensor):
    """Numbers that the device has and the host not yet."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func.__name__}: the host reads what it has not waited for"
        return super().__torch_function__(func, types, args, kwargs or {})


class Watched:
    """An engine whose steps tell what happens.

    Attributes:
        events: ("forward" or "wait" or "draw", number of the step).
        early: numbers of steps with tokens that are pending.
    """

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.early: list[int] = []
        self._kept: list[tuple[np.ndarray[Any, Any], bytes]] = []
        self._waited = 0
        runner = engine.core.runner
        execute, transfer, draw = runner.execute, runner.transfer, core_module.draw

        def watched(planned: SchedulerOutput, pending: PendingTokens | None = None) -> torch.Tensor:
            number = self.count("forward")
            self.events.append(("forward", number))
            if any(s.pending for s in planned.scheduled):
                self.early.append(number)
            return execute(planned, pending)

        def drawn(*arguments: Any) -> Any:
            self.events.append(("draw", self.count("forward") - 1))
            found = draw(*arguments)
            return replace(found, tokens=found.tokens.as_subclass(Unread))

        def back(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            number, sent = self.count("forward") - 1, self._kept
            self._kept = []

            def wait() -> torch.Tensor:
                self.events.append(("wait", number))
                assert all(array.tobytes() == was for array, was in sent), "an array on its way was changed"
                return tensor.as_subclass(torch.Tensor)

            return wait

        call = Transfer.__call__

        def sending(one: Transfer, arrays: Sequence[Any], *rest: Any, **more: Any) -> list[torch.Tensor]:
            self._kept += [(array, array.tobytes()) for array in arrays]
            return call(one, arrays, *rest, **more)

        patch.setattr(runner, "execute", watched)
        patch.setattr(transfer, "back", back)
        patch.setattr(core_module, "draw", drawn)
        patch.setattr(Transfer, "__call__", sending)

    def count(self, what: str) -> int:
        return sum(event == what for event, _ in self.events)

    def at(self, what: str, number: int) -> int:
        """When it happened."""
        return self.events.index((what, number))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["launched whole", "launched one by one"])
def gpu(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in_gpu(patch, StandInCapture())
        yield make_engine(folder, cuda_graphs=request.param == "launched whole", **SETTINGS)


@pytest.fixture(scope="module")
def host(folder: Path) -> Engine:
    engine = make_engine(folder, device="cpu", **SETTINGS)
    assert engine.core.ahead is None
    return engine


def fresh(engine: Engine, tokens: int = 700, **settings: Any) -> Engine:
    return reschedule(engine, tokens, **{"max_num_batched_tokens": 128, "max_num_seqs": 8, **settings})


def ahead(engine: Engine) -> LookAhead:
    assert engine.core.ahead is not None
    return engine.core.ahead


def told(outputs: list[Output]) -> list[Any]:
    return [
        (o.error and o.error.error_class)
        or [(s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in o.samples]
        for o in outputs
    ]


def nothing_is_left(engine: Engine) -> None:
    scheduler = engine.core.scheduler
    scheduler.check()
    assert not scheduler.requests
    assert not scheduler._steps
    assert scheduler.manager.pool.num_used == 0


LONG = SamplingParams(max_tokens=24)
RANDOM = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=3)
MIXED = [
    LONG,
    RANDOM,
    replace(LONG, max_tokens=1),
    replace(RANDOM, top_k=7, min_p=0.02, max_tokens=9),
    replace(LONG, repetition_penalty=1.3, min_tokens=5),
    replace(RANDOM, frequency_penalty=0.5, max_tokens=17),
    replace(LONG, bad_words=("a",), logit_bias={7: 3.0}),
]


def test_the_next_step_is_launched_before_tokens_are_waited_for(
    gpu: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fresh(gpu)
    watched = Watched(engine, monkeypatch)
    outputs = run(engine, PROMPTS, replace(LONG, ignore_eos=True, max_tokens=12))
    assert [o.samples[0].token_ids for o in outputs] == oracle(folder, PROMPTS, 12)
    assert watched.early == list(range(1, 12))
    for number in watched.early:
        assert watched.at("forward", number) < watched.at("wait", number - 1) < watched.at("draw", number)
    assert watched.count("wait") == watched.count("forward") == engine.core.counters.steps == 12
    assert ahead(engine).followed == 11
    assert ahead(engine).alone == {"last": 1}
    nothing_is_left(engine)


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "in pieces": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "few at once": {"max_num_seqs": 2},
    "alone": {"max_num_seqs": 1},
    "short of blocks": {"tokens": 112},
    "nothing cached": {"tokens": 160, "prefix_caching": False},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_outputs_are_those_of_the_host(
    schedule: str, gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SCHEDULES[schedule]
    engine = fresh(gpu, **settings)
    Watched(engine, monkeypatch)
    for sampling in (LONG, RANDOM, MIXED):
        assert told(run(engine, PROMPTS, sampling)) == told(run(host, PROMPTS, sampling))
    found, steps = ahead(engine), engine.core.counters.steps
    assert found.followed + sum(found.alone.values()) == steps
    assert found.followed > steps / 2
    if schedule == "short of blocks":
        assert found.alone["blocks"] > 0
        assert engine.core.scheduler.stats.preemptions > 0
    nothing_is_left(engine)


def test_rows_that_stop_are_dropped_from_the_step_under_way(
    gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [o.samples[0] for o in run(host, PROMPTS, replace(RANDOM, ignore_eos=True))]
    sampling = [
        replace(RANDOM, stop_token_ids=(one.token_ids[2 + i],))
        if i % 2
        else replace(RANDOM, stop=(one.text[4 + i],))
        for i, one in enumerate(free)
    ]
    wanted = run(host, PROMPTS, sampling)
    assert {o.samples[0].finish_reason for o in wanted} == {"stop"}
    for settings in ({}, {"max_num_seqs": 3}, {"tokens": 112}):
        engine = fresh(gpu, **settings)
        with monkeypatch.context() as patch:
            Watched(engine, patch)
            assert told(run(engine, PROMPTS, sampling)) == told(wanted)
        nothing_is_left(engine)


ALONE: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "forks": ({}, replace(RANDOM, n=3, max_tokens=6)),
    "scores": ({}, replace(RANDOM, logprobs=2, max_tokens=6)),
    "read": (
        {"scoring": [Scoring(0, tuple(p[1:]) or (0,), 1) for p in PROMPTS]},
        replace(LONG, max_tokens=6),
    ),
    "processors": ({}, replace(RANDOM, logits_processors=(lambda ids, logits: logits * 1.5,), max_tokens=6)),
}


@pytest.mark.parametrize("why", ALONE)
def test_what_needs_the_host_is_finalized_first(
    why: str, gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, sampling = ALONE[why]
    engine = fresh(gpu, max_num_batched_tokens=32)
    Watched(engine, monkeypatch)
    got, want = (run(one, PROMPTS, sampling, **options) for one in (engine, host))
    assert told(got) == told(want)
    for a, b in zip(got, want, strict=True):
        for ours, theirs in ((a.scores, b.scores), (a.samples[0].scores, b.samples[0].scores)):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.token_ids == theirs.token_ids
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert ahead(engine).alone[why] > 0
    nothing_is_left(engine)


def fails(
    engine: Engine, patch: pytest.MonkeyPatch, when: Callable[[SchedulerOutput, bool], bool], error: Exception
) -> list[int]:
    """Let forward passes fail; `when` is told the step and whether it is early. Sizes of those that did."""
    execute, failed = engine.core.runner.execute, []

    def failing(planned: SchedulerOutput, pending: PendingTokens | None = None) -> torch.Tensor:
        if when(planned, pending is not None):
            failed.append(len(planned.scheduled))
            raise error
        return execute(planned, pending)

    patch.setattr(engine.core.runner, "execute", failing)
    return failed


def holds(planned: SchedulerOutput, row: int) -> bool:
    return any(s.request.row == row for s in planned.scheduled)


@pytest.mark.parametrize("error", [ValueError("broken"), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_early_step_that_fails_is_computed_alone(
    error: Exception, gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fresh(gpu)
    count = iter(range(1000))
    failed = fails(engine, monkeypatch, lambda _, early: early and next(count) % 3 == 1, error)
    assert told(run(engine, PROMPTS, MIXED)) == told(run(host, PROMPTS, MIXED))
    assert len(failed) == ahead(engine).alone["error"] > 3
    nothing_is_left(engine)


def test_a_row_that_makes_steps_fail_is_found(
    gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fresh(gpu)
    fails(
        engine,
        monkeypatch,
        lambda planned, _: holds(planned, 3) and any(s.start for s in planned.scheduled),
        ValueError("broken"),
    )
    wanted = told(run(host, PROMPTS, MIXED))
    wanted[3] = ErrorClass.INTERNAL
    assert told(run(engine, PROMPTS, MIXED)) == wanted
    assert ahead(engine).alone["isolated"] > 0
    nothing_is_left(engine)


def test_memory_that_suffices_for_small_steps_only(
    gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fresh(gpu)
    fails(
        engine,
        monkeypatch,
        lambda planned, _: planned.total_tokens > 4,
        torch.OutOfMemoryError("CUDA out of memory"),
    )
    assert told(run(engine, PROMPTS, MIXED)) == told(run(host, PROMPTS, MIXED))
    assert ahead(engine).followed > 0
    nothing_is_left(engine)


@pytest.mark.parametrize("tokens", [700, 112])
def test_logits_that_are_not_finite_end_their_row_alone(
    tokens: int, gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fresh(gpu, tokens=tokens)
    execute = engine.core.runner.execute
    early: list[bool] = []

    def spoiled(planned: SchedulerOutput, pending: PendingTokens | None = None) -> torch.Tensor:
        logits = execute(planned, pending).clone()
        samplers = [s for s in planned.scheduled if s.samples]
        bad = [s.request.row == 2 and s.start > 40 for s in samplers]
        early.extend(s.pending for s, spoil in zip(samplers, bad, strict=True) if spoil)
        logits[bad] = float("nan")
        return logits

    monkeypatch.setattr(engine.core.runner, "execute", spoiled)
    wanted = told(run(host, PROMPTS, MIXED))
    sampling = [replace(one, max_tokens=24) if i == 2 else one for i, one in enumerate(MIXED)]
    wanted[2] = ErrorClass.NONFINITE
    assert told(run(engine, PROMPTS, sampling)) == wanted
    assert any(early)
    nothing_is_left(engine)


def test_a_draw_that_fails_is_done_again(gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, draw, calls = fresh(gpu), core_module.draw, iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if next(calls) % 5 == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return draw(*arguments)

    monkeypatch.setattr(core_module, "draw", failing)
    assert told(run(engine, PROMPTS, MIXED)) == told(run(host, PROMPTS, MIXED))
    nothing_is_left(engine)


def breaks(engine: Engine, patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the third wait for tokens fail."""
    calls = iter(range(1000))

    def back(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        def wait() -> torch.Tensor:
            if next(calls) == 2:
                raise error
            return tensor

        return wait

    patch.setattr(engine.core.runner.transfer, "back", back)


def test_an_error_that_is_met_while_waiting(
    gpu: Engine, host: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fresh(gpu, tokens=300)
    with monkeypatch.context() as patch:
        breaks(engine, patch, MemoryError())
        assert told(run(engine, PROMPTS, MIXED)) == told(run(host, PROMPTS, MIXED))
    nothing_is_left(engine)
    engine = fresh(gpu)
    with monkeypatch.context() as patch:
        breaks(engine, patch, torch.AcceleratorError("CUDA error: an illegal memory access"))
        with pytest.raises(torch.AcceleratorError):
            run(engine, PROMPTS, MIXED)
    assert not engine.core.scheduler._steps
    engine.core.scheduler.check()
    engine.core.abort_all()
    nothing_is_left(engine)


def under_way(
    gpu: Engine, prompts: Sequence[list[int]], sampling: SamplingParams = LONG, steps: int = 3
) -> Engine:
    """An engine with a step under way behind those that were finalized."""
    engine = fresh(gpu)
    for row, prompt in enumerate(prompts):
        assert engine.core.add(Request(row, list(prompt), sampling)) is None
    for _ in range(steps):
        assert engine.core.step() == []
    assert len(engine.core.scheduler._steps) == 1
    return engine


def test_rows_may_go_while_a_step_is_under_way(gpu: Engine, host: Engine) -> None:
    engine = under_way(gpu, PROMPTS)
    engine.core.abort_all()
    nothing_is_left(engine)
    assert told(run(engine, PROMPTS, MIXED)) == told(run(host, PROMPTS, MIXED))
    # Their numbers come again, for others.
    engine = under_way(gpu, PROMPTS)
    for row in (1, 2):
        engine.core.fail(row, core_module.RowError(ErrorClass.TIMEOUT, "too long"))
        assert engine.core.add(Request(row, list(PROMPTS[row]), MIXED[1])) is None
    wanted = run(host, PROMPTS, [MIXED[1] if row in (1, 2) else LONG for row in range(len(PROMPTS))])
    found = {}
    while engine.core.num_unfinished:
        found.update((output.request_id, output) for output in engine.core.step())
    assert told([found[row] for row in range(len(PROMPTS))]) == told(wanted)
    nothing_is_left(engine)


def test_only_what_has_not_begun_is_dropped(gpu: Engine, host: Engine) -> None:
    engine = under_way(gpu, PROMPTS[:2])
    for row in (2, 3):
        engine.core.add(Request(row, list(PROMPTS[row]), LONG))
    engine.core.drop_unstarted()
    assert engine.core.num_unfinished == 2
    engine.core.add(Request(4, list(PROMPTS[4]), LONG))
    assert engine.core.step() == []
    # It began in the step that is under way.
    engine.core.drop_unstarted()
    found = []
    while engine.core.num_unfinished:
        found += engine.core.step()
    wanted = run(host, PROMPTS[:5], LONG)
    assert told(sorted(found, key=lambda o: o.request_id)) == told([wanted[i] for i in (0, 1, 4)])
    nothing_is_left(engine)


def test_partial_tokens_are_those_that_are_known(gpu: Engine, host: Engine) -> None:
    engine = under_way(gpu, PROMPTS[:3])
    wanted = run(host, PROMPTS[:3], LONG)
    assert engine.core.partials() == [(row, 0, 0, wanted[row].samples[0].token_ids[:3]) for row in range(3)]
    engine.core.step()
    assert engine.core.partials() == [(row, 0, 3, wanted[row].samples[0].token_ids[3:4]) for row in range(3)]


def test_a_crash_may_be_of_either_step_under_way(gpu: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh(gpu, max_num_seqs=3)
    said: list[list[int]] = []
    engine.core.on_step = said.append
    execute, wait = engine.core.runner.execute, engine.core.runner.transfer.back
    on_device: list[set[int]] = []
    only_before: list[set[int]] = []

    def launching(planned: SchedulerOutput, pending: PendingTokens | None = None) -> torch.Tensor:
        on_device.append({s.request.row for s in planned.scheduled})
        live = {row for step in on_device for row in step if row in engine.core._live}
        assert live == set(said[-1])
        only_before.append(live - on_device[-1])
        return execute(planned, pending)

    def back(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        def waiting() -> torch.Tensor:
            assert {row for row in on_device[0] if row in engine.core._live} <= set(said[-1])
            del on_device[0]
            return wait(tensor)()

        return waiting

    monkeypatch.setattr(engine.core.runner, "execute", launching)
    monkeypatch.setattr(engine.core.runner.transfer, "back", back)
    run(engine, PROMPTS, MIXED)
    assert any(only_before)


def test_an_engine_is_closed_with_a_step_under_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_gpu(monkeypatch)
    engine = under_way(make_engine(folder, **{**SETTINGS, "max_num_seqs": 16}), PROMPTS)
    engine.core.close()
    assert not engine.core.scheduler._steps
    assert engine.core.step() == []


def test_pending_tokens_are_put_in_their_places() -> None:
    requests = [Request(i, [1] * 4, SamplingParams()) for i in (7, 8, 9)]
    scheduled = [ScheduledRequest(r, 3, 2, True, [], pending=i != 1) for i, r in enumerate(requests)]
    assert scheduled[0].token_ids() == [1, 0]
    ids = torch.full((8,), 5)
    pending = PendingTokens(torch.tensor([40, 50, -1]), {9: 2, 7: 1, 3: 0})
    pending.fill_in(ids, scheduled, np.array([2, 4, 6]), Transfer(HOST))
    # Where there is no token nobody asks for what follows, and it must be one that the model knows.
    assert ids.tolist() == [5, 50, 5, 5, 5, 0, 5, 5]
