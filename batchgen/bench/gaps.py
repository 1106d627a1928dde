"""How long a device waits for the host: a GPU by what it has recorded of its own work."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from batchgen.bench.parts import ALL, DECODING, HOST, INPUTS, MIXED, PROMPTS, SCHEDULER
from batchgen.bench.passes import Pass, admit
from batchgen.bench.steps import Step, recorded
from batchgen.engine.core import EngineCore
from batchgen.types import Output, Request

STEPS = {PROMPTS: 6, MIXED: 6, DECODING: 12}
"""That are timed, and then watched."""
_WARMUP = 2
_LEAST_SHARE = 0.1
_PAUSE = 4e-6
"""Seconds between two kernels up to which the device itself is changing from one to the next."""
logger = logging.getLogger(__name__)
Spans = Sequence[tuple[float, float]]
Watch = Callable[[Callable[[], None]], Spans]


def waiting_shares(
    core: EngineCore, done: Pass, requests: Iterable[Request], first: int
) -> dict[str, float | None]:
    """How long the device waits for the host.

    Args:
        core: with nothing to do.
        done: a pass over it.
        requests: of that pass; on a GPU those that generate are computed once more, in other tokens, which
            are not in the cache.
        first: the numbers of these are from here on.

    Returns:
        On a processor one share, of the whole; on a GPU the share of a step of each kind that took a tenth of
        the time or more, None where it is not known.
    """
    if core.runner.device.place.type == "cpu":
        return {ALL: host_share(done)}
    size, found = core.vocab_size, dict[str, float | None]()
    rows = [request for request in requests if request.generates]
    for kind in (PROMPTS, DECODING):
        seconds = sum(step.seconds for step in done.steps if step.kind == kind)
        if seconds >= _LEAST_SHARE * done.seconds:
            # Other tokens each time.
            away = 1 + len(found)
            found[kind] = idle_share(
                core,
                [
                    Request(first + i, [(t + away) % size for t in row.prompt_token_ids], row.sampling)
                    for i, row in enumerate(rows)
                ],
                kind,
            )
    return found


def host_share(done: Pass) -> float:
    """Of a pass on a processor, the share of time in which nothing of the model is computed."""
    inside = sum(done.parts.values())
    own = sum(done.parts.get(part, 0.0) for part in (SCHEDULER, INPUTS, HOST))
    return (own + max(0.0, done.seconds - inside)) / done.seconds


def idle_share(
    core: EngineCore, requests: Iterable[Request], kind: str, watch: Watch | None = None
) -> float | None:
    """The share of a step in which the device does nothing.

    Some steps in a row are timed, and as many behind them are watched: watching slows the host down, not
    the device. Requests that are not through then are dropped.

    Args:
        core: with nothing to do.
        requests: to be computed, of prompts that are not in the cache.
        kind: of the steps, see `steps.py`.
        watch: runs a function; gives seconds at which what the device did in it began and ended. None:
            torch's profiler.

    Returns:
        0 to 1; None where there are no such steps in a row, or nothing was seen of the device.
    """
    waiting, outputs, count = iter(requests), dict[int, Output](), STEPS[kind]
    try:
        with recorded(core) as executed:

            def step() -> Step | None:
                admit(core, waiting, outputs)
                began, before = time.perf_counter(), len(executed())
                core.step()
                seconds, after = time.perf_counter() - began, executed()
                return Step(after[-1], seconds, 0) if len(after) > before else None

            times: list[float] = []
            while len(times) < _WARMUP + count:
                now = step()
                if now is None:
                    return None
                times = [*times, now.seconds] if now.kind == kind else []
            watched: list[Step | None] = []
            spans = (watch or profiled)(lambda: watched.extend(step() for _ in range(count)))
    finally:
        core.abort_all()
    if not spans or any(one is None or one.kind != kind for one in watched):
        return None
    return max(0.0, 1 - busy_seconds(spans) / count / statistics.fmean(times[_WARMUP:]))


def busy_seconds(spans: Spans) -> float:
    """What work took that may overlap, with the short pauses between one and the next."""
    busy, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            busy += stop - (end if start - end <= _PAUSE else start)
            end = stop
    return busy


def profiled(run: Callable[[], None]) -> Spans:
    """See `idle_share`, of a GPU; nothing where torch's profiler does not work."""
    torch.cuda.synchronize()
    profile: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profile.start()
    except Exception:
        logger.exception("the profiler cannot be started")
        return []
    run()
    torch.cuda.synchronize()
    try:
        profile.stop()
        events = profile.events() or ()
    except Exception:
        logger.exception("the profiler has no result")
        return []
    return [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]
