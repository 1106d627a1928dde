"""Python's cycle collector while a job runs. Used around the loops of the supervisor and of the workers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = (20_000, 20, 100)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Look for cycles less often: rows, results and positions make none, and there are thousands alive.

    By default every 700 new objects start a search through the youngest ones, which took a quarter of the
    time of putting parts together (4 of 16 us a row), and a sixth of a worker's beside its engine (5 of 30).
    Reference counts still free everything at once.
    """
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
