"""Keeps a GPU busy while the host deals with the tokens of a step: the next one is launched before them.

    host     launch F2 | wait for D1 | finalize 1 | launch D2 | launch F3 | wait for D2 | ...
    device   F1 D1 | F2 ................................. D2 | F3 ...................

F is the forward pass of a step, D draws its tokens. F2 takes the tokens of D1 from the device, as the host
does not know them yet. D2 is launched when it does, so that whatever is done to logits finds the tokens so
far, and nothing is drawn for a row that has ended. Two steps are under way at most. A step that asks for it
(`Flight.alone`) is computed as on a processor: launched, waited for, and finalized before the next.
`EngineCore` drives this where there is a GPU.

A device does what it is told in that order. So what step 2 writes, and what it reads of blocks that are given
away meanwhile, is as if step 1 had been finalized before it began; and a step that is taken back may go on
writing, as whoever gets those blocks next writes them later.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from batchgen.core.scheduler import Scheduler, SchedulerOutput
from batchgen.engine.computed import Computed
from batchgen.engine.inputs import PendingTokens
from batchgen.engine.isolation import Isolation, StepFailed
from batchgen.engine.step_budget import StepBudget
from batchgen.types import RequestState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is launched, up to its tokens.

    Args:
        planned: the step.
        pending: its tokens on the device.
        result: waits for the device, and gives what the step has yielded; called once.
        alone: why nothing may be launched before the step is finalized; None: something may.
    """

    planned: SchedulerOutput
    pending: PendingTokens
    result: Callable[[], Computed]
    alone: str | None = None

    def settled(self) -> Flight:
        """With its result at hand, where it is waited for anyway."""
        if self.alone is None:
            return self
        computed = self.result()
        return replace(self, result=lambda: computed)


@dataclass(frozen=True, slots=True)
class Stages:
    """What the engine does of a step; none waits for the device unless it says so.

    Args:
        launch: decides a step while none is under way, and launches it, in smaller pieces where memory does
            not suffice. Waits where the step is alone. Raises StepFailed.
        announce: says which steps are under way from now on.
        forward: launches a step that was decided early, with the tokens of the one before; gives its logits.
        draw: draws the tokens of such a step from them, for requests that have not ended since.
    """

    launch: Callable[[], Flight]
    announce: Callable[[Sequence[SchedulerOutput]], None]
    forward: Callable[[SchedulerOutput, PendingTokens], torch.Tensor]
    draw: Callable[[SchedulerOutput, torch.Tensor], Flight]


class LookAhead:
    """The steps under way.

    Args:
        scheduler: decides them.
        isolation: while it looks for what makes a step fail, every step is alone.
        budget: how many tokens a step may hold.
        stages: of a step.

    Attributes:
        followed: steps behind which another was launched before their tokens were waited for.
        alone: all others, by the reason.
    """

    def __init__(
        self, scheduler: Scheduler, isolation: Isolation, budget: StepBudget, stages: Stages
    ) -> None:
        self._scheduler = scheduler
        self._isolation = isolation
        self._budget = budget
        self._stages = stages
        self._flight: Flight | None = None
        self._next: tuple[SchedulerOutput, torch.Tensor] | None = None
        self.followed = 0
        self.alone = Counter[str]()

    def execute(self) -> tuple[SchedulerOutput, Computed]:
        """Launch the next step, and wait for what the one before has yielded, which is to be finalized now.

        Raises:
            StepFailed: it could not be computed; nothing is under way.
        """
        if self._flight is None:
            self._flight = self._stages.launch()
        flight = self._flight
        self._launch_next(flight)
        try:
            computed = flight.result()
        except BaseException as error:
            self.take_back()
            if not isinstance(error, Exception):
                raise
            ids = [s.request.request_id for s in flight.planned.scheduled]
            raise StepFailed([i for i in ids if i in self._scheduler.requests], error) from error
        self._flight = None
        if computed.nonfinite:
            self._take_back_next()
        return flight.planned, computed

    def draw(self) -> None:
        """Draw the tokens of the step that is under way, now that the one before is finalized."""
        if self._next is None:
            return
        planned, logits = self._next
        if all(s.request.state is RequestState.FINISHED for s in planned.scheduled):
            self._take_back_next()
            return
        try:
            self._flight = self._stages.draw(planned, logits)
        except BaseException as error:
            self._take_back_next()
            if not isinstance(error, Exception):
                raise
            # It is computed again, alone, where it is found out what was wrong.
            logger.exception("tokens could not be drawn in a step of %d requests", len(planned.scheduled))
        self._next = None

    def take_back(self) -> None:
        """Take back all that is under way."""
        self._take_back_next()
        if self._flight is not None:
            self._scheduler.rollback(self._flight.planned)
            self._flight = None

    def _take_back_next(self) -> None:
        if self._next is not None:
            self._scheduler.rollback(self._next[0])
            self._next = None

    def _launch_next(self, flight: Flight) -> None:
        planned = self._plan(flight)
        self._stages.announce([flight.planned] if planned is None else [flight.planned, planned])
        if planned is None:
            return
        try:
            self._next = planned, self._stages.forward(planned, flight.pending)
        except BaseException as error:
            self._scheduler.rollback(planned)
            if not isinstance(error, Exception):
                raise
            logger.exception("a step of %d requests failed behind another", len(planned.scheduled))
            self.alone["error"] += 1
        else:
            self.followed += 1

    def _plan(self, flight: Flight) -> SchedulerOutput | None:
        """The next step, if it may be launched now."""
        why = "isolated" if self._isolation.active else "blocks" if flight.planned.short else flight.alone
        if why is None:
            planned = self._scheduler.schedule(self._budget.tokens, early=True)
            if planned.scheduled:
                return planned
            why = "blocks" if planned.short else "last"
        self.alone[why] += 1
        return None
