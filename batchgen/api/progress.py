"""Progress of a run for people and programs. `run` makes one and hands it to the supervisor.

    bar     one line on a terminal, weighted by tokens
    plain   a line each 30 seconds, for logs
    json    an object a line each second: the fields of `Progress` and `Rates`; and {"note": sentence}
    none    only notes

Everything goes to stderr, and nothing that a row or a model wrote can steer the terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TextIO

from batchgen.grammar import counted
from batchgen.job.progress import Progress
from batchgen.text.terminal import safe

PLAIN_SECONDS = 30.0
_SHARES = frozenset({"cached_share", "done_share", "pool_waste"})
JSON_SECONDS = 1.0
RATE_SECONDS = 30.0
NO_WIDTH_COLUMNS = 120


class Display(Protocol):
    """Shows progress and sentences to the user."""

    def update(self, snapshot: Progress) -> None:
        """Show how far the run is; called often, shows as often as is sensible."""

    def note(self, text: str) -> None:
        """Show a sentence."""

    def close(self) -> None:
        """Show the last snapshot and leave the terminal tidy."""


def make_progress(mode: str, stream: TextIO | None = None) -> Display:
    """What shows progress in this mode; `auto` is a bar on a terminal and plain lines elsewhere."""
    stream = stream or sys.stderr
    if mode == "auto":
        mode = "bar" if stream.isatty() else "plain"
    kinds: dict[str, Callable[[TextIO], Display]] = {
        "bar": _Bar,
        "plain": _Plain,
        "json": _Json,
        "none": _Lines,
    }
    return Lasting(kinds[mode](stream))


class Lasting:
    """Falls silent when nobody can be told any more: a hung-up terminal must not end the job."""

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display

    def update(self, snapshot: Progress) -> None:
        """As `Display.update`."""
        self._try(lambda display: display.update(snapshot))

    def note(self, text: str) -> None:
        """As `Display.note`."""
        self._try(lambda display: display.note(text))

    def close(self) -> None:
        """As `Display.close`."""
        self._try(lambda display: display.close())

    def _try(self, show: Callable[[Display], None]) -> None:
        if self._display is None:
            return
        try:
            show(self._display)
        except (OSError, ValueError):
            self._display = None


@dataclass(frozen=True, slots=True)
class Rates:
    """What a snapshot means: speeds over the last half minute, shares, and the time that is left.

    Args:
        tokens_in, tokens_out: a second.
        cached_share: of the prompt tokens, those found in the prefix cache.
        done_share: of the work, by tokens; None while the number of rows is not known.
        seconds_left: None while it cannot be told.
    """

    tokens_in: float = 0.0
    tokens_out: float = 0.0
    cached_share: float = 0.0
    done_share: float | None = None
    seconds_left: float | None = None


class Meter:
    """Turns snapshots of progress into `Rates`."""

    def __init__(self) -> None:
        self._recent: deque[Progress] = deque()

    def add(self, snapshot: Progress) -> Rates:
        """Take the next snapshot, a copy of it: the supervisor goes on counting in its own.

        Tokens never count down, though those of a worker that has ended may be missing.
        """
        before = self._recent[-1] if self._recent else snapshot
        snapshot = replace(
            snapshot,
            prompt_tokens=max(snapshot.prompt_tokens, before.prompt_tokens),
            cached_tokens=max(snapshot.cached_tokens, before.cached_tokens),
            output_tokens=max(snapshot.output_tokens, before.output_tokens),
        )
        self._recent.append(snapshot)
        while len(self._recent) > 2 and snapshot.seconds - self._recent[1].seconds >= RATE_SECONDS:
            self._recent.popleft()
        first = self._recent[0]
        elapsed = snapshot.seconds - first.seconds
        if elapsed <= 0:
            return Rates(cached_share=_share(snapshot), done_share=_done(snapshot))
        speed = (snapshot.tokens - first.tokens) / elapsed
        return Rates(
            tokens_in=(snapshot.prompt_tokens - first.prompt_tokens) / elapsed,
            tokens_out=(snapshot.output_tokens - first.output_tokens) / elapsed,
            cached_share=_share(snapshot),
            done_share=_done(snapshot),
            seconds_left=_time(snapshot.tokens_left, speed),
        )


def _time(left: float | None, speed: float) -> float | None:
    if left == 0:
        return 0.0
    return left / speed if left is not None and speed > 0 else None


def _share(snapshot: Progress) -> float:
    return snapshot.cached_tokens / snapshot.prompt_tokens if snapshot.prompt_tokens else 0.0


def _done(snapshot: Progress) -> float | None:
    if not snapshot.rows_total:
        return None
    return min((snapshot.rows_done + snapshot.running / 2) / snapshot.rows_total, 1.0)


def describe(snapshot: Progress, rates: Rates) -> str:
    """One line, the same for the bar and the log."""
    total = "?" if snapshot.rows_total is None else f"{snapshot.rows_total:,}"
    parts = [f"{snapshot.rows_done:,}/{total} rows"]
    parts.append(f"{snapshot.ok:,} ok")
    parts.append(f"{snapshot.error:,} failed")
    if snapshot.skipped:
        parts.append(f"{snapshot.skipped:,} skipped")
    parts.append(f"{rates.tokens_in:,.0f} tok/s in, {rates.tokens_out:,.0f} out")
    parts.append(f"{rates.cached_share:.0%} prefix hits")
    parts.append(f"ETA {clock(rates.seconds_left)}")
    return ", ".join(parts)


class Tally:
    """Passes snapshots on, and at the end says what this attempt did and how fast.

    Speeds count from the first moment that a worker could run: loading is told apart.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._last = Progress()

    def update(self, snapshot: Progress) -> None:
        """As `Display.update`."""
        self._last = replace(snapshot)
        self._display.update(snapshot)

    def lines(self) -> list[str]:
        """Sentences for the user; none where nothing ran."""
        last, seconds = self._last, self._last.working_seconds
        rows = last.rows_done - last.rows_before
        if not rows or seconds <= 0:
            return []
        share = last.cached_tokens / last.prompt_tokens if last.prompt_tokens else 0.0
        return [
            f"{counted(rows, 'row')} in {clock(seconds)} after {clock(last.seconds - seconds)} of loading: "
            f"{rows / seconds:.2f} rows/s, "
            f"{last.prompt_tokens / seconds:,.0f} tokens/s in, {last.output_tokens / seconds:,.0f} out; "
            f"{share:.0%} of prompt tokens came from the prefix cache"
        ]


def clock(seconds: float | None) -> str:
    """`1:02:03` or `2:03`; a question mark for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Lines:
    """Only notes; the base of what writes lines."""

    every = float("inf")

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._meter = Meter()
        self._shown: Progress | None = None
        self._last: Progress | None = None

    def update(self, snapshot: Progress) -> None:
        snapshot = replace(snapshot)
        rates = self._meter.add(snapshot)
        self._last = snapshot
        before = self._shown
        if (
            before is None
            or snapshot.state != before.state
            or snapshot.seconds - before.seconds >= self.every
        ):
            self._shown = snapshot
            self._show(snapshot, rates)

    def note(self, text: str) -> None:
        self._write(safe(text))

    def close(self) -> None:
        if self._last is not None and self._last is not self._shown:
            self._shown = self._last
            self._show(self._last, self._meter.add(self._last))

    def _show(self, snapshot: Progress, rates: Rates) -> None:
        """Nothing: progress was not asked for."""

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class _Plain(_Lines):
    every = PLAIN_SECONDS

    def _show(self, snapshot: Progress, rates: Rates) -> None:
        self._write(f"[{clock(snapshot.seconds)}] {safe(snapshot.state)}: {describe(snapshot, rates)}")


class _Json(_Lines):
    every = JSON_SECONDS

    def note(self, text: str) -> None:
        self._write(json.dumps({"note": text}))

    def _show(self, snapshot: Progress, rates: Rates) -> None:
        values = {**asdict(snapshot), **asdict(rates)}
        self._write(json.dumps({key: _rounded(key, value) for key, value in values.items()}, allow_nan=False))


def _rounded(key: str, value: Any) -> Any:
    """Shares to a hundredth of a percent, speeds and seconds to a tenth: more would be noise."""
    if not isinstance(value, float):
        return value
    return round(value, 4 if key in _SHARES else 1)


def _columns(stream: TextIO) -> int:
    """Width of the terminal; 0 where it does not know its own, as under `script`."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


class _Bar:
    """A tqdm bar of a thousand steps; its length is the share of tokens, its text is ours."""

    STEPS = 1000

    def __init__(self, stream: TextIO) -> None:
        from tqdm import tqdm

        self._stream = stream
        self._meter = Meter()
        has_width = _columns(stream) > 0
        self._bar: Any = tqdm(
            total=self.STEPS,
            file=stream,
            dynamic_ncols=has_width,
            ncols=None if has_width else NO_WIDTH_COLUMNS,
            leave=True,
            bar_format="{percentage:3.0f}%|{bar:20}| {desc}",
        )

    def update(self, snapshot: Progress) -> None:
        rates = self._meter.add(snapshot)
        running = snapshot.state == "running"
        # The estimate may take back a little; a bar that does looks broken.
        self._bar.n = max(self._bar.n, round((rates.done_share or 0.0) * self.STEPS))
        text = describe(snapshot, rates)
        self._bar.set_description_str(text if running else f"{safe(snapshot.state)}: {text}", refresh=True)

    def note(self, text: str) -> None:
        self._bar.write(safe(text), file=self._stream)

    def close(self) -> None:
        self._bar.close()
