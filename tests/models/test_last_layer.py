"""Of the last layer only what is read is computed, with the same bits, and nothing else looks like it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from families import CONTEXT, FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import open_engine

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.build import Engine
from batchgen.engine.device import HOST
from batchgen.engine.inputs import pack_step
from batchgen.engine.runner import ModelRunner
from batchgen.engine.transfer import Transfer
from batchgen.scores import Pooling, Scoring
from batchgen.types import Request, SamplingParams
from batchgen_kernels.cpu import plan

KINDS = ("llama", "gemma3", "olmo2", "qwen3", "llama in int8", "olmo2 in int8")
"""Norms before products, around and behind them, and of heads; windows; records made by norms and apart."""
Part = tuple[int, int, str]
"""Tokens computed before, tokens of this step, and what is read of them."""
MIXED: list[Part] = [(0, 40, "nothing"), (3, 9, "sampled"), (70, 1, "sampled"), (20, 30, "scored")]


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    name, _, quantization = request.param.partition(" in ")
    family = next(family for family in FAMILIES if family.name == name)
    engine = open_engine(family, tmp_path_factory.mktemp("model"), quantization=quantization or None)
    yield fused(engine)
    engine.core.close()


def fused(engine: Engine) -> ModelRunner:
    assert engine.core.runner.program is not None
    return engine.core.runner


def step_of(runner: ModelRunner, parts: list[Part]) -> tuple[SchedulerOutput, SchedulerOutput]:
    """The step before, in which what was computed already is, and a step of these parts."""
    block = itertools.count(1)
    before, now = [], []
    for row, (computed, count, read) in enumerate(parts):
        total = computed + count
        ids = [(7 + 31 * row + 13 * t) % 250 for t in range(total)]
        request = Request(row, ids, SamplingParams(max_tokens=1))
        if read == "scored":
            request.scoring = Scoring(computed + count // 2, (5,) * (count - count // 2))
        elif read == "pooled":
            request.pooling = Pooling.MEAN
        tables = [[next(block) for _ in range(-(-total // runner.block_size))] for _ in runner.layout.groups]
        if computed:
            before.append(ScheduledRequest(request, 0, computed, False, tables))
        now.append(ScheduledRequest(request, computed, count, read == "sampled", tables))
    sums = (sum(s.num_tokens for s in scheduled) for scheduled in (before, now))
    earlier, step = (SchedulerOutput(s, n, [], []) for s, n in zip((before, now), sums, strict=True))
    return earlier, step


def wanted(step: SchedulerOutput) -> list[int]:
    """Rows that are read."""
    rows, offset = [], 0
    for s in step.scheduled:
        own = (
            {s.start + s.num_tokens - 1}
            if s.samples
            else set(s.request.reads(s.start, s.start + s.num_tokens))
        )
        rows += sorted(offset + position - s.start for position in own)
        offset += s.num_tokens
    return rows


def both(
    runner: ModelRunner, parts: list[Part]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, logits) with all rows of the last layer, then with those that are read."""
    earlier, step = step_of(runner, parts)
    if earlier.scheduled:
        runner.execute(earlier)
    truth = runner.execute(step, whole=True).clone()
    whole = runner.hidden.clone()
    logits = runner.execute(step)
    return whole, truth, runner.hidden, logits


@st.composite
def schedules(draw: st.DrawFn) -> list[Part]:
    reads = st.sampled_from(["nothing", "sampled", "scored", "pooled"])
    parts = st.tuples(st.integers(0, 60), st.just(1) | st.integers(1, CONTEXT - 60), reads)
    return draw(st.lists(parts, min_size=1, max_size=6))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_what_is_read_has_the_same_bits_and_nothing_else_is_a_number(
    runner: ModelRunner, parts: list[Part]
) -> None:
    whole, truth, hidden, logits = both(runner, parts)
    rows = wanted(step_of(runner, parts)[1])
    assert torch.equal(hidden[rows], whole[rows])
    assert torch.equal(logits, truth)
    others = np.setdiff1d(np.arange(sum(count for _, count, _ in parts)), rows)
    assert hidden[others].isnan().all()
    assert whole[: sum(count for _, count, _ in parts)].isfinite().all()


def test_a_step_of_which_nothing_is_read(runner: ModelRunner) -> None:
    _, _, hidden, logits = both(runner, [(0, 20, "nothing"), (7, 3, "nothing")])
    assert hidden.isnan().all()
    assert len(logits) == 0


def test_rows_needed_are_those_that_are_read() -> None:
    runner_like = type("Layout", (), {"block_size": 16, "layout": type("Groups", (), {"groups": [0]})})
    _, step = step_of(runner_like, MIXED)  # type: ignore[arg-type]
    packed = pack_step(step, 16, 1, Transfer(HOST))
    assert packed.needed.on_host.tolist() == wanted(step) == [48, 49, *range(65, 80)]
    packed = pack_step(step, 16, 8, Transfer(HOST), whole=True)
    assert packed.needed.on_host.tolist() == list(range(80))


def shifted(runs: np.ndarray) -> np.ndarray:
    return runs + np.array([0, 0, 0, -1, 0])


def of_the_row_before(runs: np.ndarray) -> np.ndarray:
    return runs - np.array([0, 1, 0, 0, 0])


def swapped(runs: np.ndarray) -> np.ndarray:
    runs[:2, 4] = runs[1::-1, 4]
    return runs


@pytest.mark.parametrize("change", [shifted, of_the_row_before, swapped])
def test_a_wrong_row_is_noticed(runner: ModelRunner, change, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan.runs_of
    monkeypatch.setattr(plan, "runs_of", lambda *args: change(right(*args)))
    whole, _, hidden, _ = both(runner, MIXED)
    rows = [48, 49, *range(65, 80)]
    assert not torch.equal(hidden[rows], whole[rows])


def test_a_cache_is_written_by_rows_that_nobody_reads(runner: ModelRunner) -> None:
    """A prompt in three pieces, only the last of which samples, equals one that is computed whole."""
    _, step = step_of(runner, [(50, 7, "sampled")])
    (s,) = step.scheduled
    for start, count in ((0, 17), (17, 33)):
        runner.execute(
            SchedulerOutput([ScheduledRequest(s.request, start, count, False, s.block_ids)], count, [], [])
        )
    pieces = runner.execute(step).clone()
    for cache in runner.kv.caches:
        for tensor in cache.tensors:
            tensor.zero_()
    both_at_once = ScheduledRequest(s.request, 0, 57, True, s.block_ids)
    assert torch.equal(pieces, runner.execute(SchedulerOutput([both_at_once], 57, [], [])))


def test_an_embedding_is_of_needed_rows(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "llama")
    engine = open_engine(family, tmp_path, task="embed")
    whole, _, hidden, _ = both(fused(engine), [(0, 9, "pooled"), (4, 5, "nothing")])
    assert torch.equal(hidden[:9], whole[:9])
    assert hidden[9:].isnan().all()
    engine.core.close()
