"""Reading ahead gives the items of its source, is bounded, and ends with whoever dropped it."""

import gc
import threading
import time
from collections.abc import Generator

import pytest

from batchgen.data.read_ahead import ReadAhead


def numbers(count: int, made: list[int] | None = None) -> Generator[bytes]:
    for i in range(count):
        if made is not None:
            made.append(i)
        yield b"x" * (i % 7 + 1)


def threads() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


def settled(wanted: int) -> bool:
    """Whether there are as many threads as wanted, soon."""
    for _ in range(500):
        if threads() == wanted:
            return True
        time.sleep(0.01)
    return False


def test_items_in_order() -> None:
    for max_bytes in (1, 10, 10_000):
        ahead = ReadAhead(numbers(500), len, max_bytes)
        assert list(ahead) == list(numbers(500))
        assert list(ahead) == []
        ahead.close()


def test_nothing_is_read_before_the_first_item_is_asked_for() -> None:
    made: list[int] = []
    ReadAhead(numbers(9, made), len).close()
    assert made == []
    assert threads() == 0


def test_no_more_than_the_limit_waits() -> None:
    made: list[int] = []
    ahead = ReadAhead(numbers(1000, made), len, 20)
    next(ahead)
    before = -1
    while len(made) != before:
        before = len(made)
        time.sleep(0.05)
    assert len(made) < 15
    ahead.close()
    assert settled(0)


def test_an_error_comes_in_its_place() -> None:
    def failing() -> Generator[bytes]:
        yield b"a"
        raise ValueError("here")

    ahead = ReadAhead(failing(), len)
    assert next(ahead) == b"a"
    with pytest.raises(ValueError, match="here"):
        next(ahead)
    ahead.close()


def test_a_dropped_one_ends_its_thread() -> None:
    ahead = ReadAhead(numbers(1000), len, 20)
    next(ahead)
    del ahead
    gc.collect()
    assert settled(0)
