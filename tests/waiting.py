"""Waiting for what must come, however slow the machine is: only what hangs takes so long."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

PATIENCE = 600.0


def wait_until(
    ready: Callable[[], object], process: subprocess.Popen[str] | None = None, every: float = 0.01
) -> bool:
    """Until `ready()` is true, looking each `every` seconds; False if `process` ended first.

    Raises:
        AssertionError: neither within `PATIENCE` seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if process is not None and process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(every)
    return True
