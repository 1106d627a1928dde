"""Run requests through an engine as a worker does, and keep what each step was. For `ours.py` and the check
of a GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from batchgen.bench.breakdown import clocked
from batchgen.bench.steps import Step, recorded
from batchgen.engine.core import EngineCore
from batchgen.types import Output, Request


@dataclass(slots=True)
class Pass:
    """What one pass over requests took, and what it gave.

    Args:
        seconds: of the whole.
        parts: seconds by part, as the host sees them.
        outputs: by the number of a request.
        steps: in their order; none where it is not known which time is whose.
        count: of steps.
        followed: those behind which the next was launched before their tokens were known; None where that is
            never done.
        computed: tokens.
        prompt_tokens: of what was admitted, once for each time.
        cached: those of them that came from the prefix cache.
        preemptions: of running requests.
        held, empty: slots of the cache that requests held after each step, and those without a token.
    """

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    outputs: dict[int, Output] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    count: int = 0
    followed: int | None = None
    computed: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    preemptions: int = 0
    held: int = 0
    empty: int = 0

    @property
    def hit_share(self) -> float:
        """Of prompt tokens, those that came from the prefix cache."""
        return self.cached / self.prompt_tokens if self.prompt_tokens else 0.0


def run_pass(core: EngineCore, requests: Iterable[Request]) -> Pass:
    """Run requests to their end; rows that fail are outputs like others.

    Raises:
        EngineError: a step could not be run.
    """
    found, stats, ahead = Pass(), core.scheduler.stats, core.ahead
    followed = 0 if ahead is None else ahead.followed
    before, counted = dataclasses.replace(stats), dataclasses.replace(core.counters)
    waiting = iter(requests)
    seconds: list[float] = []
    held: list[int] = []
    with clocked(core) as parts, recorded(core) as executed:
        began = last = time.perf_counter()
        while admit(core, waiting, found.outputs) or core.num_unfinished:
            found.outputs.update((output.request_id, output) for output in core.step())
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
            slots = stats.pool_used * stats.block_size
            held.append(slots - stats.slack_tokens)
            found.held += slots
            found.empty += stats.slack_tokens
        found.seconds = time.perf_counter() - began
        found.parts = parts()
    spans = executed()
    # The end of the one is paired with the beginning of the other, in order, also where steps overlap.
    if len(spans) == len(seconds):
        found.steps = [Step(*step) for step in zip(spans, seconds, held, strict=True)]
    found.count = core.counters.steps - counted.steps
    found.followed = None if ahead is None else ahead.followed - followed
    found.computed = core.counters.computed - counted.computed
    found.prompt_tokens = stats.prompt_tokens - before.prompt_tokens
    found.cached = stats.cached_tokens - before.cached_tokens
    found.preemptions = stats.preemptions - before.preemptions
    return found


def admit(core: EngineCore, waiting: Iterator[Request], outputs: dict[int, Output]) -> bool:
    """Hand requests over as a worker does: enough that the engine never runs dry; whether there were any."""
    room = 2 * core.scheduler.config.max_num_seqs - core.num_unfinished
    admitted = False
    for request in islice(waiting, max(0, room)):
        admitted = True
        output = core.add(request)
        if output is not None:
            outputs[request.request_id] = output
    return admitted
