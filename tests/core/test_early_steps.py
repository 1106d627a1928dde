"""Steps that are decided before those before them are confirmed, against a scheduler that waits each time."""

from __future__ import annotations

import pytest
from core_sim import Sim, SimConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.core.kv_spec import KVCacheConfig, KVCacheGroup
from batchgen.core.scheduler import Scheduler, SchedulerConfig
from batchgen.types import EngineError, Request, SamplingParams

rows = st.fixed_dictionaries(
    {
        "tail": st.lists(st.integers(0, 2), min_size=1, max_size=8),
        "source": st.integers(0, 7),
        "shared": st.integers(0, 16),
        "max_tokens": st.integers(1, 24),
        "length": st.integers(1, 24),
        "resumed": st.sampled_from([0, 0, 0, 2, 5]),
        "salt": st.sampled_from([0, 0, 0, 1]),
    }
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.lists(rows, min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 24),
    st.integers(1, 8),
    st.sampled_from([(None,), (None, 5)]),
)
def test_blocks_have_the_names_that_a_scheduler_which_waits_gives_them(
    requests: list[dict[str, object]],
    block_size: int,
    max_tokens: int,
    max_seqs: int,
    windows: tuple[int | None, ...],
) -> None:
    """What has ended by itself in the meantime is not named, and what was pending is, in the end."""
    names = []
    for early in (False, True):
        sim = Sim(
            SimConfig(
                block_size=block_size,
                num_blocks=2000,
                max_tokens=max_tokens,
                max_seqs=max_seqs,
                windows=windows,
            )
        )
        for request in requests:
            sim.add(**request)  # type: ignore[arg-type]
        while early and sim.scheduler.has_unfinished:
            if not sim.launch().scheduled:
                sim.confirm()
        sim.drain()
        names.append({key for key, _ in sim.scheduler.manager.pool.index})
    assert names[0] == names[1]


def make(**config: int) -> Scheduler:
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64, **config}
    blocks = limits.pop("num_blocks", 20)
    return Scheduler(
        SchedulerConfig(watermark=0.0, debug_checks=True, **limits),  # type: ignore[arg-type]
        KVCacheConfig(blocks, 4, (KVCacheGroup(None, (0,)),)),
    )


def row(number: int, length: int, max_tokens: int = 8) -> Request:
    prompt = [100 * number + i for i in range(length)]
    return Request(number, prompt, SamplingParams(max_tokens=max_tokens))


def test_a_pending_token_is_computed_and_has_no_name_until_it_is_known() -> None:
    scheduler = make()
    request = row(0, 7)
    scheduler.add(request)
    first = scheduler.schedule()
    second = scheduler.schedule(early=True)
    [step] = second.scheduled
    assert (step.start, step.num_tokens, step.samples, step.pending) == (7, 1, True, True)
    assert step.token_ids() == [0]
    assert len(scheduler.manager.pool.index) == 1
    scheduler.update(first, {0: 9})
    assert len(scheduler.manager.pool.index) == 1
    third = scheduler.schedule(early=True)
    assert len(scheduler.manager.pool.index) == 2
    scheduler.rollback(third)
    scheduler.rollback(second)
    assert len(scheduler.manager.pool.index) == 1
    assert (request.num_computed_tokens, request.num_pending) == (7, 0)


def test_what_ends_with_its_pending_token_is_not_followed() -> None:
    scheduler = make(max_model_len=8)
    for request in (row(0, 4, 1), row(1, 4, 2), row(2, 7, 9)):
        scheduler.add(request)
    first = scheduler.schedule()
    second = scheduler.schedule(early=True)
    assert [s.request.request_id for s in second.scheduled] == [1]
    scheduler.update(first, {0: 1, 1: 1, 2: 1})
    scheduler.finish(0)
    scheduler.finish(2)
    scheduler.update(second, {1: 1})
    scheduler.finish(1)
    assert not scheduler.schedule().scheduled


def test_who_ends_with_its_pending_token_gives_its_place_to_another() -> None:
    scheduler = make(max_num_seqs=2)
    for number, max_tokens in enumerate((1, 5, 1, 5)):
        scheduler.add(row(number, 4, max_tokens))
    first = scheduler.schedule()
    second = scheduler.schedule(early=True)
    assert [s.request.request_id for s in second.scheduled] == [1, 2]
    scheduler.rollback(second)
    scheduler.rollback(first)
    first = scheduler.schedule()
    assert [s.request.request_id for s in first.scheduled] == [0, 1]
    second = scheduler.schedule(early=True)
    scheduler.update(first, {0: 1, 1: 1})
    scheduler.finish(0)
    third = scheduler.schedule(early=True)
    assert [s.request.request_id for s in third.scheduled] == [1, 3]
    assert scheduler.num_running == 3
    scheduler.update(second, {1: 1, 2: 1})
    scheduler.finish(2)
    scheduler.update(third, {1: 1, 3: 1})


def test_an_early_step_with_nothing_to_do_is_none() -> None:
    scheduler = make()
    scheduler.add(row(0, 4, 1))
    first = scheduler.schedule()
    empty = scheduler.schedule(early=True)
    assert not empty.scheduled
    scheduler.rollback(empty)
    scheduler.update(empty, {})
    scheduler.update(first, {0: 1})
    scheduler.finish(0)


def test_an_early_step_leaves_out_who_finds_no_block() -> None:
    scheduler = make(num_blocks=5)
    for number in (0, 1):
        scheduler.add(row(number, 8))
    first = scheduler.schedule()
    early = scheduler.schedule(early=True)
    assert (early.scheduled, early.short, early.preempted) == ([], True, [])
    scheduler.update(first, {0: 1, 1: 1})
    assert scheduler.schedule().preempted == [1]


def test_two_steps_are_under_way_at_most_and_end_in_their_order() -> None:
    scheduler = make()
    scheduler.add(row(0, 4))
    with pytest.raises(EngineError, match="or early without one"):
        scheduler.schedule(early=True)
    first = scheduler.schedule()
    second = scheduler.schedule(early=True)
    for early in (False, True):
        with pytest.raises(EngineError, match="before update"):
            scheduler.schedule(early=early)
    with pytest.raises(EngineError, match="out of their order"):
        scheduler.update(second, {0: 1})
    with pytest.raises(EngineError, match="out of their order"):
        scheduler.rollback(first)
    with pytest.raises(ValueError, match="a step is under way"):
        scheduler.fork(0, [])
    scheduler.update(first, {0: 1})
    scheduler.update(second, {0: 1})
