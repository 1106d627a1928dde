"""`input.dedupe: prompt` on a real engine: the same outputs, less work, nothing shared that must not be."""

from __future__ import annotations

import pytest
from engine_harness import make_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny_llama

from batchgen.dist.duplicates import DedupingCore
from batchgen.engine.build import Engine
from batchgen.types import ErrorClass, Output, Request, RowError, SamplingParams

PROMPTS = [[5, 6, 7], [5, 6, 7, 8], [9] * 20, [5, 6, 7]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(save_tiny_llama(tmp_path_factory.mktemp("llama")))


def deduping(engine: Engine) -> DedupingCore:
    return DedupingCore(engine.core, lambda row: row == 999)


def drive(core: DedupingCore, requests: list[Request], steps_between: int = 0) -> dict[int, Output]:
    done: dict[int, Output] = {}
    for request in requests:
        output = core.add(request)
        if output is not None:
            done[output.request_id] = output
        for _ in range(steps_between):
            done |= {o.request_id: o for o in core.step()}
    while core.num_unfinished:
        done |= {o.request_id: o for o in core.step()}
    return done


def request(row: int, prompt: list[int], **sampling: object) -> Request:
    return Request(row, list(prompt), SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling}))  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.tuples(st.sampled_from(range(4)), st.sampled_from([0.0, 1.0]), st.sampled_from([3, 6]))),
    steps_between=st.integers(0, 3),
)
def test_outputs_are_those_of_computing_each(
    engine: Engine, rows: list[tuple[int, float, int]], steps_between: int
) -> None:
    def made() -> list[Request]:
        return [
            request(i, PROMPTS[p], temperature=t, max_tokens=m, seed=i % 2)
            for i, (p, t, m) in enumerate(rows)
        ]

    plain = drive(DedupingCore(engine.core, lambda row: True), made())
    found = drive(deduping(engine), made(), steps_between)
    assert found.keys() == plain.keys() == set(range(len(rows)))
    for row, output in found.items():
        wanted = plain[row]
        assert (output.token_ids, output.text, output.finish_reason) == (
            wanted.token_ids,
            wanted.text,
            wanted.finish_reason,
        )
        assert (output.prompt_tokens, output.completion_tokens) == (
            wanted.prompt_tokens,
            wanted.completion_tokens,
        )


def test_equal_greedy_rows_are_computed_once_before_and_after_the_first_has_ended(engine: Engine) -> None:
    core = deduping(engine)
    before = engine.core.counters.sampled
    drive(core, [request(i, [1, 2, 3]) for i in range(50)])
    assert drive(core, [request(60, [1, 2, 3], seed=9)])[60].cached_tokens == 3
    assert engine.core.counters.sampled - before == 6


def test_sampled_rows_are_independent(engine: Engine) -> None:
    done = drive(deduping(engine), [request(i, [1, 2, 3], temperature=1.0) for i in range(5)])
    assert len({tuple(output.token_ids) for output in done.values()}) == 5


def test_a_canary_is_computed(engine: Engine) -> None:
    core = deduping(engine)
    drive(core, [request(0, [1, 2, 3])])
    before = engine.core.counters.sampled
    drive(core, [request(999, [1, 2, 3])])
    assert engine.core.counters.sampled == before + 6


def test_a_row_that_goes_on_is_not_shared(engine: Engine) -> None:
    core = deduping(engine)
    whole = drive(core, [request(0, [1, 2, 3])])[0]
    partial = request(1, [1, 2, 3])
    partial.output_token_ids = list(whole.token_ids[:4])
    assert drive(core, [partial])[1].token_ids == whole.token_ids


def test_who_waited_for_a_row_that_failed_is_computed(engine: Engine) -> None:
    core = deduping(engine)
    for row in range(3):
        core.add(request(row, [4, 4, 4]))
    core.step()
    failed = core.fail(0, RowError(ErrorClass.TIMEOUT, "too long"))
    assert failed.error is not None
    done: dict[int, Output] = {}
    while core.num_unfinished:
        done |= {o.request_id: o for o in core.step()}
    assert done.keys() == {1, 2}
    assert all(output.ok for output in done.values())
    assert done[1].token_ids == done[2].token_ids
