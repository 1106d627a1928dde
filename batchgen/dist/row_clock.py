"""`run.row_timeout`: how long each row has run in the engine, and which have run too long.

The worker's loop calls it around each step, where a limit is set. Time counts while a row is part of a step;
waiting, before its first step or after a preemption, costs it nothing. The turns of a dialogue are one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from batchgen.types import ErrorClass, Output, RowError


class RowClock:
    """Seconds of engine time by row.

    Args:
        limit: of one row, in seconds.
        fail: ends a row with an error and returns its output.
    """

    def __init__(self, limit: float, fail: Callable[[int, RowError], Output]) -> None:
        self._limit = limit
        self._fail = fail
        self._seconds: dict[int, float] = {}
        self._in_step: list[int] = []
        self._began = 0.0

    def begin(self, rows: list[int]) -> None:
        """A step with these rows begins."""
        self._in_step = rows
        self._began = time.monotonic()

    def end(self, outputs: Iterable[Output]) -> list[Output]:
        """The step is over, and so are these requests; returns the outputs of others that ran too long."""
        elapsed = time.monotonic() - self._began
        rows, self._in_step = self._in_step, []
        for row in rows:
            self._seconds[row] = self._seconds.get(row, 0.0) + elapsed
        ended = {output.request_id for output in outputs}
        late = [row for row in rows if self._seconds[row] > self._limit and row not in ended]
        return [self._expire(row) for row in late]

    def forget(self, outputs: Iterable[Output]) -> None:
        """These rows are done."""
        for output in outputs:
            self._seconds.pop(output.request_id, None)

    def _expire(self, row: int) -> Output:
        message = (
            f"the row was not done after {self._limit:g} s in the engine (run.row_timeout); "
            "lower sampling.max_tokens or raise the limit"
        )
        return self._fail(row, RowError(ErrorClass.TIMEOUT, message))
