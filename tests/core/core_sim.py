"""A whole engine around the scheduler, with a model and a cache that can tell when anything is wrong.

The cache holds, per slot, ((group, token), position, digest of the whole prefix): all groups share its
memory, as blocks of different groups do in the engine. A step writes its own positions and then reads back
every position that its queries attend to, through the block tables: a stale, overwritten, mis-shared or
missing block does not compare equal. The next token is a function of the digest, so one wrong token shows in
everything after it. Used by the state machines and the fault tests.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from batchgen.core.block import KVCacheBlock
from batchgen.core.kv_spec import KVCacheConfig, KVCacheGroup
from batchgen.core.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerOutput
from batchgen.scores import Scoring
from batchgen.types import Request, RequestState, RowFailure, SamplingParams

BAD = ("not finite", -1, -1)
VOCABULARY = 3
KINDS = ["add"] * 6 + ["step"] * 8 + ["fork", "fail", "poison", "abort", "in flight", "preempt"]
EARLY = [
    *KINDS,
    *["launch"] * 12,
    *["confirm"] * 8,
    *["take back"] * 3,
    *["take all back"] * 4,
    "poison earliest",
]
"""Of random actions, each as often as it is listed."""

executed = Counter[str]()
"""What ran in this process: "rules" of state machines, "steps" of schedulers, and notable events."""


def digest(previous: int, token: int) -> int:
    """Of a prefix, from that of the prefix before it. Python's hash of ints is the same in every process."""
    return hash((previous, token))


def next_token(prefix_digest: int) -> int:
    """The fake model."""
    return (prefix_digest >> 7) % VOCABULARY


@dataclass
class Expected:
    """What must come of a request: `digests[i]` is that of its first i tokens."""

    request: Request
    target: int
    stream: list[int]
    digests: list[int]


@dataclass(frozen=True)
class SimConfig:
    block_size: int = 4
    num_blocks: int = 12
    max_tokens: int = 8
    max_seqs: int = 3
    max_model_len: int = 64
    caching: bool = True
    watermark: float = 0.01
    windows: tuple[int | None, ...] = (None,)


@dataclass(eq=False)
class Launched:
    """A step that is computed, and not confirmed: its tokens, and what it adds to what was ever computed.

    `unnamed` are prefixes that end in a token which was pending, with whose they are.
    """

    output: SchedulerOutput
    sampled: dict[int, int]
    slots: list[int]
    added: list[int]
    unnamed: list[tuple[int, Request]]


@dataclass
class Sim:
    """Feeds a scheduler, runs its steps on the fake model and compares with what must come out."""

    config: SimConfig
    scheduler: Scheduler = field(init=False)
    memory: dict[int, tuple[object, int, int]] = field(default_factory=dict)
    expected: dict[int, Expected] = field(default_factory=dict)
    history: list[list[int]] = field(default_factory=lambda: [[]])
    known: dict[int, tuple[int, ...]] = field(default_factory=dict)
    flying: list[Launched] = field(default_factory=list)
    evicted: bool = False
    next_id: int = 0
    finished: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        c = self.config
        groups = tuple(KVCacheGroup(window, (i,)) for i, window in enumerate(c.windows))
        self.scheduler = Scheduler(
            SchedulerConfig(c.max_tokens, c.max_seqs, c.max_model_len, c.caching, c.watermark),
            KVCacheConfig(c.num_blocks, c.block_size, groups),
        )
        self._watch_evictions()

    def add(
        self,
        tail: list[int],
        *,
        source: int = 0,
        shared: int = 0,
        max_tokens: int = 4,
        length: int = 4,
        resumed: int = 0,
        priority: int = 0,
        salt: int = 0,
        needed: int | None = None,
        forks: int = 0,
    ) -> Request | None:
        """A prompt that shares its first `shared` tokens with an earlier one; `None` if it was refused.

        The logits after all its positions from `needed` on are read, as those of a task are. When its known
        tokens are computed, `forks` others go on from there, each with another token.
        """
        prompt = self.history[source % len(self.history)][:shared] + tail
        max_tokens = self._clip(max_tokens, prompt)
        request = Request(self._new_id(), prompt, SamplingParams(max_tokens=max_tokens), priority=priority)
        request.num_forks = forks
        if needed is not None and needed < len(prompt):
            request.scoring = Scoring(needed, tuple(prompt[needed + 1 :]) or (0,))
        if salt:
            request.cache_keys = ((0, ("salt", salt)),)
        self._expect(request, min(length, max_tokens), salt)
        stream = self.expected[request.request_id].stream
        request.output_token_ids = stream[: min(resumed, len(stream) - 1)]
        fits = self._fits(request)
        try:
            self.scheduler.add(request)
        except RowFailure:
            assert not fits, "refused although it fits"
            del self.expected[request.request_id]
            return None
        assert fits, "taken although it can never fit"
        self.history.append(prompt + stream)
        return request

    def step(self, max_tokens: int | None = None) -> SchedulerOutput:
        """One good step."""
        output = self.schedule(max_tokens)
        self.complete(output)
        return output

    def launch(self, max_tokens: int | None = None) -> SchedulerOutput:
        """Decide and compute a step that is confirmed later, early if there is one already and that may be.

        Where two are under way the earlier is confirmed first. What a device does in the order in which it is
        told is done at once.
        """
        while self.flying and (len(self.flying) == 2 or not self._may_be_followed(self.flying[0].output)):
            self.confirm()
        output = self.schedule(max_tokens, early=bool(self.flying))
        if output.scheduled:
            executed["early steps"] += len(self.flying)
            tainted, sampled = self.execute(output)
            assert not tainted
            slots = [slot for s in output.scheduled for slot in self._written_slots(s)]
            self.flying.append(Launched(output, sampled, slots, self._added, self._unnamed))
        return output

    def confirm(self) -> None:
        """Confirm the earliest step that is under way, and finish what has come to its end."""
        if self.flying:
            launched = self.flying.pop(0)
            self._name_late(launched)
            self.scheduler.update(launched.output, launched.sampled)
            self._finish_done(launched.output)
            self.scheduler.check()

    def take_back(self) -> None:
        """Take back the latest step that is under way, computed though it is."""
        if self.flying:
            launched = self.flying.pop()
            self._added = launched.added
            self._forget(launched.output)
            for slot in launched.slots:
                self.memory[slot] = ("garbage", -2, -2)
            self.scheduler.rollback(launched.output)
            self.scheduler.check()
            executed["rollbacks"] += 1

    def poison_earliest(self, victim: int, *, early: bool, exact: bool) -> None:
        """The same as `poison`, found with another step under way.

        It is computed again for that, for which all that it read must be there: not where a window slides.
        """
        if not self.flying or any(self.config.windows):
            return
        if len(self.flying) == 2:
            self.take_back()
        launched = self.flying.pop()
        self._name_late(launched)
        ran = [s for s in launched.output.scheduled if s.request.state is RequestState.RUNNING]
        if len(ran) < len(launched.output.scheduled):
            # Who has lost its blocks since cannot be computed again here.
            self.flying.append(launched)
            return
        self._added = launched.added
        self.poison(launched.output, victim, early=early, exact=exact)

    def land(self) -> None:
        """Confirm all that is under way."""
        while self.flying:
            self.confirm()

    def _name_late(self, launched: Launched) -> None:
        """Count as computed what ended in a pending token, of requests that have not ended since."""
        for key, request in launched.unnamed:
            if request.state is RequestState.RUNNING and key not in self.known:
                self.known[key] = self._chain(request, key)
                launched.added.append(key)
        launched.unnamed.clear()

    def _chain(self, request: Request, key: int) -> tuple[int, ...]:
        digests = self._digests(request)
        return tuple(digests[1 : digests.index(key) + 1])

    def _may_be_followed(self, output: SchedulerOutput) -> bool:
        """Whether nobody forks after a step, and nothing is read in it."""
        return not any(
            (s.samples and s.request.num_forks) or s.request.reads(s.start, s.start + s.num_tokens)
            for s in output.scheduled
        )

    def schedule(self, max_tokens: int | None = None, *, early: bool = False) -> SchedulerOutput:
        """Decide a step and check it against the limits, the oracle of hits, and all invariants."""
        if not early:
            self.land()
        before = set(self.scheduler.running)
        for launched in self.flying:
            self._name_late(launched)
        output = self.scheduler.schedule(max_tokens, early=early)
        self.scheduler.check()
        assert not early or not output.preempted, "an early step takes somebody's blocks"
        self._check_output(output, before)
        self._check_hits(output, before)
        if output.scheduled:
            self.steps += 1
            executed["steps"] += 1
            executed["preemptions"] += len(output.preempted)
            executed["copies"] += len(output.copies)
        return output

    def complete(self, output: SchedulerOutput) -> None:
        """Compute a step, confirm it, and finish what has come to its end."""
        tainted, sampled = self.execute(output)
        assert not tainted, f"requests {tainted} read what was not finite"
        self.scheduler.update(output, sampled)
        self._finish_done(output)
        self.scheduler.check()

    def fail(self, output: SchedulerOutput, written: int, copied: bool) -> None:
        """A step that breaks after `written` garbage writes; nothing of it may ever be read."""
        if copied:
            self._copy(output)
        for scheduled in output.scheduled:
            for position in range(scheduled.start, scheduled.start + scheduled.num_tokens):
                if written > 0:
                    self._write(scheduled, position, ("garbage", -2, -2))
                    written -= 1
        self._forget(output)
        self.scheduler.rollback(output)
        self.scheduler.check()
        executed["rollbacks"] += 1

    def poison(self, output: SchedulerOutput, victim: int, *, early: bool, exact: bool) -> None:
        """A step in which one request's keys and values are not finite, found before or after `update`."""
        bad = output.scheduled[victim % len(output.scheduled)]
        bad_id = bad.request.request_id
        tainted, sampled = self.execute(output, bad)
        sampled = {i: token for i, token in sampled.items() if early or i not in tainted}
        if not early:
            self.scheduler.update(output, sampled)
            # Who is done is so, though a block of the same name as a bad one makes it look like a sharer.
            self._finish_done(output, tainted)
        sharers = self.scheduler.poison(bad_id, bad.start if exact else 0)
        self.scheduler.check()
        assert tainted <= {bad_id, *sharers}, f"{tainted} depend on {bad_id}, only {sharers} were preempted"
        if early:
            self.scheduler.update(output, sampled)
        self._forget_chain(bad.request, bad.start if exact else 0)
        del self.expected[bad_id]
        if early:
            self._finish_done(output)
        self.scheduler.check()
        executed["poisoned"] += 1

    def abort(self, index: int) -> None:
        """Drop any unfinished request."""
        ids = list(self.scheduler.requests)
        if ids:
            request_id = ids[index % len(ids)]
            self.scheduler.finish(request_id)
            self.scheduler.finish(request_id)
            del self.expected[request_id]

    def abort_in_flight(self, output: SchedulerOutput, index: int, fails: bool) -> None:
        """Drop a request between `schedule` and the end of its step."""
        tainted, sampled = self.execute(output)
        assert not tainted
        self.abort(index)
        if fails:
            self.fail(output, 10**6, copied=False)
        else:
            self.scheduler.update(output, sampled)
            self._finish_done(output)
        self.scheduler.check()

    def preempt(self, index: int) -> None:
        """Preempt any running request, as if its blocks were wanted."""
        self.land()
        running = list(self.scheduler.running.values())
        if running:
            self.scheduler._preempt(running[index % len(running)])

    def fork(self, index: int, token: int, extra: int) -> None:
        """Another continuation of any running request."""
        self.land()
        running = list(self.scheduler.running.values())
        if not running:
            return
        self._fork(running[index % len(running)], [token], extra)

    def _fork(self, parent: Request, tokens: Sequence[int], extra: int) -> None:
        children = [child for token in tokens if (child := self._child(parent, token, extra)) is not None]
        self.scheduler.fork(parent.request_id, children)
        executed["forks"] += len(children)
        executed["forks that wait"] += sum(child.state is RequestState.PREEMPTED for child in children)
        self.history.extend(
            child.prompt_token_ids + self.expected[child.request_id].stream for child in children
        )

    def _child(self, parent: Request, token: int, extra: int) -> Request | None:
        """Another continuation of what is computed of a request; `None` if it does not fit."""
        shared, start = parent.num_computed_tokens, len(parent.prompt_token_ids)
        outputs = [*parent.tokens(start, shared), token] if shared >= start else []
        prompt = parent.prompt_token_ids if outputs else [*parent.tokens(0, shared), token]
        max_tokens = self._clip(len(outputs) + extra, prompt)
        sampling = SamplingParams(max_tokens=max_tokens)
        child = Request(self._new_id(), prompt, sampling, outputs, parent.priority, parent.cache_keys)
        self._expect(child, max_tokens, parent.cache_keys[0][1][1] if parent.cache_keys else 0)
        if self._fits(child):
            return child
        del self.expected[child.request_id]
        with contextlib.suppress(RowFailure):
            self.scheduler.fork(parent.request_id, [child])
            raise AssertionError("taken although it can never fit")
        return None

    def drain(self) -> None:
        """Run to the end, which must come within a bound and leave nothing behind."""
        self.land()
        forks = sum(e.request.num_forks for e in self.expected.values())
        # A fork has at most 4 tokens more than what it goes on from.
        tokens = sum((len(e.digests) + 4) * (1 + e.request.num_forks) for e in self.expected.values())
        bound = self.steps + 100 + 4 * tokens * (1 + len(self.expected) + forks)
        while self.scheduler.has_unfinished:
            assert self.steps < bound, "no end in sight"
            assert self.step().scheduled, "nothing runs"
        assert not self.expected, f"{list(self.expected)} were lost"
        assert not self.scheduler.schedule().scheduled
        self.scheduler.check()
        assert self.scheduler.manager.pool.num_used == 0, "blocks leaked"

    def execute(
        self, output: SchedulerOutput, bad: ScheduledRequest | None = None
    ) -> tuple[set[int], dict[int, int]]:
        """Copy, write, then read. Returns who read something not finite, and the sampled tokens.

        Whoever reads something not finite computes nothing finite either, so that spreads until it stops.
        """
        self._copy(output)
        slots = Counter(slot for s in output.scheduled for slot in self._written_slots(s))
        assert all(count == 1 for count in slots.values()), "two requests write to one slot"
        for scheduled in output.scheduled:
            for position in range(scheduled.start, scheduled.start + scheduled.num_tokens):
                self._write(scheduled, position)
        tainted: set[int] = set()
        spreading = [bad] if bad is not None else []
        while spreading:
            for scheduled in spreading:
                tainted.add(scheduled.request.request_id)
                for position in range(scheduled.start, scheduled.start + scheduled.num_tokens):
                    self._write(scheduled, position, BAD)
            spreading = [
                s for s in output.scheduled if s.request.request_id not in tainted and self._reads_bad(s)
            ]
        sampled = {}
        for scheduled in output.scheduled:
            request = scheduled.request
            tainted_now = request.request_id in tainted
            if not tainted_now:
                self._check_reads(scheduled)
            if scheduled.samples:
                token = next_token(self._digests(request)[scheduled.start + scheduled.num_tokens])
                sampled[request.request_id] = (token + 1) % VOCABULARY if tainted_now else token
        return tainted, sampled

    def _written_slots(self, scheduled: ScheduledRequest) -> list[int]:
        return [
            self._slot(scheduled, group, position)
            for group in range(len(self.config.windows))
            for position in range(scheduled.start, scheduled.start + scheduled.num_tokens)
        ]

    def _slot(self, scheduled: ScheduledRequest, group: int, position: int) -> int:
        size = self.config.block_size
        return scheduled.block_ids[group][position // size] * size + position % size

    def _write(
        self, scheduled: ScheduledRequest, position: int, value: tuple[object, int, int] | None = None
    ) -> None:
        for group in range(len(self.config.windows)):
            slot = self._slot(scheduled, group, position)
            assert slot >= self.config.block_size, "a write to the null block"
            self.memory[slot] = value or self._value(scheduled, group, position)

    def _value(self, scheduled: ScheduledRequest, group: int, position: int) -> tuple[object, int, int]:
        request = scheduled.request
        place = position - len(request.prompt_token_ids)
        # The device knows tokens that the host does not yet.
        token = (
            self.expected[request.request_id].stream[place]
            if place >= 0
            else request.prompt_token_ids[position]
        )
        assert request.tokens(position, position + 1) in ([token], [])
        return (group, token), position, self._digests(request)[position + 1]

    def _read_range(self, scheduled: ScheduledRequest, group: int) -> range:
        window = self.config.windows[group]
        first = 0 if window is None else max(0, scheduled.start - window + 1)
        return range(first, scheduled.start + scheduled.num_tokens)

    def _reads_bad(self, scheduled: ScheduledRequest) -> bool:
        return any(
            self.memory.get(self._slot(scheduled, group, position)) == BAD
            for group in range(len(self.config.windows))
            for position in self._read_range(scheduled, group)
        )

    def _check_reads(self, scheduled: ScheduledRequest) -> None:
        request, size = scheduled.request, self.config.block_size
        for group in range(len(self.config.windows)):
            positions = self._read_range(scheduled, group)
            for position in positions:
                found = self.memory.get(self._slot(scheduled, group, position))
                wanted = self._value(scheduled, group, position)
                assert found == wanted, f"request {request.request_id} reads {found}, not {wanted}"
            below = scheduled.block_ids[group][: positions.start // size]
            assert not any(below), "a block below the window is still held"

    def _copy(self, output: SchedulerOutput) -> None:
        size = self.config.block_size
        for source, destination in output.copies:
            for offset in range(size):
                value = self.memory.get(source * size + offset, ("never written", -3, -3))
                self.memory[destination * size + offset] = value

    def _finish_done(self, output: SchedulerOutput, tainted: Container[int] = ()) -> None:
        """Drop the requests that are done; those that are tainted got nothing of this step."""
        scheduled_well = [s for s in output.scheduled if s.request.request_id not in tainted]
        for scheduled in scheduled_well:
            request, stop = scheduled.request, scheduled.start + scheduled.num_tokens
            if request.state is RequestState.RUNNING:
                request.num_read += len(request.reads(scheduled.start, stop))
        for scheduled in scheduled_well:
            request = scheduled.request
            if request.num_forks and request.state is RequestState.RUNNING and scheduled.samples:
                self._fork(request, range(request.num_forks), extra=4)
            expected = self.expected.get(scheduled.request.request_id)
            if expected is None:
                continue
            got = scheduled.request.output_token_ids
            assert got == expected.stream[: len(got)], "a wrong token"
            if len(got) == expected.target:
                wanted = 0 if request.scoring is None else len(request.scoring.targets)
                assert request.num_read == wanted, "a position was not read, or twice"
                self.scheduler.finish(scheduled.request.request_id)
                del self.expected[scheduled.request.request_id]
                self.finished += 1

    def _expect(self, request: Request, target: int, salt: object) -> None:
        digests = [hash(salt)]
        for token in request.prompt_token_ids + request.output_token_ids:
            digests.append(digest(digests[-1], token))
        stream = list(request.output_token_ids)
        while len(stream) < target:
            stream.append(next_token(digests[-1]))
            digests.append(digest(digests[-1], stream[-1]))
        self.expected[request.request_id] = Expected(request, target, stream, digests)

    def _digests(self, request: Request) -> list[int]:
        return self.expected[request.request_id].digests

    def _fits(self, request: Request) -> bool:
        if request.num_tokens >= self.config.max_model_len:
            return False
        longest = min(request.max_total_tokens, self.config.max_model_len - 1)
        return sum(self._peak(window, longest) for window in self.config.windows) < self.config.num_blocks

    def _peak(self, window: int | None, num_tokens: int) -> int:
        """Blocks that the window before a chunk and the chunk touch, wherever they begin."""
        size = self.config.block_size
        blocks = -(-num_tokens // size)
        if window is None:
            return blocks
        span = window - 1 + self.config.max_tokens
        return min(blocks, max((first + span - 1) // size + 1 for first in range(size)))

    def _clip(self, max_tokens: int, prompt: list[int]) -> int:
        return min(max_tokens, max(1, self.config.max_model_len - len(prompt)))

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def _check_output(self, output: SchedulerOutput, before: set[int]) -> None:
        ids = [s.request.request_id for s in output.scheduled]
        assert len(ids) == len(set(ids)) <= self.config.max_seqs
        assert output.total_tokens == sum(s.num_tokens for s in output.scheduled) <= self.config.max_tokens
        assert not set(ids) & set(output.preempted), "preempted and scheduled"
        assert not output.preempted or set(ids) <= before, "admitted in a step that preempted"
        held = {block_id for s in output.scheduled for group in s.block_ids for block_id in group}
        destinations = [destination for _, destination in output.copies]
        assert len(destinations) == len(held.intersection(destinations)), "a copy to a block of nobody"
        for s in output.scheduled:
            assert s.request.request_id in self.expected, "scheduled after its end"
            assert s.num_tokens >= 1
            assert s.start + s.num_tokens <= s.request.max_total_tokens, "computed beyond its last token"
            assert s.samples == (s.start + s.num_tokens == s.request.num_expected)
            assert s.pending == (s.start + s.num_tokens > s.request.num_tokens)
            covered = -(-(s.start + s.num_tokens) // self.config.block_size)
            assert [len(block_ids) for block_ids in s.block_ids] == [covered] * len(self.config.windows)

    def _check_hits(self, output: SchedulerOutput, before: set[int]) -> None:
        """Hits against all prefixes ever computed: never longer, and equal while nothing was evicted."""
        size = self.config.block_size
        self._added: list[int] = []
        self._unnamed: list[tuple[int, Request]] = []
        for s in output.scheduled:
            digests = self._digests(s.request)
            if s.request.request_id not in before:
                longest = 0
                limit = s.request.first_needed
                while longest + size <= limit and digests[longest + size] in self.known:
                    longest += size
                assert s.start <= longest, f"a hit of {s.start} tokens where {longest} were ever computed"
                assert s.start == longest or self.evicted or not self.config.caching, "a missed hit"
                assert s.start % size == 0
                executed["hits"] += s.start > 0
            stop = s.start + s.num_tokens
            for end in range(size, stop + 1 - s.pending, size):
                if digests[end] not in self.known:
                    self.known[digests[end]] = tuple(digests[1 : end + 1])
                    self._added.append(digests[end])
            if s.pending and stop % size == 0:
                self._unnamed.append((digests[stop], s.request))

    def _forget(self, output: SchedulerOutput) -> None:
        for key in self._added:
            del self.known[key]

    def _forget_chain(self, request: Request, position: int) -> None:
        """Once something was not finite, what depends on it is gone."""
        size = self.config.block_size
        end = position // size * size + size
        digests = self._digests(request)
        # Only what the request has names for: the same block, filled by others alone, is still good.
        if end <= len(request.block_hashes) * size:
            gone = [
                k for k, chain in self.known.items() if len(chain) >= end and chain[end - 1] == digests[end]
            ]
            for key in gone:
                del self.known[key]

    def _watch_evictions(self) -> None:
        pool = self.scheduler.manager.pool
        original = pool.get_new_blocks

        def watched(n: int) -> list[KVCacheBlock]:
            free = iter(pool._free)
            self.evicted |= any(next(free).block_hash is not None for _ in range(min(n, pool.num_free)))
            return original(n)

        pool.get_new_blocks = watched


def random_run(seed: int, kinds: Sequence[str] = KINDS, actions: int = 40, **changes: object) -> Sim:
    """One simulation with random actions from a seed, run to its end; `changes` go to `SimConfig`."""
    rng = random.Random(seed)
    settings = {
        "block_size": rng.randint(1, 4),
        "num_blocks": rng.randint(4, 30),
        "max_tokens": rng.randint(1, 24),
        "max_seqs": rng.randint(1, 6),
        "watermark": rng.choice([0.0, 0.01, 0.3]),
    }
    sim = Sim(SimConfig(**{**settings, **changes}))
    for _ in range(actions):
        _random_action(sim, rng, rng.choice(kinds))
    sim.drain()
    return sim


def _random_action(sim: Sim, rng: random.Random, kind: str) -> None:
    if kind == "add":
        sim.add(
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))],
            source=rng.randrange(8),
            shared=rng.randint(0, 16),
            max_tokens=rng.randint(1, 24),
            length=rng.randint(1, 24),
            resumed=rng.choice([0, 0, 3]),
            priority=rng.choice([0, 0, 1]),
            salt=rng.choice([0, 0, 1]),
            forks=rng.choice([0, 0, 0, 2, 5]),
        )
    elif kind == "launch":
        sim.launch()
    elif kind == "confirm":
        sim.confirm()
    elif kind == "take back":
        sim.take_back()
    elif kind == "take all back":
        sim.take_back()
        sim.take_back()
    elif kind == "poison earliest":
        sim.poison_earliest(rng.randrange(8), early=rng.random() < 0.5, exact=rng.random() < 0.5)
    elif kind == "abort":
        sim.abort(rng.randrange(8))
    elif kind == "preempt":
        sim.preempt(rng.randrange(8))
    elif kind == "fork":
        sim.fork(rng.randrange(8), rng.randrange(VOCABULARY), rng.randint(1, 8))
    else:
        output = sim.schedule()
        if kind == "step":
            sim.complete(output)
        elif kind == "in flight":
            sim.abort_in_flight(output, rng.randrange(8), rng.random() < 0.5)
        elif output.scheduled and kind == "fail":
            sim.fail(output, rng.randint(0, 40), rng.random() < 0.5)
        elif output.scheduled:
            sim.poison(output, rng.randrange(8), early=rng.random() < 0.5, exact=rng.random() < 0.5)
