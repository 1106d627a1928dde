"""Signals that ask a run to stop, all alike: TERM, INT, HUP, USR1, USR2. A second INT ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from batchgen.types import BatchgenError

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SECOND_INTERRUPT = 130


class StoppedEarly(BatchgenError):
    """A signal came before any row ran; the same command continues."""

    exit_code = 75


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the body, which does nothing that cannot be cut off, a signal raises `StoppedEarly`."""

    def stop(name: str) -> None:
        raise StoppedEarly(f"stopped ({name}) before any row ran; run the same command to continue")

    with stop_signals(stop, lambda: None):
        yield


@contextmanager
def stop_signals(on_stop: Callable[[str], None], on_abandon: Callable[[], None]) -> Iterator[None]:
    """Within the body, call `on_stop` with the name of each signal.

    Does nothing outside the main thread, where Python delivers no signals.

    Args:
        on_stop: runs inside the signal handler; must only do what is safe there.
        on_abandon: called before the process exits on the second INT; everything committed is on disk.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            on_abandon()
            os._exit(SECOND_INTERRUPT)
        on_stop(signal.Signals(number).name)

    previous: dict[int, Any] = {}
    for stopping in STOPPING:
        before = signal.getsignal(stopping)
        # `nohup` and cron ask that a hang-up be ignored.
        if not (stopping == signal.SIGHUP and before == signal.SIG_IGN):
            previous[stopping] = before
            signal.signal(stopping, handle)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
