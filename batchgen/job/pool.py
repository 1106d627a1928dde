"""Rows of the open window that no worker has yet, in the order in which they should run. The supervisor's.

Reading runs ahead over the whole window, so that an order holds for all of it and not only for one message.
Higher priority goes first; among equals the order is a sweep upwards through the keys that begins again at
its end, so that rows with a common beginning stay together whenever they were read. When a part is nearly
done its last rows go at once: a part that is never whole keeps the window from moving on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from batchgen.job.window import Pending, Window

STRAGGLERS = 20
"""A part is nearly done when one row in so many waits."""
STALE = 1000
Item = tuple[int, Any, int, Pending]
"""Less its priority, its key, its ordinal, by which two never tie; and the row itself."""


class RowPool:
    """Reads ahead and hands out.

    Args:
        window: where rows come from.
        part_rows: rows in one part.
        most_bytes: of rows that are kept here.
        is_expected: asked of each row that is read; a row that it takes is not kept here.
    """

    def __init__(
        self,
        window: Window,
        *,
        part_rows: int,
        most_bytes: int,
        is_expected: Callable[[Pending], bool],
    ) -> None:
        self._window = window
        self._part_rows = part_rows
        self._most_bytes = most_bytes
        self._is_expected = is_expected
        self._again: deque[Pending] = deque()
        self._parts: dict[int, dict[int, Pending]] = {}
        self._sweep: list[Item] = []
        self._next_sweep: list[Item] = []
        self._last: Item | None = None
        self._bytes = 0
        self._length = 0
        self._stale = 0
        self._window_full = False

    def __len__(self) -> int:
        return self._length + len(self._again)

    @property
    def exhausted(self) -> bool:
        """Whether the input has no more rows than those here."""
        return self._window.exhausted

    @property
    def starved(self) -> bool:
        """Whether there would be rows if parts of the window were finished."""
        return not len(self) and self._window.full

    def put_back(self, rows: Iterable[Pending]) -> None:
        """Rows that were handed out and have to run again; they go first."""
        self._again.extendleft(reversed(list(rows)))

    def fill(self) -> None:
        """Read ahead as far as window and memory allow.

        Raises:
            InputError: the input is cut or has changed, or a row is bad and that is to stop the run.
        """
        while self._bytes < self._most_bytes:
            found = self._window.take()
            if not found:
                break
            for pending in found:
                if not self._is_expected(pending):
                    self._add(pending)
        self._window_full = self._window.full

    def take(self) -> Pending | None:
        """The next row to run; None when there is none here."""
        if self._again:
            return self._again.popleft()
        if not self._length:
            return None
        pending = self._straggler() or self._in_order()
        self._length -= 1
        self._bytes -= pending.size
        part = pending.row // self._part_rows
        rows = self._parts[part]
        del rows[pending.row]
        if not rows:
            del self._parts[part]
        return pending

    def _add(self, pending: Pending) -> None:
        self._parts.setdefault(pending.row // self._part_rows, {})[pending.row] = pending
        self._length += 1
        self._bytes += pending.size
        item = (-pending.priority, pending.key, pending.row, pending)
        last = self._last
        behind = last is not None and last[0] == item[0] and item < last
        heapq.heappush(self._next_sweep if behind else self._sweep, item)

    def _straggler(self) -> Pending | None:
        """The first row of the oldest part that has any here, if that part is nearly done or holds up all."""
        oldest = next(iter(self._parts.values()))
        nearly_done = len(oldest) * STRAGGLERS <= self._part_rows
        holds_up = self._window_full and self._length <= self._part_rows
        if not (nearly_done or holds_up):
            return None
        self._stale += 1
        if self._stale > self._length + STALE:
            self._forget_stale()
        return next(iter(oldest.values()))

    def _forget_stale(self) -> None:
        """Rows that went ahead of their turn must not be kept until it comes."""
        for sweep in (self._sweep, self._next_sweep):
            sweep[:] = [item for item in sweep if self._waits(item[2])]
            heapq.heapify(sweep)
        self._stale = 0

    def _waits(self, row: int) -> bool:
        return row in self._parts.get(row // self._part_rows, ())

    def _in_order(self) -> Pending:
        while True:
            if not self._sweep or (self._next_sweep and self._next_sweep[0][0] < self._sweep[0][0]):
                self._sweep, self._next_sweep = self._next_sweep, self._sweep
            item = heapq.heappop(self._sweep)
            if self._waits(item[2]):
                self._last = item
                return item[3]
            self._stale -= 1
