"""What is noted of an engine's steps, against what the engine did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_harness import make_engine
from stand_in_gpu import StandInCapture, stand_in_gpu
from tiny_models import save_tiny_llama

from batchgen.bench.gaps import STEPS, busy_seconds, host_share, idle_share, profiled, waiting_shares
from batchgen.bench.parts import ALL, DECODING, HOST, INPUTS, MIXED, PROMPTS, SCHEDULER
from batchgen.bench.passes import Pass, run_pass
from batchgen.bench.steps import Span, Step
from batchgen.scores import Scoring
from batchgen.types import Request, SamplingParams, Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def requests(count: int, prompt: int, tokens: int, first: int = 0) -> list[Request]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        Request(first + i, [(first + i * 7 + j) % 250 for j in range(prompt)], sampling) for i in range(count)
    ]


@pytest.mark.parametrize(
    ("spans", "kind"),
    [
        ([Span(9, 10, True), Span(4, 5, True)], DECODING),
        ([Span(9, 10, True), Span(4, 5, False)], MIXED),
        ([Span(9, 10, True)] * 7 + [Span(0, 7, True)], PROMPTS),
        ([Span(9, 10, True)] * 8 + [Span(0, 7, True)], MIXED),
        ([Span(0, 7, False)], PROMPTS),
    ],
)
def test_kinds_of_steps(spans: list[Span], kind: str) -> None:
    assert Step(spans, 1.0, 0).kind == kind


def test_what_is_read_of_a_span() -> None:
    assert Span(3, 8, True).needed == [range(7, 8)]
    assert Span(3, 8, False).needed == []
    assert Span(3, 8, True, scored=range(4, 7)).needed == [range(4, 7), range(7, 8)]
    assert Span(3, 8, True, scored=range(4, 8)).needed == [range(4, 8)]
    assert Span(3, 8, False, pooled=range(7, 8)).needed == [range(7, 8)]
    assert (Span(3, 8, True, scored=range(4, 7)).logits, Span(3, 8, False, pooled=range(7, 8)).logits) == (
        4,
        0,
    )


def test_every_step_of_a_pass(folder: Path) -> None:
    engine = make_engine(folder, max_num_batched_tokens=32)
    done = run_pass(engine.core, requests(3, 20, 5))
    assert [len(output.token_ids) for output in done.outputs.values()] == [5, 5, 5]
    assert done.count == len(done.steps)
    # All tokens but the last of each row are computed, one at a time or together.
    assert sum(step.tokens for step in done.steps) == done.computed == 3 * (20 + 4)
    assert sum(step.logits for step in done.steps) == 3 * 5
    assert [step.kind for step in done.steps] == [PROMPTS] * 2 + [DECODING] * 4
    assert sum(step.seconds for step in done.steps) <= done.seconds
    assert vars(engine.core.runner).get("execute") is vars(engine.core.scheduler).get("rollback") is None


@pytest.mark.parametrize("ends", [True, False])
def test_steps_as_a_gpu_takes_them(folder: Path, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Also where a step is launched before the last has ended, rows end early, and steps are captured."""
    capture = StandInCapture()
    stand_in_gpu(monkeypatch, capture)
    core = make_engine(folder, attention="reference", max_num_batched_tokens=32, cuda_graphs=True).core
    rows = requests(4, 20, 9)
    for i, row in enumerate(rows):
        row.sampling = SamplingParams(max_tokens=5 + i, temperature=1.0, ignore_eos=not ends)
    done = run_pass(core, rows)
    assert len(done.outputs) == 4
    assert capture.launched
    assert done.count == len(done.steps) > 0
    assert sum(step.tokens for step in done.steps) == done.computed
    assert [step.kind for step in done.steps[:3]] == [PROMPTS] * 3
    assert {step.kind for step in done.steps[4:]} == {DECODING}


def test_what_was_in_the_cache_is_not_computed(folder: Path) -> None:
    engine = make_engine(folder)
    first = run_pass(engine.core, requests(1, 100, 1))
    again = run_pass(engine.core, [Request(9, [j % 250 for j in range(100)], SamplingParams(max_tokens=1))])
    assert (first.cached, first.hit_share, first.computed) == (0, 0.0, 100)
    # Whole blocks, and the last token must be computed.
    block = engine.core.runner.block_size
    cached = 99 // block * block
    assert (again.cached, again.hit_share, again.computed) == (cached, cached / 100, 100 - cached)
    [step] = again.steps
    assert step.spans == [Span(cached, 100, True)]


def test_scored_positions_are_noted(folder: Path) -> None:
    engine = make_engine(folder)
    request = Request(
        0,
        list(range(9)),
        SamplingParams(max_tokens=1),
        task=Task.LOGLIKELIHOOD,
        scoring=Scoring(0, tuple(range(1, 9))),
    )
    [step] = run_pass(engine.core, [request]).steps
    assert step.spans == [Span(0, 9, False, scored=range(8))]
    assert step.logits == 8


def test_steps_that_are_taken_back_do_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder)
    core, calls = engine.core, 0
    sample = core._sample

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("out of memory")
        return sample(*arguments)

    monkeypatch.setattr(core, "_sample", failing)
    done = run_pass(core, requests(4, 20, 4))
    assert calls > len(done.steps) == done.count
    assert sum(step.tokens for step in done.steps) == done.computed


def test_what_a_device_did() -> None:
    micro = 1e-6
    assert busy_seconds([]) == 0
    # Overlapping, within another, touching; a pause of 2 microseconds is the device's own, one of 10 is not.
    assert busy_seconds([(0, 5), (3, 8), (4, 6), (8, 9)]) == 9
    spans = [(12 * micro, 20 * micro), (0.0, 10 * micro), (30 * micro, 35 * micro)]
    assert busy_seconds(spans) == pytest.approx(25 * micro)


def test_the_share_of_time_without_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder)
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    # Each look at the clock is half a second later: a step takes one half, and the device a quarter.
    monkeypatch.setattr("batchgen.bench.gaps.time.perf_counter", clock)

    def watch(run: Callable[[], None]) -> list[tuple[float, float]]:
        run()
        return [(1.0 * i, 1.0 * i + 0.25) for i in range(STEPS[DECODING])]

    assert idle_share(engine.core, requests(4, 20, 60), DECODING, watch) == pytest.approx(0.5)
    assert engine.core.num_unfinished == 0


def test_nothing_is_said_of_steps_that_there_are_not(folder: Path) -> None:
    engine = make_engine(folder)
    seen: list[Any] = []

    def watch(run: Callable[[], None]) -> list[tuple[float, float]]:
        run()
        seen.append(run)
        return []

    # Too few, of another kind, a device of which nothing is seen.
    assert idle_share(engine.core, requests(2, 20, 9), DECODING, watch) is None
    assert idle_share(engine.core, requests(2, 20, 60, first=50), PROMPTS, watch) is None
    assert not seen
    assert idle_share(engine.core, requests(2, 20, 60, first=90), DECODING, watch) is None
    assert len(seen) == 1
    assert engine.core.num_unfinished == 0


def test_the_hosts_share_of_a_processors_time() -> None:
    parts = {SCHEDULER: 1.0, INPUTS: 0.5, HOST: 0.25, "qkv": 6.0, "sampling": 1.0}
    assert host_share(Pass(seconds=10.0, parts=parts)) == pytest.approx((1.75 + 1.25) / 10)


def test_the_device_waits_in_steps_of_each_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the rows that generate run again, in tokens that no cache has."""
    core = make_engine(folder).core
    rows = requests(2, 20, 3)
    done = run_pass(core, rows)
    assert waiting_shares(core, done, rows, 50) == {ALL: host_share(done)}
    asked: list[tuple[str, list[Request]]] = []

    def idle(_: object, given: list[Request], kind: str) -> float:
        asked.append((kind, given))
        return 0.25

    monkeypatch.setattr("batchgen.bench.gaps.idle_share", idle)
    monkeypatch.setattr(core.runner, "device", SimpleNamespace(place=torch.device("cuda")))
    done.steps = [Step(step.spans, 1.0, 0) for step in done.steps]
    done.seconds = 3.0
    pooled = Request(9, [1, 2], SamplingParams(), task=Task.EMBED)
    assert waiting_shares(core, done, [*rows, pooled], 50) == {PROMPTS: 0.25, DECODING: 0.25}
    assert [(kind, [r.request_id for r in given]) for kind, given in asked] == [
        (PROMPTS, [50, 51]),
        (DECODING, [50, 51]),
    ]
    seen = {r.prompt_token_ids[0] for _, given in asked for r in given} | {
        r.prompt_token_ids[0] for r in rows
    }
    assert len(seen) == 6
    done.seconds = 15.0
    assert waiting_shares(core, done, rows, 60) == {DECODING: 0.25}


@pytest.mark.parametrize("fails", ["nothing", "start", "stop"])
def test_a_gpus_own_record(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Of what was done on the device, in seconds; a profiler that does not work ends nothing."""
    calls: list[str] = []

    def act(name: str) -> None:
        calls.append(name)
        if name == fails:
            raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    device = torch.autograd.DeviceType  # type: ignore[attr-defined]
    events = [
        SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=2e6, end=5e6))
        for kind in (device.CPU, device.CUDA)
    ]
    fake = SimpleNamespace(start=lambda: act("start"), stop=lambda: act("stop"), events=lambda: events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: fake)
    found = profiled(lambda: act("run"))
    assert found == ([(2.0, 5.0)] if fails == "nothing" else [])
    assert calls == (["start"] if fails == "start" else ["start", "run", "stop"])
