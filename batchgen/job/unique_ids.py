"""Makes sure, beside a run, that no two rows have one id (`input.duplicate_ids: error`).

`run_job` drives it. A thread with a reader of its own reads ahead, so that a duplicate near the end of a
large input is found within minutes, not after the last answer. Where the run itself reads fast, the thread
takes the ids from there instead of reading everything a second time. The run is complete only when every id
has been looked at; what was read is in the output folder, for a later run to go on from.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from batchgen.data.id_ledger import IdLedger, ReadIds
from batchgen.data.identity import AUTO_COLUMN
from batchgen.data.row import Position, Row
from batchgen.data.source import InputSet
from batchgen.job.files import atomic_write
from batchgen.job.ids import IdReading, goes_beyond, has_ids
from batchgen.job.selection import Selection
from batchgen.types import BatchgenError, UsageError

FAST_ROWS = 2000
"""Rows per second with which the run reads so fast that reading ahead of it gains little.

A run that could read several times as fast still does so beside this thread, which takes its share.
"""
_PACE_SECONDS = 0.5
_POLL_SECONDS = 0.1
_MOST_READ = 256
_WANTED = "ids-wanted"


class UniqueIds:
    """Looks at the ids of a selection.

    Args:
        inputs: read here, by a thread.
        folder: `.batchgen/index`.
        selection: the rows.
        input_end: rows of the whole input; None while nobody knows.
        found: called, from the thread, with the error that ends the run.
    """

    def __init__(
        self,
        inputs: InputSet,
        folder: Path,
        selection: Selection,
        input_end: Callable[[], int | None],
        found: Callable[[BatchgenError], None],
    ) -> None:
        self._inputs = inputs
        self._folder = folder
        self._selection = selection
        self._input_end = input_end
        self._found = found
        self._feed = _Feed()
        self._started = False
        self._run_is_over = False
        self._stop = threading.Event()
        self._error: BatchgenError | Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ids", daemon=True)

    def start_if_needed(self) -> None:
        """Begin, or go on where an earlier run stopped, if rows are known to have ids."""
        if has_ids(self._inputs) or (self._folder / _WANTED).exists():
            self._start()

    def begin(self, ordinal: int) -> None:
        """The run reads on, from this row."""
        if self._started:
            self._feed.begin(ordinal)

    def add(self, rows: Sequence[Row]) -> None:
        """The run has read selected rows."""
        if not self._started:
            first = next((place for place, row in enumerate(rows) if AUTO_COLUMN in row.values), None)
            if first is None:
                return
            self._start()
            rows = rows[first:]
            self._feed.begin(rows[0].ordinal)
        self._feed.add(rows)

    def end(self, position: Position) -> None:
        """The run has read every row before this place, since it began."""
        if self._started:
            self._feed.end(position)

    def finish(self, stop: Callable[[], bool]) -> bool:
        """Wait until every id has been looked at; False if `stop` said to give up.

        Raises:
            UsageError: two rows have one id; names both.
            InputError, StorageError: as reading and writing do.
        """
        self._run_is_over = True
        while self._started and self._thread.is_alive():
            if stop():
                return False
            self._thread.join(_POLL_SECONDS)
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Stop; what was read is kept."""
        self._stop.set()
        if self._started:
            self._thread.join()
        self._inputs.close()

    def _start(self) -> None:
        self._started = True
        # Also for a later run, which does not meet the row with an id again.
        atomic_write(self._folder / _WANTED, b"")
        self._thread.start()

    def _run(self) -> None:
        try:
            ledger = IdLedger(self._folder, self._selection.first, find_twice=True)
            if goes_beyond(ledger, self._selection):
                ledger.clear()
            # What was read before may hold the same id twice, and be found out quickly.
            ledger.merge_all()
            if self._gather(ledger):
                ledger.merge_all()
            if ledger.twice is not None:
                self._error = self._repeated(ledger, *ledger.twice)
                self._found(self._error)
        except BatchgenError as error:
            self._error = error
            self._found(error)
        except Exception as error:
            self._error = error

    def _gather(self, ledger: IdLedger) -> bool:
        """Bring the ledger up to the end of the selection, or to two rows with one id; False if stopped."""
        with closing(IdReading(ledger, self._inputs, self._selection)) as reading:
            while not (reading.complete or reading.position.ordinal == self._input_end()):
                if self._stop.is_set():
                    return False
                self._go_on(reading)
        return True

    def _go_on(self, reading: IdReading) -> None:
        ids, will_come = self._feed.take(reading.ordinal)
        if ids is not None:
            reading.take(ids)
        elif will_come and self._feed.fast() and not self._run_is_over:
            self._stop.wait(_POLL_SECONDS)
        else:
            reading.read()

    def _repeated(self, ledger: IdLedger, first: int, second: int) -> UsageError:
        one, other = (self._row(ledger.nearest(ordinal), ordinal) for ordinal in (first, second))
        return UsageError(
            f"input.id: ids must be distinct, but id {one.id!r} is at {_where(one)} and at {_where(other)} "
            f"(rows {first} and {second}); remove one of them, name another column in input.id, or set "
            "input.duplicate_ids: suffix or keep_first (finished rows are kept)"
        )

    def _row(self, start: Position | None, ordinal: int) -> Row:
        with closing(self._inputs.rows(start)) as rows:  # type: ignore[type-var]
            return next(row for row in rows if row.ordinal == ordinal)


class _Feed:
    """What the run has read, on its way to the thread; only the most recent stretches are kept."""

    def __init__(self) -> None:
        self._stretches: deque[ReadIds] = deque(maxlen=_MOST_READ)
        self._reading: ReadIds | None = None
        self._next: int | None = None
        self._wanted = 0
        self._lock = threading.Lock()
        self._rows = 0
        self._pace = 0.0
        self._measured = (time.monotonic(), 0)

    def begin(self, ordinal: int) -> None:
        self._reading = ReadIds(ordinal)
        self._next = ordinal

    def add(self, rows: Sequence[Row]) -> None:
        # What lies behind the thread, which reads on while the workers load, is of no use to it.
        if self._reading is not None and rows and rows[-1].ordinal >= self._wanted:
            for row in rows:
                self._reading.add(row.id, row.ordinal)

    def end(self, position: Position) -> None:
        read = self._reading
        if read is None:
            return
        read.end = position
        self._reading = None
        self._rows += position.ordinal - read.first
        with self._lock:
            self._stretches.append(read)
            self._next = position.ordinal

    def take(self, ordinal: int) -> tuple[ReadIds | None, bool]:
        """The stretch that holds a row, if it has been read; and whether it can still come."""
        with self._lock:
            self._wanted = ordinal
            while self._stretches:
                if self._stretches[0].first > ordinal:
                    return None, False
                read = self._stretches.popleft()
                if read.end.ordinal > ordinal:
                    return read, True
            return None, self._next is None or self._next <= ordinal

    def fast(self) -> bool:
        """Whether the run has lately read so many rows that nobody need read ahead of it."""
        (since, rows), now = self._measured, time.monotonic()
        if now - since >= _PACE_SECONDS:
            self._pace = (self._rows - rows) / (now - since)
            self._measured = now, self._rows
        return self._pace >= FAST_ROWS


def _where(row: Row) -> str:
    """File and line, or row of the input, for messages."""
    return f"{row.file} line {row.line}" if row.line else f"{row.file} row {row.ordinal}"
