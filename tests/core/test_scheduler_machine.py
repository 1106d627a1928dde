"""State machine of the scheduler. How long it runs: see `machine_steps`."""

from __future__ import annotations

from core_sim import Sim, SimConfig, executed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machine_steps import machine_settings

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)
small = st.integers(0, 7)


class SchedulerMachine(RuleBasedStateMachine):
    """Anything a caller may do, in any order; every stream is what the model alone would give."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 30),
        max_tokens=st.integers(1, 24),
        max_seqs=st.integers(1, 6),
        max_model_len=st.sampled_from([12, 24, 64]),
        caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        windows=st.sampled_from([(None,), (None,), (None, 5), (3,), (None, 1, 6), (None, 4, 4), (2, 9, 5)]),
    )
    def start(self, **kwargs):
        self.sim = Sim(SimConfig(**kwargs))

    @rule(
        tail=tokens,
        source=small,
        shared=st.integers(0, 16),
        max_tokens=st.integers(1, 24),
        length=st.integers(1, 24),
        resumed=st.sampled_from([0, 0, 0, 2, 5]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([0, 0, 0, 1]),
        needed=st.sampled_from([None, None, None, 0, 3, 9]),
        forks=st.sampled_from([0, 0, 0, 1, 4]),
        count=st.integers(1, 3),
    )
    def add(self, count, **kwargs):
        for _ in range(count):
            self.sim.add(**kwargs)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.sim.step()

    @rule(count=st.integers(1, 12), smaller=st.sampled_from([None, None, None, 1, 5]))
    def launch(self, count, smaller):
        """Steps each of which is decided before the one before it is confirmed; two stay under way."""
        for _ in range(count):
            self.sim.launch(smaller)

    @rule()
    def confirm_the_earliest(self):
        self.sim.confirm()

    @rule(count=st.integers(1, 2))
    def take_back_the_latest(self, count):
        for _ in range(count):
            self.sim.take_back()

    @rule(victim=small, early=st.booleans(), exact=st.booleans())
    def poison_the_earliest(self, victim, early, exact):
        self.sim.poison_earliest(victim, early=early, exact=exact)

    @rule(written=st.integers(0, 40), copied=st.booleans(), smaller=st.integers(1, 24))
    def fail_and_retry_smaller(self, written, copied, smaller):
        output = self.sim.schedule()
        if output.scheduled:
            self.sim.fail(output, written, copied)
            self.sim.step(smaller)

    @rule(victim=small, early=st.booleans(), exact=st.booleans())
    def poison(self, victim, early, exact):
        output = self.sim.schedule()
        if output.scheduled:
            self.sim.poison(output, victim, early=early, exact=exact)

    @rule(index=small)
    def abort(self, index):
        self.sim.abort(index)

    @rule(index=small, fails=st.booleans())
    def abort_in_flight(self, index, fails):
        output = self.sim.schedule()
        self.sim.abort_in_flight(output, index, fails)

    @rule(index=small)
    def preempt(self, index):
        self.sim.preempt(index)

    @rule(kept=small, steps=st.integers(1, 4))
    def run_apart(self, kept, steps):
        """Only one request runs, with what is forked off it; then all do again."""
        self.sim.land()
        scheduler = self.sim.scheduler
        ids = list(scheduler.requests)
        for request_id in ids[:kept] + ids[kept + 1 :]:
            scheduler.hold(request_id)
        for _ in range(steps):
            ran = {s.request.request_id for s in self.sim.step().scheduled}
            assert not ran & scheduler.held.keys()
        for request_id in list(scheduler.held):
            scheduler.release(request_id)

    @rule(index=small, token=st.integers(0, 2), extra=st.integers(1, 8))
    def fork(self, index, token, extra):
        self.sim.fork(index, token, extra)

    @invariant()
    def holds(self):
        executed["rules"] += 1
        if hasattr(self, "sim"):
            self.sim.scheduler.check()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = machine_settings(0.6)
