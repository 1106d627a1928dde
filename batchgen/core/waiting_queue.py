"""Requests that hold no blocks, in the order of their admission. Used by `Scheduler`."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from batchgen.types import Request


class WaitingQueue:
    """Higher priority first, then by arrival; every operation is O(log number of priorities) or better."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, Request]] = {}
        self._order: list[int] = []
        self._length = 0

    def push_back(self, request: Request) -> None:
        """A new request: behind all of its priority."""
        self._level(request.priority)[request.request_id] = request
        self._length += 1

    def push_front(self, request: Request) -> None:
        """A request that was running: before all of its priority."""
        level = self._level(request.priority)
        level[request.request_id] = request
        level.move_to_end(request.request_id, last=False)
        self._length += 1

    def peek(self) -> Request | None:
        """The next request to admit."""
        while self._order:
            level = self._levels[-self._order[0]]
            if level:
                return next(iter(level.values()))
            del self._levels[-heapq.heappop(self._order)]
        return None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is.

        Raises:
            KeyError: it is not in the queue.
        """
        del self._levels[request.priority][request.request_id]
        self._length -= 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._levels, reverse=True):
            yield from self._levels[priority].values()

    def _level(self, priority: int) -> OrderedDict[int, Request]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
            heapq.heappush(self._order, -priority)
        return level
