"""The scheduler's rules, each in a scene of its own; the state machine does the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest
from core_sim import Sim, SimConfig

from batchgen.core.kv_spec import KVCacheConfig, KVCacheGroup
from batchgen.core.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from batchgen.core.waiting_queue import WaitingQueue
from batchgen.types import EngineError, ErrorClass, Request, RequestState, RowFailure, SamplingParams


def make(num_blocks=20, block_size=4, budget=16, seqs=4, length=64, **config):
    config.setdefault("watermark", 0.0)
    return Scheduler(
        SchedulerConfig(budget, seqs, length, debug_checks=True, **config),
        KVCacheConfig(num_blocks, block_size, (KVCacheGroup(None, (0,)),)),
    )


def row(request_id, prompt=4, max_tokens=8, **fields):
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(request_id, tokens, SamplingParams(max_tokens=max_tokens), **fields)


def shape(output):
    return [(s.request.request_id, s.start, s.num_tokens, s.samples) for s in output.scheduled]


def run(scheduler, token=9):
    output = scheduler.schedule()
    scheduler.update(output, {s.request.request_id: token for s in output.scheduled if s.samples})
    return shape(output)


def other(request_id, prompt, **fields):
    """A row that shares no prefix with any other."""
    return row(request_id, [1000 * (request_id + 1) + i for i in range(prompt)], **fields)


def test_nothing_to_do_is_an_empty_step():
    scheduler = make()
    output = scheduler.schedule()
    assert output == SchedulerOutput()
    scheduler.update(output, {})
    scheduler.rollback(output)
    assert not scheduler.has_unfinished


def test_a_prompt_is_computed_in_chunks_and_samples_once_at_its_end():
    scheduler = make(budget=4)
    scheduler.add(row(0, 10))
    assert [run(scheduler) for _ in range(4)] == [
        [(0, 0, 4, False)],
        [(0, 4, 4, False)],
        [(0, 8, 2, True)],
        [(0, 10, 1, True)],
    ]
    assert scheduler.requests[0].output_token_ids == [9, 9]


def test_running_requests_come_first_and_the_budget_is_shared():
    scheduler = make(budget=6)
    scheduler.add(other(0, 4))
    scheduler.add(other(1, 4))
    assert run(scheduler) == [(0, 0, 4, True), (1, 0, 2, False)]
    assert run(scheduler) == [(0, 4, 1, True), (1, 2, 2, True)]


def test_no_more_run_than_max_num_seqs():
    scheduler = make(seqs=2)
    for i in range(3):
        scheduler.add(other(i, 2))
    assert [entry[0] for entry in run(scheduler)] == [0, 1]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.finish(0)
    assert [entry[0] for entry in run(scheduler)] == [1, 2]


def test_priority_goes_before_arrival():
    scheduler = make(seqs=1)
    scheduler.add(other(0, 2))
    scheduler.add(other(1, 2, priority=1))
    assert [entry[0] for entry in run(scheduler)] == [1]


def test_equal_prefixes_admitted_in_one_step_are_computed_once():
    scheduler = make(budget=64)
    for i in range(3):
        scheduler.add(row(i, [*range(8), 100 + i]))
    output = scheduler.schedule()
    assert shape(output) == [(0, 0, 9, True), (1, 8, 1, True), (2, 8, 1, True)]
    assert [list(s.block_ids[0][:2]) for s in output.scheduled] == [[1, 2]] * 3
    assert scheduler.stats.prompt_tokens == 27
    assert scheduler.stats.cached_tokens == 16
    assert [s.request.num_cached_tokens for s in output.scheduled] == [0, 8, 8]


def test_without_prefix_caching_nothing_is_shared_or_hashed():
    scheduler = make(budget=64, prefix_caching=False)
    for i in range(2):
        scheduler.add(row(i, 9))
    assert run(scheduler) == [(0, 0, 9, True), (1, 0, 9, True)]
    assert scheduler.requests[0].block_hashes == []
    assert len(scheduler.manager.pool.index) == 0


def test_a_hit_never_covers_the_last_known_token():
    scheduler = make()
    scheduler.add(row(0, 8))
    run(scheduler)
    scheduler.add(row(1, 8))
    assert run(scheduler)[1] == (1, 4, 4, True)


def test_a_resumed_row_is_only_a_longer_one():
    scheduler = make()
    scheduler.add(row(0, 3, output_token_ids=[7, 8, 9]))
    assert run(scheduler, token=5) == [(0, 0, 6, True)]
    assert scheduler.requests[0].output_token_ids == [7, 8, 9, 5]


def test_different_cache_keys_share_nothing():
    scheduler = make(budget=64)
    scheduler.add(row(0, 9))
    scheduler.add(row(1, 9, cache_keys=((0, ("salt", "x")),)))
    scheduler.add(row(2, 9, cache_keys=((5, ("image", b"d")),)))
    assert [entry[1] for entry in run(scheduler)] == [0, 0, 4]


def test_the_last_to_be_admitted_is_preempted_and_goes_to_the_front():
    scheduler = make(num_blocks=5)
    scheduler.add(other(0, 8))
    scheduler.add(other(1, 7))
    run(scheduler)
    scheduler.add(other(2, 4))
    output = scheduler.schedule()
    assert shape(output) == [(0, 8, 1, True)]
    assert output.preempted == [1]
    assert [r.request_id for r in scheduler.waiting] == [1, 2]
    assert scheduler.requests[1].state is RequestState.PREEMPTED
    assert scheduler.requests[1].num_preemptions == scheduler.stats.preemptions == 1


def test_a_victim_already_scheduled_in_the_step_gives_its_tokens_back():
    """The low-priority row comes first in the step, and goes for the high-priority one after it."""
    scheduler = make(num_blocks=4, budget=8)
    scheduler.add(other(0, 1, max_tokens=12))
    run(scheduler)
    scheduler.add(other(1, 7, priority=1, max_tokens=4))
    assert run(scheduler) == [(0, 1, 1, True), (1, 0, 7, True)]
    assert run(scheduler) == [(0, 2, 1, True), (1, 7, 1, True)]
    output = scheduler.schedule()
    assert shape(output) == [(1, 8, 1, True)]
    assert output.preempted == [0]
    assert output.total_tokens == 1
    scheduler.update(output, {0: 9, 1: 9})
    assert len(scheduler.requests[0].output_token_ids) == 3


def test_after_a_preemption_the_rest_of_the_same_step_goes_on():
    """A row that preempts itself, being of lowest priority, does not stop those after it."""
    scheduler = make(num_blocks=5, budget=16)
    scheduler.add(other(0, 7, max_tokens=9))
    run(scheduler)
    scheduler.add(other(1, 6, priority=1))
    run(scheduler)
    assert run(scheduler) == [(1, 6, 1, True)]
    assert [r.request_id for r in scheduler.waiting] == [0]


def test_a_resumed_request_is_counted_apart():
    scheduler = make(num_blocks=5)
    scheduler.add(other(0, 8, max_tokens=2))
    scheduler.add(other(1, 7))
    run(scheduler)
    run(scheduler)
    scheduler.finish(0)
    assert run(scheduler) == [(1, 4, 4, True)]
    assert (scheduler.stats.prompt_tokens, scheduler.stats.cached_tokens) == (15, 0)
    assert (scheduler.stats.resumed_tokens, scheduler.stats.resumed_cached_tokens) == (8, 4)
    assert scheduler.requests[1].num_cached_tokens == 0
    assert scheduler.stats.scheduled_tokens == 8 + 7 + 1 + 4


def test_a_failed_step_does_not_touch_the_first_hit_of_a_resumed_request():
    scheduler = make(num_blocks=8)
    scheduler.add(row(0, 8))
    run(scheduler)
    scheduler.add(row(1, 9))
    run(scheduler)
    assert scheduler.requests[1].num_cached_tokens == 8
    assert scheduler.poison(0) == [1]
    scheduler.rollback(scheduler.schedule())
    assert scheduler.requests[1].state is RequestState.PREEMPTED
    assert scheduler.requests[1].num_cached_tokens == 8
    assert (scheduler.stats.resumed_tokens, scheduler.stats.resumed_cached_tokens) == (0, 0)


@pytest.mark.parametrize(("max_tokens", "computed"), [(0, 1), (3, 3), (16, 10), (99, 10), (None, 10)])
def test_a_step_can_be_made_smaller_but_not_larger_or_empty(max_tokens, computed):
    scheduler = make(budget=10)
    scheduler.add(row(0, 12))
    assert scheduler.schedule(max_tokens).total_tokens == computed


def test_debug_checks_follow_every_call(monkeypatch):
    scheduler, calls = make(), []
    monkeypatch.setattr(scheduler, "check", lambda: calls.append(len(calls)))
    scheduler.add(row(0, 6))
    failed = scheduler.schedule()
    scheduler.rollback(failed)
    scheduler.update(scheduler.schedule(), {0: 1})
    scheduler.fork(0, [row(1, 6, output_token_ids=[5])])
    scheduler.finish(1)
    scheduler.poison(0)
    assert len(calls) == 8


def test_a_chunked_prompt_is_admitted_only_if_all_of_it_fits():
    scheduler = make(num_blocks=8, budget=4)
    scheduler.add(other(0, 16))
    scheduler.add(other(1, 16))
    for _ in range(4):
        assert [entry[0] for entry in run(scheduler)] == [0]
    assert run(scheduler) == [(0, 16, 1, True)]
    assert scheduler.num_waiting == 1


def test_blocks_promised_to_a_running_prompt_are_not_given_away():
    scheduler = make(num_blocks=8, budget=6)
    scheduler.add(other(0, 16))
    run(scheduler)
    scheduler.add(other(1, 13, priority=1))
    run(scheduler)
    assert scheduler.num_running == 1
    assert scheduler.stats.preemptions == 0


def test_the_watermark_holds_only_while_others_run():
    scheduler = make(num_blocks=11, watermark=0.3)
    scheduler.add(other(0, 30, max_tokens=2))
    for _ in range(2):
        run(scheduler)
    scheduler.add(other(1, 4))
    run(scheduler)
    assert scheduler.num_running == 1
    scheduler.finish(0)
    run(scheduler)
    assert scheduler.num_running == 1
    assert scheduler.num_waiting == 0


def test_hits_nobody_holds_count_as_taken():
    """All five blocks are free, four of them as hits; a row of six blocks is not admitted beside another."""
    scheduler = make(num_blocks=8, budget=32)
    scheduler.add(row(0, 16, max_tokens=1))
    run(scheduler)
    scheduler.finish(0)
    scheduler.add(other(1, 8))
    run(scheduler)
    scheduler.add(row(2, 22, max_tokens=1))
    run(scheduler)
    assert list(scheduler.running) == [1]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (row(0, 64), ["64 tokens", "max_model_len is 64", "shorten"]),
        (row(0, 60, output_token_ids=[1] * 4), ["64 tokens", "shorten"]),
        (row(0, 20, max_tokens=22), ["20 tokens", "grow to 41,", "more memory"]),
    ],
)
def test_what_can_never_fit_is_refused(request_, words):
    scheduler = make(num_blocks=11)
    with pytest.raises(RowFailure) as info:
        scheduler.add(request_)
    assert info.value.error.error_class is ErrorClass.CONTEXT_LENGTH
    for word in words:
        assert word in info.value.error.message
    assert not scheduler.has_unfinished


def test_what_just_fits_is_taken():
    scheduler = make(num_blocks=11)
    scheduler.add(row(0, 20, max_tokens=21))
    for _ in range(22):
        run(scheduler)
    assert scheduler.manager.pool.num_free == 0


def test_ids_are_unique_among_the_unfinished():
    scheduler = make()
    scheduler.add(row(0))
    with pytest.raises(ValueError, match="request id 0 is in use"):
        scheduler.add(row(0))
    scheduler.finish(0)
    scheduler.add(row(0))


def test_no_progress_is_an_error_that_shows_the_state():
    scheduler = make(num_blocks=3, length=1000)
    scheduler.add(row(0, 7, max_tokens=2))
    run(scheduler)
    run(scheduler)
    with pytest.raises(EngineError) as info:
        scheduler.schedule()
    for word in (
        "no request can make progress",
        "0 of 2 blocks of 4 tokens used",
        "waiting 1: [0 (arrival 0,",
    ):
        assert word in str(info.value)


def test_a_request_that_should_have_ended_is_an_error():
    scheduler = make(length=5)
    scheduler.add(row(0, 4))
    run(scheduler)
    with pytest.raises(EngineError, match="max_model_len is 5; it should have been finished"):
        scheduler.schedule()


def test_a_request_without_its_token_is_an_error_unless_it_ends():
    scheduler = make()
    scheduler.add(row(0, 4))
    scheduler.add(row(1, 4))
    output = scheduler.schedule()
    scheduler.update(output, {1: 3})
    with pytest.raises(EngineError, match="request 0 has 4 tokens, 0 of them to compute"):
        scheduler.schedule()
    scheduler.poison(0)
    assert scheduler.running == {}
    assert run(scheduler) == [(1, 0, 5, True)]


def test_the_call_order_is_kept():
    scheduler = make()
    scheduler.add(row(0))
    output = scheduler.schedule()
    with pytest.raises(EngineError, match="before update"):
        scheduler.schedule()
    scheduler.update(output, {0: 1})
    with pytest.raises(EngineError, match="another step than the latest"):
        scheduler.update(output, {0: 1})


def test_a_failed_step_leaves_no_trace():
    scheduler = make(budget=64)
    scheduler.add(row(0, 8))
    run(scheduler)
    scheduler.add(row(1, [*range(8), 50, 51]))
    scheduler.add(row(2, [*range(8), 50, 51, 52]))
    free = scheduler.manager.pool.num_free
    stats = (scheduler.stats.prompt_tokens, scheduler.stats.cached_tokens, scheduler.stats.steps)
    output = scheduler.schedule()
    assert len(output.scheduled) == 3
    scheduler.rollback(output)
    assert scheduler.manager.pool.num_free == free
    assert (scheduler.stats.prompt_tokens, scheduler.stats.cached_tokens, scheduler.stats.steps) == stats
    assert scheduler.requests[0].num_computed_tokens == 8
    assert [r.request_id for r in scheduler.waiting] == [1, 2]
    assert {r.state for r in scheduler.waiting} == {RequestState.WAITING}
    assert {r.num_cached_tokens for r in scheduler.waiting} == {0}
    assert len(scheduler.manager.pool.index) == 2
    assert shape(scheduler.schedule(max_tokens=2)) == [(0, 8, 1, True), (1, 8, 1, False)]


def test_an_abort_in_flight_is_tolerated():
    scheduler = make()
    scheduler.add(row(0, 8))
    scheduler.add(row(1, 3))
    output = scheduler.schedule()
    scheduler.finish(0)
    scheduler.update(output, {0: 1, 1: 2})
    assert output.scheduled[0].request.output_token_ids == []
    assert output.scheduled[1].request.output_token_ids == [2]
    scheduler.finish(0)
    scheduler.finish(77)


def test_a_waiting_request_can_be_aborted():
    scheduler = make()
    scheduler.add(request := row(0))
    scheduler.finish(0)
    assert request.state is RequestState.FINISHED
    assert not scheduler.has_unfinished


def test_poison_takes_descendants_along_and_sends_sharers_back():
    scheduler = make(budget=64)
    scheduler.add(row(0, 9))
    scheduler.add(row(1, [*range(8), 50, 51, 52, 53, 54]))
    scheduler.add(other(2, 9))
    output = scheduler.schedule()
    assert scheduler.poison(0) == [1]
    scheduler.update(output, {0: 1, 1: 2, 2: 3})
    assert [r.request_id for r in scheduler.waiting] == [1]
    assert scheduler.requests[1].output_token_ids == []
    assert len(scheduler.manager.pool.index) == 2
    assert run(scheduler) == [(2, 9, 1, True), (1, 0, 13, True)]
    assert scheduler.poison(99) == []


def test_sharers_of_a_poisoned_row_wait_in_their_old_order():
    scheduler = make(budget=64)
    for i in range(4):
        scheduler.add(row(i, 9 + i))
    run(scheduler)
    assert scheduler.poison(0) == [1, 2, 3]
    assert [r.request_id for r in scheduler.waiting] == [1, 2, 3]
    assert [r.sequence_number for r in scheduler.waiting] == [1, 2, 3]


def test_poison_reaches_what_a_preempted_row_left_in_the_cache():
    scheduler = make(budget=64)
    scheduler.add(row(0, 9))
    scheduler.add(row(1, [*range(8), 50, 51, 52, 53, 54]))
    run(scheduler)
    scheduler._preempt(scheduler.requests[1])
    assert len(scheduler.manager.pool.index) == 3
    assert scheduler.poison(1) == [0]
    assert len(scheduler.manager.pool.index) == 0


def test_poison_from_a_position_spares_what_is_before_it():
    scheduler = make(budget=64)
    scheduler.add(row(0, 9))
    scheduler.add(row(1, [*range(8), 50]))
    run(scheduler)
    assert scheduler.poison(0, first_position=8) == []
    assert len(scheduler.manager.pool.index) == 2
    assert scheduler.num_running == 1


def forked(**config):
    scheduler = make(**config)
    scheduler.add(row(0, 6, max_tokens=3))
    run(scheduler)
    child = row(1, 6, max_tokens=3, output_token_ids=[5])
    scheduler.fork(0, [child])
    return scheduler, child


def test_a_fork_shares_everything_and_copies_its_partial_block_before_writing():
    scheduler, child = forked()
    assert child.num_cached_tokens == 6
    assert scheduler.manager.num_reserved == 1
    output = scheduler.schedule()
    assert shape(output) == [(0, 6, 1, True), (1, 6, 1, True)]
    assert [list(s.block_ids[0]) for s in output.scheduled] == [[1, 3], [1, 2]]
    assert output.copies == [(2, 3)]
    assert scheduler.manager.num_reserved == 0


def test_the_last_holder_writes_in_place():
    scheduler, _ = forked()
    scheduler.finish(0)
    assert scheduler.manager.num_reserved == 0
    output = scheduler.schedule()
    assert (shape(output), output.copies) == ([(1, 6, 1, True)], [])


def test_the_block_for_a_copy_is_not_given_to_others():
    scheduler, _ = forked(num_blocks=4)
    scheduler.add(other(2, 4))
    assert run(scheduler) == [(0, 6, 1, True), (1, 6, 1, True)]
    assert scheduler.stats.preemptions == 0


def test_a_fork_without_room_waits_in_front():
    scheduler, _ = forked(num_blocks=4)
    scheduler.add(other(2, 4))
    scheduler.fork(0, [row(3, 6, max_tokens=3, output_token_ids=[6])])
    assert [r.request_id for r in scheduler.waiting] == [3, 2]
    assert run(scheduler) == [(0, 6, 1, True), (1, 6, 1, True)]


def test_places_and_blocks_are_kept_for_forks_to_come():
    scheduler = make(num_blocks=12, seqs=4)
    scheduler.add(row(0, 6, max_tokens=3, num_forks=2))
    scheduler.add(other(1, 4, num_forks=1))
    scheduler.add(other(2, 4))
    assert run(scheduler) == [(0, 0, 6, True)]
    children = [row(i, 6, max_tokens=3, output_token_ids=[i]) for i in (3, 4)]
    scheduler.fork(0, children)
    assert scheduler.num_running == 3
    # The next in line would need two places.
    assert [entry[0] for entry in run(scheduler)] == [0, 3, 4]
    scheduler.finish(0)
    assert [entry[0] for entry in run(scheduler)] == [3, 4, 1]


def test_blocks_for_forks_to_come_are_not_given_to_others():
    scheduler = make(num_blocks=5, seqs=8)
    scheduler.add(row(0, 6, max_tokens=3, num_forks=2))
    scheduler.add(other(1, 4))
    assert [entry[0] for entry in run(scheduler)] == [0]


def test_a_row_with_more_samples_than_places_runs_alone():
    scheduler = make(num_blocks=20, seqs=2)
    scheduler.add(other(1, 4))
    scheduler.add(row(0, 6, max_tokens=3, num_forks=3))
    assert [entry[0] for entry in run(scheduler)] == [1]
    assert [entry[0] for entry in run(scheduler)] == [1]
    scheduler.finish(1)
    assert [entry[0] for entry in run(scheduler)] == [0]
    children = [row(i, 6, max_tokens=3, output_token_ids=[i]) for i in (2, 3, 4)]
    scheduler.fork(0, children)
    assert list(scheduler.running) == [0, 2]
    assert [request.request_id for request in scheduler.waiting] == [3, 4]
    assert scheduler.stats.prompt_tokens == 4 + 6


def test_a_victim_of_the_same_step_takes_its_copy_back():
    """The fork copies its partial block, and then goes for the row of high priority after it."""
    scheduler = make(num_blocks=6)
    scheduler.add(row(0, 6, max_tokens=3, priority=1))
    run(scheduler)
    scheduler.add(other(1, 8, priority=1, max_tokens=4))
    run(scheduler)
    scheduler.fork(0, [row(2, [*range(6), 9], max_tokens=3, output_token_ids=[5])])
    for i in (0, 1):
        scheduler.running[i] = scheduler.running.pop(i)
    output = scheduler.schedule()
    assert shape(output) == [(0, 7, 1, True), (1, 8, 1, True)]
    assert (output.preempted, output.copies) == ([2], [])


def test_a_failed_copy_is_computed_anew():
    scheduler, child = forked()
    scheduler.rollback(scheduler.schedule())
    assert [r.request_id for r in scheduler.waiting] == [0]
    assert child.num_computed_tokens == 6
    assert run(scheduler) == [(1, 6, 1, True), (0, 4, 3, True)]


@pytest.mark.parametrize(
    ("parent", "child"),
    [
        (7, row(1, 6, output_token_ids=[5])),
        (0, row(1, 5, output_token_ids=[9])),
        (0, row(1, 6)),
        (0, row(0, 6, output_token_ids=[5])),
        (0, row(1, 6, output_token_ids=[5], cache_keys=((0, ("salt", "x")),))),
    ],
)
def test_a_fork_must_continue_its_parent(parent, child):
    scheduler = make()
    scheduler.add(row(0, 6))
    run(scheduler)
    with pytest.raises(ValueError, match="request"):
        scheduler.fork(parent, [child])
    scheduler.check()


def test_waste_is_slack_and_idle_blocks_while_rows_wait():
    scheduler = make(num_blocks=11, seqs=1)
    scheduler.add(row(0, 5))
    scheduler.add(row(1, 5))
    run(scheduler)
    stats = scheduler.stats
    assert (stats.pool_used, stats.pool_total, stats.pool_peak) == (2, 10, 2)
    assert (stats.slack_tokens, stats.idle_blocks) == (3, 8)
    assert stats.waste == pytest.approx((3 / 4 + 8) / 10)
    scheduler.finish(1)
    run(scheduler)
    assert stats.idle_blocks == 0
    assert stats.waste < 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_batched_tokens", 0), ("max_num_seqs", 0), ("max_model_len", 1), ("watermark", 1.0)],
)
def test_impossible_limits_are_refused(field, value):
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 2, "max_model_len": 8, field: value}
    with pytest.raises(ValueError, match=f"{field}: {value} is not allowed; use"):
        SchedulerConfig(**limits)


def test_no_step_walks_the_queue(monkeypatch):
    scheduler = make(num_blocks=40)
    for i in range(50):
        scheduler.add(row(i, 5, max_tokens=3, priority=i % 3))

    def walk(self):
        raise AssertionError("the waiting queue was walked")

    monkeypatch.setattr(WaitingQueue, "__iter__", walk)
    monkeypatch.setattr(scheduler, "check", lambda: None)
    for _ in range(20):
        run(scheduler)
        for request in list(scheduler.running.values()):
            if len(request.output_token_ids) == 3:
                scheduler.finish(request.request_id)
    assert 0 < scheduler.num_waiting < 40


def test_the_brain_imports_nothing_but_the_standard_library_and_the_nouns():
    code = (
        "import sys; before = set(sys.modules); import batchgen.core.scheduler; "
        "names = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(n for n in names if n not in sys.stdlib_module_names))"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.stdout.strip() == "['batchgen']"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("spare", [0, 1, 9])
def test_any_pool_that_holds_one_longest_request_is_enough(caching, budget, spare):
    longest = -(-(16 + 20 - 1) // 4)
    sim = Sim(SimConfig(num_blocks=1 + longest + spare, max_tokens=budget, max_seqs=6, caching=caching))
    for i in range(8):
        assert sim.add([i % 3] * 16, max_tokens=20, length=20, priority=i % 2)
    sim.drain()
    assert sim.finished == 8
