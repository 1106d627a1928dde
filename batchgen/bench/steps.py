"""What the steps of an engine compute and read, and how long they take.

`passes.py` keeps a record of each step while rows run; `utilisation.py` makes shares of the device of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchgen.bench.parts import DECODING, MIXED, PROMPTS
from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.core import EngineCore

_REMEMBERED = 4
"""Latest steps that may still be taken back."""


class Span(NamedTuple):
    """Positions `start` to `stop` (exclusive) of a sequence, computed in one step.

    At positions in `scored` known tokens are scored, at those in `pooled` hidden states are read for a
    vector, and after the last one a token is drawn if it `samples`.
    """

    start: int
    stop: int
    samples: bool
    scored: range = range(0)
    pooled: range = range(0)

    @property
    def logits(self) -> int:
        """How many positions the head is computed for."""
        return len(self.scored) + self.samples

    @property
    def needed(self) -> list[range]:
        """Positions whose hidden states are read, be it for logits."""
        read = [r for r in (self.scored, self.pooled) if len(r)]
        if self.samples and not any(self.stop - 1 in r for r in read):
            read.append(range(self.stop - 1, self.stop))
        return read


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Args:
        spans: of each sequence in it.
        seconds: until the next.
        held: tokens in the cache after it, what sequences share counted once.
    """

    spans: Sequence[Span]
    seconds: float
    held: int

    @property
    def tokens(self) -> int:
        """Computed."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def logits(self) -> int:
        """Positions that the head was computed for."""
        return sum(span.logits for span in self.spans)

    @property
    def kind(self) -> str:
        """Whether each sequence drew a token after its only one, half the tokens or more are of pieces of
        prompts, or neither."""
        if all(span.samples and span.stop - span.start == 1 for span in self.spans):
            return DECODING
        of_prompts = sum(span.stop - span.start for span in self.spans if span.stop - span.start > 1)
        return PROMPTS if 2 * of_prompts >= self.tokens else MIXED


@dataclass(slots=True)
class _Executed:
    planned: SchedulerOutput | None
    spans: list[Span]


@contextmanager
def recorded(core: EngineCore) -> Iterator[Callable[[], list[list[Span]]]]:
    """Note what an engine computes inside the context, steps that are taken back left out.

    Notes are made when a step was launched, so that a GPU computes meanwhile.

    Yields:
        What gives the spans of each step so far.
    """
    executed: list[_Executed] = []
    execute, rollback = core.runner.execute, core.scheduler.rollback

    def noted(planned: SchedulerOutput, *more: Any, **options: Any) -> Any:
        logits = execute(planned, *more, **options)
        executed.append(_Executed(planned, [_span(s) for s in planned.scheduled]))
        if len(executed) > _REMEMBERED:
            executed[-_REMEMBERED - 1].planned = None
        return logits

    def taken_back(planned: SchedulerOutput) -> Any:
        for step in executed[-_REMEMBERED:]:
            if step.planned is planned:
                executed.remove(step)
        return rollback(planned)

    with _in_place(core.runner, "execute", noted), _in_place(core.scheduler, "rollback", taken_back):
        yield lambda: [step.spans for step in executed]


def _span(scheduled: ScheduledRequest) -> Span:
    request, start = scheduled.request, scheduled.start
    stop = start + scheduled.num_tokens
    if request.scoring is None and request.pooling is None:
        return Span(start, stop, scheduled.samples)
    read = request.reads(start, stop)
    if request.scoring is not None:
        return Span(start, stop, scheduled.samples, scored=read)
    return Span(start, stop, scheduled.samples, pooled=read)


@contextmanager
def _in_place(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Put a function in place of a method; what was there before comes back."""
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
