"""Progress lines: rates, the estimate of the time left, when a line is written, what can be in it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import termios
from dataclasses import fields, replace
from typing import TextIO

import pytest

from batchgen.api.progress import Meter, Rates, Tally, describe, make_progress
from batchgen.job.progress import Progress

START = Progress(state="running", rows_total=100, rows_done=20, ok=20, rows_before=20)
LATER = replace(
    START,
    rows_done=30,
    ok=28,
    error=2,
    prompt_tokens=900,
    cached_tokens=450,
    output_tokens=100,
    seconds=10.0,
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_time_left_is_weighted_by_tokens() -> None:
    meter = Meter()
    meter.add(START)
    rates = meter.add(LATER)
    assert (rates.tokens_in, rates.tokens_out, rates.cached_share) == (90.0, 10.0, 0.5)
    assert rates.done_share == 0.3
    assert rates.seconds_left == pytest.approx(70.0)
    assert describe(LATER, rates) == (
        "30/100 rows, 28 ok, 2 failed, 90 tok/s in, 10 out, 50% prefix hits, ETA 1:10"
    )


def test_rates_are_those_of_the_last_half_minute() -> None:
    meter = Meter()
    for second in range(100):
        tokens = 1000 * min(second, 50)
        rates = meter.add(replace(START, output_tokens=tokens, seconds=float(second)))
    assert rates.tokens_out == 0.0
    assert rates.seconds_left is None


def test_a_snapshot_that_changes_later_is_not_taken_for_the_first() -> None:
    snapshot, meter = replace(START), Meter()
    for second in range(3):
        snapshot.seconds, snapshot.output_tokens = float(second), 50 * second
        rates = meter.add(snapshot)
    assert rates.tokens_out == 50.0


def test_tokens_never_count_down() -> None:
    meter = Meter()
    for snapshot in (START, LATER, replace(START, seconds=20.0)):
        rates = meter.add(snapshot)
    assert (rates.tokens_in, rates.tokens_out, rates.cached_share) == (45.0, 5.0, 0.5)


def test_what_is_not_known_yet_is_a_question_mark() -> None:
    snapshot = Progress(state="running")
    assert describe(snapshot, Meter().add(snapshot)) == (
        "0/? rows, 0 ok, 0 failed, 0 tok/s in, 0 out, 0% prefix hits, ETA ?"
    )


def test_plain_lines_come_each_half_minute_and_at_the_end() -> None:
    stream = io.StringIO()
    progress = make_progress("auto", stream)
    progress.note("a note\x1b[2J")
    for second in range(0, 65, 5):
        progress.update(replace(START, seconds=float(second)))
    progress.update(replace(START, state="draining", seconds=66.0))
    progress.update(replace(START, state="draining", seconds=67.0))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "a note\\x1b[2J"
    assert [line.split(": ")[0] for line in lines[1:]] == [
        "[0:00] running",
        "[0:30] running",
        "[1:00] running",
        "[1:06] draining",
        "[1:07] draining",
    ]


def test_json_is_an_object_a_line() -> None:
    stream = io.StringIO()
    progress = make_progress("json", stream)
    progress.note("hello\n")
    progress.update(START)
    progress.update(LATER)
    progress.close()
    note, first, second = map(json.loads, stream.getvalue().splitlines())
    assert note == {"note": "hello\n"}
    assert first["seconds_left"] is None
    assert (second["ok"], second["tokens_out"], second["done_share"]) == (28, 10.0, 0.3)


def test_none_shows_notes_only() -> None:
    stream = io.StringIO()
    progress = make_progress("none", stream)
    progress.update(START)
    progress.note("x")
    progress.close()
    assert stream.getvalue() == "x\n"


def test_a_terminal_gets_one_bar() -> None:
    stream = _Terminal()
    progress = make_progress("auto", stream)
    progress.update(replace(START, state="loading\x07 the model"))
    progress.note("x\x1b")
    progress.update(LATER)
    progress.close()
    text = stream.getvalue()
    assert "30%|" in text
    assert "28 ok" in text
    assert "x\\x1b\n" in text
    assert "\x07" not in text


def test_the_tally_tells_speeds_without_loading_and_the_hit_share() -> None:
    class Nothing:
        def update(self, snapshot: Progress) -> None: ...
        def note(self, text: str) -> None: ...
        def close(self) -> None: ...

    tally = Tally(Nothing())
    assert tally.lines() == []
    tally.update(Progress(state="loading", seconds=8.0))
    tally.update(Progress(state="running", rows_before=10, rows_done=10, seconds=10.0))
    tally.update(
        Progress(
            state="done",
            rows_before=10,
            rows_done=60,
            seconds=110.0,
            working_seconds=100.0,
            prompt_tokens=10_000,
            cached_tokens=2_500,
            output_tokens=4_000,
        )
    )
    assert tally.lines() == [
        "50 rows in 1:40 after 0:10 of loading: 0.50 rows/s, 100 tokens/s in, 40 out; "
        "25% of prompt tokens came from the prefix cache"
    ]


def test_the_bar_fits_the_terminal_also_after_it_was_resized() -> None:
    leader, follower = os.openpty()
    with open(leader, "rb", buffering=0) as screen, open(follower, "w") as stream:
        drawn = []
        resize(follower, 60)
        progress = make_progress("auto", stream)
        for second, columns in ((1.0, 60), (2.0, 60), (3.0, 30), (4.0, 100)):
            resize(follower, columns)
            progress.update(replace(LATER, seconds=second, rows_done=30 + int(second)))
            for frame in shown(screen.fileno(), stream).split("\r"):
                # What is drawn over an older, longer line ends in blanks.
                drawn.append((len(frame.rstrip()), columns))
        progress.close()
    assert len(drawn) >= 4
    assert all(width <= columns for width, columns in drawn)


def shown(screen: int, terminal: TextIO) -> str:
    """All that has been written to a terminal; its other end may get it late and in pieces."""
    end = b"\x00"
    terminal.write(end.decode())
    terminal.flush()
    written = b""
    while not written.endswith(end):
        written += os.read(screen, 65536)
    return written.removesuffix(end).decode()


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def test_json_holds_every_documented_key() -> None:
    stream = io.StringIO()
    progress = make_progress("json", stream)
    progress.update(LATER)
    progress.close()
    (line,) = stream.getvalue().splitlines()
    assert set(json.loads(line)) == {field.name for kind in (Progress, Rates) for field in fields(kind)}


def test_json_has_no_digits_that_say_nothing() -> None:
    """Seconds and speeds have one decimal, shares four."""
    stream = io.StringIO()
    progress = make_progress("json", stream)
    progress.update(Progress(state="running", rows_total=3, rows_done=1, seconds=1 / 3, pool_waste=2 / 3))
    progress.update(
        replace(LATER, seconds=200 / 7, working_seconds=100 / 7, prompt_tokens=3, cached_tokens=1)
    )
    progress.close()
    shares = {"cached_share", "done_share", "pool_waste"}
    for line in stream.getvalue().splitlines():
        for key, value in json.loads(line).items():
            if isinstance(value, float):
                assert round(value, 4 if key in shares else 1) == value, key
