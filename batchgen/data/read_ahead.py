"""Reads ahead of whoever takes the items, on a thread of its own. For remote and compressed files.

Network, decompression and decoding of columns release the interpreter's lock, so they overlap with the work
on the rows; the items and their order are those of the source.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_BYTES = 16 * 1024 * 1024
"""Most bytes that wait to be taken, beside the item that the thread is making."""
_JOIN_SECONDS = 5.0


class ReadAhead(Generic[T]):
    """An iterator over `source` that is up to `max_bytes` ahead. Nothing is read before the first `next`.

    Args:
        source: run by the thread; what it raises comes out of `next` in its place.
        size: bytes of an item.
        max_bytes: one item may be larger.
    """

    def __init__(self, source: Generator[T], size: Callable[[T], int], max_bytes: int = MAX_BYTES) -> None:
        self._shared = _Shared(source, size, max_bytes)
        self._thread: threading.Thread | None = None

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            # The thread knows the shared part alone, so that an iterator that is dropped ends it.
            self._thread = threading.Thread(target=_fill, args=[self._shared], name="read-ahead", daemon=True)
            self._thread.start()
        return self._shared.take()

    def close(self) -> None:
        """Ends the thread, after the item that it is making."""
        self._shared.stop()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        else:
            self._shared.source.close()

    def __del__(self) -> None:
        self._shared.stop()


class _Shared(Generic[T]):
    def __init__(self, source: Generator[T], size: Callable[[T], int], max_bytes: int) -> None:
        self.source = source
        self._size = size
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._bytes = 0
        self._ended = False
        self._stopped = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """False when nobody wants more."""
        with self._changed:
            self._items.append(item)
            self._bytes += self._size(item)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._bytes < self._max_bytes)
            return not self._stopped

    def end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def take(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._stopped)
            if self._items:
                item = self._items.popleft()
                self._bytes -= self._size(item)
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()


def _fill(shared: _Shared[T]) -> None:
    error: BaseException | None = None
    try:
        for item in shared.source:
            if not shared.put(item):
                break
    except BaseException as e:
        error = e
    shared.source.close()
    shared.end(error)
