"""Where a step's time goes: puts clocks around the parts of an engine, and takes them off again.

Each part's time is its own: what it calls and is clocked too is not counted to it. The layers of a model that
run as one program are clocked by the program itself, an operation at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from batchgen.bench.parts import ATTENTION, HEAD, HOST, INPUTS, KINDS, PROGRAM, REST, SAMPLING, SCHEDULER
from batchgen.engine.core import EngineCore

_PARTS = {**KINDS, HEAD: HEAD}


class Clock:
    """Adds up seconds, each to the innermost part that is running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    def begin(self, part: str) -> None:
        """Of a part; the one around it stops."""
        self._charge()
        self._running.append(part)

    def end(self, depth: int) -> None:
        """Of every part within the first `depth` that are running."""
        self._charge()
        del self._running[depth:]

    @property
    def depth(self) -> int:
        """How many parts are running, one inside the other."""
        return len(self._running)

    def around(self, part: str, function: Callable[..., Any], then: str | None = None) -> Callable[..., Any]:
        """A function that is charged to a part; what comes after it is charged to `then`."""

        def clocked(*args: Any, **kwargs: Any) -> Any:
            depth = self.depth
            self.begin(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.end(depth)
                if then is not None:
                    self.begin(then)

        return clocked

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._running:
            part = self._running[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


@contextmanager
def clocked(core: EngineCore) -> Iterator[Callable[[], dict[str, float]]]:
    """Clock an engine inside the context.

    Yields:
        What gives the seconds of each part so far; those of `host` are what a step spends elsewhere.
    """
    clock, runner = Clock(), core.runner
    changed: list[tuple[Any, str]] = []

    def put(owner: Any, name: str, part: str, then: str | None = None) -> None:
        setattr(owner, name, clock.around(part, getattr(owner, name), then))
        changed.append((owner, name))

    put(core, "step", HOST)
    put(core.scheduler, "schedule", SCHEDULER)
    put(core.scheduler, "finish", SCHEDULER)
    # A step samples between the end of its pass and what it tells the scheduler.
    put(runner, "execute", INPUTS, then=SAMPLING)
    put(runner, "forward", REST)
    update = core.scheduler.update
    _set(core.scheduler, "update", _ending(clock, clock.around(SCHEDULER, update)), changed)
    times = None
    if runner.program is not None:
        times = runner.program.watch()
        put(runner.program, "run", PROGRAM)
    else:
        put(runner.backend, "attend", ATTENTION)
        put(runner.backend, "write", ATTENTION)
    put(runner.parts, "head", HEAD)
    for name, module in runner.parts.products():
        if (part := _PARTS.get(name)) is not None:
            put(module, "forward", part)
    try:
        yield lambda: _together(clock.seconds, {} if times is None else times.seconds())
    finally:
        for owner, name in reversed(changed):
            delattr(owner, name)


def _set(owner: Any, name: str, function: Any, changed: list[tuple[Any, str]]) -> None:
    setattr(owner, name, function)
    changed.append((owner, name))


def _ending(clock: Clock, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function before which whatever runs inside a step ends."""

    def ended(*args: Any, **kwargs: Any) -> Any:
        clock.end(1)
        return function(*args, **kwargs)

    return ended


def _together(seconds: dict[str, float], operations: dict[str, float]) -> dict[str, float]:
    """Seconds of all parts; operations are inside what their program took."""
    parts = {**seconds, **operations}
    if operations:
        parts[PROGRAM] = max(0.0, seconds.get(PROGRAM, 0.0) - sum(operations.values()))
    return parts
