"""Decides, step by step, which tokens of which requests are computed. Driven by `EngineCore.step()`.

There is no prefill and no decode: a request has computed tokens and known tokens, and every step lets the
first catch up with the second. `schedule()` assumes success: computed counts advance and full blocks get
their names at once, so that equal prefixes admitted in one step are computed once. `update()` confirms a
step, `rollback()` takes it back.

A step may be decided early, before the one before it is confirmed: a token that is still being sampled counts
as pending. It has a position, so that it can be computed, but no name: blocks that hold it get theirs when it
is known. What is pending may be a request's last, so an early step takes nobody's blocks for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from batchgen.core.block import KVCacheBlock
from batchgen.core.kv_cache_manager import Copies, KVCacheManager
from batchgen.core.kv_spec import KVCacheConfig
from batchgen.core.state_dump import describe
from batchgen.core.stats import SchedulerStats
from batchgen.core.waiting_queue import WaitingQueue
from batchgen.grammar import counted
from batchgen.types import EngineError, ErrorClass, Request, RequestState, RowFailure


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    Args:
        max_num_batched_tokens: tokens computed in one step.
        max_num_seqs: requests that hold blocks at one time; forks to come count from the admission on.
        max_model_len: longest prompt plus output, in tokens.
        prefix_caching: reuse keys and values of equal prefixes.
        watermark: share of the pool that an admission leaves free while others run, in [0, 1).
        debug_checks: assert all invariants after every call.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    prefix_caching: bool = True
    watermark: float = 0.01
    debug_checks: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}: {value} is not allowed; use {least} or more")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: {self.watermark} is not allowed; use a number from 0 to below 1")


@dataclass(slots=True)
class ScheduledRequest:
    """Positions `start` to `start + num_tokens` of a request, computed in this step.

    Args:
        samples: the last known token of a request that generates is among them, so a token is sampled
            after it.
        block_ids: per group, the blocks of positions 0 to `start + num_tokens`; live arrays, valid until
            the scheduler is called again, not to be changed.
        pending: the last token was still being sampled, by the step before, when this one was decided.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    block_ids: Sequence[Sequence[int]]
    pending: bool = False

    def token_ids(self) -> list[int]:
        """Ids of its positions; 0 stands for the one that is pending."""
        stop = self.start + self.num_tokens
        if self.pending:
            return [*self.request.tokens(self.start, stop - 1), 0]
        return self.request.tokens(self.start, stop)


@dataclass(slots=True)
class SchedulerOutput:
    """One step.

    Args:
        scheduled: running requests first, in order of admission.
        total_tokens: sum of their `num_tokens`.
        copies: (source, destination) block ids, copied in all layers in this order (or all sources read
            first) before anything is written.
        preempted: ids of requests that lost their blocks and wait again.
        short: a request is left out, and nobody admitted, as blocks were lacking and the step is early; the
            next one should not be.
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    total_tokens: int = 0
    copies: Copies = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    short: bool = False


@dataclass(slots=True)
class _Step:
    """A step while it is decided and until it is confirmed or taken back.

    `unnamed` are blocks' worth of tokens, by request, that are to have their names once they are known;
    `followed` says that another step was decided early after this one.
    """

    budget: int
    early: bool = False
    followed: bool = False
    output: SchedulerOutput = field(default_factory=SchedulerOutput)
    scheduled: dict[int, ScheduledRequest] = field(default_factory=dict)
    copies: dict[int, Copies] = field(default_factory=dict)
    admitted_from: dict[int, RequestState] = field(default_factory=dict)
    named: list[KVCacheBlock] = field(default_factory=list)
    unnamed: dict[int, int] = field(default_factory=dict)


class Scheduler:
    """Owns all unfinished requests and, through the manager, all blocks.

    Call order: `schedule`, then `update` or `rollback`, then `finish` of what has ended, and again. Or, with
    two steps under way, `schedule(early=True)` before `update` of the step before it; then the earlier is the
    first to be confirmed, and the later the first to be taken back. `add` and `finish` may be called at any
    time.
    """

    def __init__(self, config: SchedulerConfig, kv_config: KVCacheConfig) -> None:
        self.config = config
        self.manager = KVCacheManager(
            kv_config, prefix_caching=config.prefix_caching, max_chunk=config.max_num_batched_tokens
        )
        self.running: dict[int, Request] = {}
        self.waiting = WaitingQueue()
        self.held: dict[int, Request] = {}
        self.requests: dict[int, Request] = {}
        self.stats = SchedulerStats(self.manager.pool.num_usable, kv_config.block_size)
        self._watermark_blocks = int(config.watermark * self.manager.pool.num_usable)
        self._arrivals = 0
        self._steps: list[_Step] = []
        # Requests that end with a token that is pending: another may have their place.
        self._ending: set[int] = set()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks, preempted and held ones included."""
        return len(self.waiting) + len(self.held)

    def add(self, request: Request, *, ahead: bool = False) -> None:
        """Take a request; it waits behind those of its priority.

        Args:
            ahead: it waits before them instead, as a row does that has begun.

        Raises:
            RowFailure: it can never fit the model or the cache.
            ValueError: its id is in use.
        """
        self._accept(request)
        push = self.waiting.push_front if ahead else self.waiting.push_back
        push(request)
        self._check_if_debug()

    def schedule(self, max_tokens: int | None = None, *, early: bool = False) -> SchedulerOutput:
        """Decide the next step; empty when nothing is unfinished.

        Args:
            max_tokens: a smaller budget for this step alone, to repeat a failed one in smaller pieces.
            early: one step is under way. No request of it may be about to fork, or to be read. The result
                may be empty, and then it counts as no step.

        Raises:
            EngineError: requests are unfinished and none can make progress, or the caller broke the call
                order; the message holds the scheduler's state.
        """
        if len(self._steps) != early:
            raise EngineError(
                "schedule() was called before update() or rollback() of the step before, or early without one"
            )
        limit = self.config.max_num_batched_tokens
        step = _Step(limit if max_tokens is None else max(1, min(max_tokens, limit)), early)
        if early:
            self._follow(self._steps[0])
        self._extend_running(step)
        # From here on nothing is unscheduled: a named block may be hit by whoever is admitted next.
        self._name_running(step)
        if not step.output.preempted and not step.output.short:
            self._admit_waiting(step)
        self._close(step)
        self._check_if_debug()
        return step.output

    def update(self, output: SchedulerOutput, sampled: Mapping[int, int]) -> None:
        """Confirm the earliest step and append its sampled tokens.

        Args:
            output: what `schedule` returned.
            sampled: request id to token, for requests with `samples`. Tokens of requests that were
                finished or poisoned since are dropped. A request left out must be finished or poisoned
                before the next `schedule`.
        """
        step = self._end_step(output, 0)
        if step is None:
            return
        self._count_step(step)
        self._name_late(step)
        for request_id, scheduled in step.scheduled.items():
            if scheduled.samples and request_id in sampled:
                scheduled.request.output_token_ids.append(sampled[request_id])
        self._expect(step, 0)
        self._check_if_debug()

    def rollback(self, output: SchedulerOutput) -> None:
        """Take back the latest step, which failed: nothing that it wrote is used by anyone.

        Requests that ran before are where they were, and those admitted in it wait again, as do those it
        preempted. One whose shared partial block was to be copied is preempted now, as nobody knows whether
        the copy was made; and one whose window has slid on for an early step that came after.
        """
        step = self._end_step(output, -1)
        if step is None:
            return
        slid = step.followed and self.manager.coordinator.slides
        self._expect(step, 0)
        self.manager.unregister(step.named)
        for request_id, scheduled in reversed(step.scheduled.items()):
            request = scheduled.request
            self._ending.discard(request_id)
            if request_id in step.admitted_from:
                self._withdraw(scheduled, step.admitted_from[request_id])
            elif request_id in step.copies or slid:
                self._preempt(request)
            else:
                request.num_computed_tokens = scheduled.start
                self.manager.truncate(request, scheduled.start)
        self._check_if_debug()

    def hold(self, request_id: int) -> None:
        """Keep a request out of every step until it is released; it loses its blocks. Not during a step."""
        request = self.requests[request_id]
        if request_id in self.held:
            return
        if request.state is RequestState.RUNNING:
            self._preempt(request)
        self.waiting.remove(request)
        self.held[request_id] = request
        self._check_if_debug()

    def release(self, request_id: int) -> None:
        """Let a held request wait again, before those that never ran; no effect on others."""
        request = self.held.pop(request_id, None)
        if request is not None:
            self.waiting.push_front(request)
            self._check_if_debug()

    def finish(self, request_id: int) -> None:
        """Drop a request, finished or aborted, and free its blocks; no effect on an unknown id."""
        request = self.requests.get(request_id)
        if request is not None:
            self._drop(request)
            self._check_if_debug()

    def poison(self, request_id: int, first_position: int = 0) -> list[int]:
        """Drop a request whose keys, values or logits are not finite, and everything built on them.

        Its blocks from `first_position` on and all that descend from them leave the prefix cache. Running
        requests that hold such a block are preempted, to be computed anew; called before `update`, it also
        voids what they sampled in this step. An early step after it must have been taken back.

        Args:
            first_position: the first that may be bad; all before it are known to be good.

        Returns:
            Ids of the preempted requests.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        sharers = self.manager.evict_from(request, first_position)
        self._drop(request)
        for sharer in reversed(sharers):
            self._void(sharer)
            self._preempt(sharer)
        self._check_if_debug()
        return [sharer.request_id for sharer in sharers]

    def fork(self, parent_id: int, children: Iterable[Request]) -> None:
        """Start `children` from everything computed for a running request, sharing its blocks.

        Called between `update` and `schedule`. `num_forks` of the parent is 0 afterwards. If no place or
        block is free, which the admission of the parent made unlikely, a child waits in front and starts
        from the prefix cache instead.

        Raises:
            RowFailure: a child can never fit.
            ValueError: its id is in use, the parent does not run, or their tokens differ.
        """
        parent = self.running.get(parent_id)
        if parent is None or self._steps:
            raise ValueError(f"request {parent_id} cannot be forked: it does not run, or a step is under way")
        parent.num_forks = 0
        places = self.config.max_num_seqs - self._num_places()
        squeezed = []
        for child in children:
            self._refuse_stranger(parent, child)
            self._accept(child)
            if places > 0 and self.manager.fork(parent, child):
                self._run(child, parent.num_computed_tokens)
                child.num_cached_tokens = parent.num_computed_tokens
                places -= 1
            else:
                squeezed.append(child)
        for child in reversed(squeezed):
            self._wait_again(child)
        self._check_if_debug()

    def check(self) -> None:
        """Assert every invariant of pool, tables and queues."""
        self.manager.check()
        assert len(self.running) - len(self._ending) <= self.config.max_num_seqs, "too many requests run"
        assert self._ending <= self.running.keys(), "a request that does not run is to end"
        alone = len(self.running) == 1
        assert alone or self._num_places() <= self.config.max_num_seqs, "no places are left for forks"
        waiting = {request.request_id: request for request in self.waiting}
        assert len(waiting) == len(self.waiting), "the waiting queue miscounts"
        assert not waiting.keys() & self.running.keys(), "a request waits and runs"
        assert not self.held.keys() & (waiting.keys() | self.running.keys()), "a held request waits or runs"
        assert waiting | self.running | self.held == self.requests, "a request is in no place"
        assert self.manager.requests == self.running, "blocks are held by requests that do not run"
        for request in (*waiting.values(), *self.held.values()):
            assert request.state in (RequestState.WAITING, RequestState.PREEMPTED)
            assert request.num_computed_tokens == 0, f"request {request.request_id} waits, not at 0"
            assert request.num_pending == 0, f"request {request.request_id} waits, and for a token"
        for request in self.running.values():
            assert request.state is RequestState.RUNNING
            assert 0 < request.num_computed_tokens <= request.num_expected
            expected = -(-request.num_computed_tokens // self.manager.block_size)
            for ids in self.manager.block_ids(request):
                assert len(ids) == expected, (
                    f"request {request.request_id}: {counted(len(ids), 'block')} for {expected}"
                )

    def _accept(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is in use by an unfinished one")
        self._refuse_unfit(request)
        request.state = RequestState.WAITING
        request.num_computed_tokens = request.num_cached_tokens = request.num_preemptions = 0
        request.block_hashes = []
        request.sequence_number = self._arrivals
        self._arrivals += 1
        self.requests[request.request_id] = request

    def _refuse_unfit(self, request: Request) -> None:
        limit = self.config.max_model_len
        if request.num_tokens > self._most_tokens(request):
            room = ", which leaves no room for an answer" if request.generates else ""
            raise RowFailure(
                ErrorClass.CONTEXT_LENGTH,
                f"the row has {counted(request.num_tokens, 'token')} and max_model_len is {limit}{room}; "
                "shorten the prompt or raise max_model_len",
            )
        longest = min(request.max_total_tokens, self._most_tokens(request))
        # The size of the cache differs between machines, and a row's error must not.
        if self.manager.peak_blocks(longest) > self.manager.pool.num_usable:
            raise RowFailure(
                ErrorClass.CONTEXT_LENGTH,
                f"the row has {counted(request.num_tokens, 'token')} and may grow to {longest:,}, more than "
                "the whole cache holds; shorten the prompt, lower max_tokens, or give the cache more memory",
            )

    def _most_tokens(self, request: Request) -> int:
        """Most tokens that are computed for a request: an answer's last token is not."""
        return self.config.max_model_len - request.generates

    def _refuse_stranger(self, parent: Request, child: Request) -> None:
        """Raise ValueError where `child` does not continue `parent`."""
        shared = parent.num_computed_tokens
        if child.num_tokens <= shared or child.tokens(0, shared) != parent.tokens(0, shared):
            raise ValueError(
                f"request {child.request_id} does not begin with the tokens of {parent.request_id}"
            )
        if child.cache_keys != parent.cache_keys:
            raise ValueError(f"request {child.request_id} and {parent.request_id} differ in their cache_keys")

    def _num_places(self) -> int:
        """Requests that run and go on, with the forks that they will become."""
        forks = sum(request.num_forks for request in self.running.values())
        return len(self.running) - len(self._ending) + forks

    def _extend_running(self, step: _Step) -> None:
        for request in list(self.running.values()):
            if step.budget == 0:
                break
            if step.early and self._ends(request):
                self._ending.add(request.request_id)
            # Gone since the list was made, to make room for an earlier request.
            elif request.state is RequestState.RUNNING:
                self._extend(step, request)

    def _ends(self, request: Request) -> bool:
        """Whether a request has all its tokens once the step under way is done."""
        expected = request.num_expected
        if not request.num_pending:
            return request.num_computed_tokens == expected
        last = len(request.output_token_ids) + 1 >= request.sampling.max_tokens
        return last or expected >= self.config.max_model_len

    def _extend(self, step: _Step, request: Request) -> None:
        num_tokens = min(self._num_to_compute(request), step.budget)
        copies = self.manager.allocate_slots(request, num_tokens)
        while copies is None:
            if step.early:
                step.output.short = True
                return
            victim = self._choose_victim()
            self._give_back(step, victim)
            self._preempt(victim)
            step.output.preempted.append(victim.request_id)
            if victim is request:
                return
            num_tokens = min(self._num_to_compute(request), step.budget)
            copies = self.manager.allocate_slots(request, num_tokens)
        if copies:
            step.copies[request.request_id] = copies
        self._schedule_tokens(step, request, num_tokens)

    def _num_to_compute(self, request: Request) -> int:
        known = request.num_tokens
        missing = known + request.num_pending - request.num_computed_tokens
        if missing < 1 or known > self._most_tokens(request):
            raise EngineError(
                f"request {request.request_id} has {counted(known, 'token')}, {missing:,} of "
                f"them to compute, and max_model_len is {self.config.max_model_len}; it should have been "
                "finished"
            )
        return missing

    def _choose_victim(self) -> Request:
        """Lowest priority; of those the last to be admitted, which has least to lose."""
        return min(reversed(self.running.values()), key=lambda request: request.priority)

    def _give_back(self, step: _Step, victim: Request) -> None:
        step.copies.pop(victim.request_id, None)
        scheduled = step.scheduled.pop(victim.request_id, None)
        if scheduled is not None:
            step.budget += scheduled.num_tokens

    def _preempt(self, request: Request) -> None:
        self._leave_running(request)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        request.state = RequestState.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self.waiting.push_front(request)

    def _leave_running(self, request: Request) -> None:
        del self.running[request.request_id]
        self._ending.discard(request.request_id)
        self.manager.free(request)

    def _void(self, request: Request) -> None:
        """Forget what the steps under way do for a request."""
        request.num_pending = 0
        for step in self._steps:
            step.scheduled.pop(request.request_id, None)

    def _name_running(self, step: _Step) -> None:
        for scheduled in step.scheduled.values():
            step.named += self.manager.register(scheduled.request, scheduled.request.num_computed_tokens)
        if step.early:
            stops = {i: s.start + s.num_tokens for i, s in step.scheduled.items() if s.pending}
            step.unnamed = {i: stop for i, stop in stops.items() if stop % self.manager.block_size == 0}

    def _name_late(self, step: _Step) -> None:
        """Name blocks that ended in a token that was pending, and is known now."""
        for request_id, computed in step.unnamed.items():
            if (scheduled := step.scheduled.get(request_id)) is not None:
                step.named += self.manager.register(scheduled.request, computed)
        step.unnamed.clear()

    def _follow(self, step: _Step) -> None:
        """Expect the tokens of a step that is under way."""
        step.followed = True
        self._name_late(step)
        self._expect(step, 1)

    def _expect(self, step: _Step, count: int) -> None:
        """Set how many tokens are pending of each request that samples, where the step is followed."""
        if step.followed:
            for scheduled in step.scheduled.values():
                if scheduled.samples:
                    scheduled.request.num_pending = count

    def _admit_waiting(self, step: _Step) -> None:
        request = self.waiting.peek()
        places = self.config.max_num_seqs - self._num_places()
        if request is None or step.budget == 0 or places <= 0:
            return
        # Blocks that running requests will still take for tokens known today: not there for others.
        promised = sum(map(self.manager.num_missing_blocks, self.running.values()))
        while request is not None and step.budget:
            # More samples than places is no reason to wait for ever: such a row runs alone.
            fits = places > request.num_forks or not self.running
            if not fits or not self._admit(step, request, promised):
                return
            places -= 1 + request.num_forks
            promised += self.manager.num_missing_blocks(request)
            request = self.waiting.peek()

    def _admit(self, step: _Step, request: Request, promised: int) -> bool:
        headroom = 0
        if self.running:
            headroom = promised + self._watermark_blocks + self.manager.num_fork_blocks(request)
        hit = self.manager.get_computed_blocks(request)
        num_tokens = min(request.num_tokens - hit.num_tokens, step.budget)
        if self.manager.allocate_slots(request, num_tokens, hit, headroom=headroom) is None:
            return False
        self.waiting.remove(request)
        step.admitted_from[request.request_id] = request.state
        self._start(request, hit.num_tokens)
        self._schedule_tokens(step, request, num_tokens)
        step.named += self.manager.register(request, request.num_computed_tokens)
        return True

    def _start(self, request: Request, num_cached: int) -> None:
        resumed = request.state is RequestState.PREEMPTED
        self.stats.count_admission(request.num_tokens, num_cached, resumed=resumed)
        if not resumed:
            request.num_cached_tokens = num_cached
        self._run(request, num_cached)

    def _run(self, request: Request, num_computed: int) -> None:
        request.num_computed_tokens = num_computed
        request.state = RequestState.RUNNING
        self.running[request.request_id] = request

    def _withdraw(self, scheduled: ScheduledRequest, state: RequestState) -> None:
        """Undo `_start`, for a request of a failed step."""
        request = scheduled.request
        self._leave_running(request)
        resumed = state is RequestState.PREEMPTED
        self.stats.count_admission(request.num_tokens, scheduled.start, resumed=resumed, sign=-1)
        if not resumed:
            request.num_cached_tokens = 0
        request.num_computed_tokens = 0
        request.state = state
        self.waiting.push_front(request)

    def _schedule_tokens(self, step: _Step, request: Request, num_tokens: int) -> None:
        start, known = request.num_computed_tokens, request.num_tokens
        request.num_computed_tokens = stop = start + num_tokens
        samples = request.generates and stop == known + request.num_pending
        block_ids = self.manager.block_ids(request)
        scheduled = ScheduledRequest(request, start, num_tokens, samples, block_ids)
        step.scheduled[request.request_id] = scheduled
        if stop > known:
            scheduled.pending = True
        step.budget -= num_tokens

    def _close(self, step: _Step) -> None:
        output = step.output
        output.scheduled = list(step.scheduled.values())
        output.total_tokens = sum(scheduled.num_tokens for scheduled in output.scheduled)
        output.copies = [copy for copies in step.copies.values() for copy in copies]
        if output.scheduled:
            self._steps.append(step)
        elif len(self.requests) > len(self.held) and not step.early:
            raise EngineError(f"no request can make progress; the scheduler's state: {describe(self)}")

    def _end_step(self, output: SchedulerOutput, which: int) -> _Step | None:
        if not output.scheduled:
            return None
        if self._steps and self._steps[which].output is output:
            return self._steps.pop(which)
        raise EngineError(
            "update() or rollback() was called with another step than the latest, or out of their order"
        )

    def _count_step(self, step: _Step) -> None:
        self.stats.count_step(
            step.output.total_tokens,
            pool_used=self.manager.pool.num_used,
            slack_tokens=sum(map(self.manager.num_slack_tokens, self.running.values())),
            waiting=len(self.waiting) > 0,
        )

    def _drop(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._void(request)
        if request.state is RequestState.RUNNING:
            self._leave_running(request)
        elif self.held.pop(request.request_id, None) is None:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED

    def _check_if_debug(self) -> None:
        if self.config.debug_checks:
            self.check()
