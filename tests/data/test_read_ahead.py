"""Reading ahead gives the items of its source, is bounded, and ends with whoever dropped it."""

import gc
import threading
import time
from collections.abc import Generator

import pytest
from waiting import wait_until

from batchgen.data.read_ahead import ReadAhead


def numbers(count: int, made: list[int] | None = None) -> Generator[bytes]:
    for i in range(count):
        if made is not None:
            made.append(i)
        yield b"x" * (i % 7 + 1)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "read-ahead"}


@pytest.fixture
def before() -> set[threading.Thread]:
    """Threads that are not this test's doing."""
    return threads()


def test_items_in_order() -> None:
    for max_bytes in (1, 10, 10_000):
        ahead = ReadAhead(numbers(500), len, max_bytes)
        assert list(ahead) == list(numbers(500))
        assert list(ahead) == []
        ahead.close()


def test_nothing_is_read_before_the_first_item_is_asked_for(before: set[threading.Thread]) -> None:
    made: list[int] = []
    ReadAhead(numbers(9, made), len).close()
    assert made == []
    assert threads() <= before


def test_no_more_than_the_limit_waits(before: set[threading.Thread]) -> None:
    made: list[int] = []
    ahead = ReadAhead(numbers(1000, made), len, 20)
    next(ahead)
    known = -1
    while len(made) != known:
        known = len(made)
        time.sleep(0.05)
    assert len(made) < 15
    ahead.close()
    wait_until(lambda: threads() <= before)


def test_an_error_comes_in_its_place() -> None:
    def failing() -> Generator[bytes]:
        yield b"a"
        raise ValueError("here")

    ahead = ReadAhead(failing(), len)
    assert next(ahead) == b"a"
    with pytest.raises(ValueError, match="here"):
        next(ahead)
    ahead.close()


def test_a_dropped_one_ends_its_thread(before: set[threading.Thread]) -> None:
    ahead = ReadAhead(numbers(1000), len, 20)
    next(ahead)
    del ahead
    gc.collect()
    wait_until(lambda: threads() <= before)
