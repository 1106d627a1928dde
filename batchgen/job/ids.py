"""The pass over the ids of the selected rows: ahead of the run where it decides what the ids become, beside
it where ids that occur twice end it. `run_job` and recovery drive it; its ledger is in the output folder.

Beside the run it is a thread with a reader of its own, so that a duplicate near the end of a large input is
found within minutes, not after the last answer; the run is complete only when the pass is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal, Protocol

from batchgen.data.id_decisions import IdDecisions, decide
from batchgen.data.id_ledger import HELD_ROWS, IdLedger
from batchgen.data.identity import AUTO_COLUMN
from batchgen.data.row import Position, Row
from batchgen.data.source import InputSet
from batchgen.job.files import atomic_write, storage
from batchgen.job.selection import Selection
from batchgen.types import BatchgenError, UsageError

DuplicatePolicy = Literal["error", "suffix", "keep_first"]

_ROWS_AT_ONCE = 1000
_POLL_SECONDS = 0.2
_WANTED = "ids-wanted"


class Interrupted(Exception):
    """The pass was asked to stop, and why; it goes on from there the next time."""


class Stops(Protocol):
    """Whether something has asked to stop, and why; `reason` raises what is an error."""

    def __call__(self) -> bool: ...
    def reason(self) -> str: ...


def has_ids(inputs: InputSet) -> bool | None:
    """Whether rows have ids of their own; None for JSON rows of which none of the first has."""
    if inputs.options.id_column is not None or AUTO_COLUMN in inputs.columns():
        return True
    return False if inputs.has_header() else None


def decide_ids(
    inputs: InputSet,
    folder: Path,
    policy: Literal["suffix", "keep_first"],
    selection: Selection,
    stops: Stops,
) -> IdDecisions | None:
    """Read all ids of the selection, and of the rows before it, and decide about those that occur twice.

    Args:
        inputs: the input; read here.
        folder: `.batchgen/index`.
        policy: what to do with them.
        selection: the rows; whatever they are, an id depends on the rows before it alone.
        stops: whether to give up.

    Returns:
        What becomes of the rows; None where no two can have the same id.

    Raises:
        Interrupted: `stops` said so; what was read is kept.
        InputError, StorageError: as reading and writing do.
    """
    if has_ids(inputs) is False:
        return None
    ledger = IdLedger(folder, 0, find_twice=False)
    if not _read_ids(inputs, ledger, selection, stops):
        raise Interrupted(stops.reason())
    ledger.merge_all()
    return decide(ledger, policy, folder)


def _read_ids(inputs: InputSet, ledger: IdLedger, selection: Selection, stop: Callable[[], bool]) -> bool:
    """Bring the ledger up to the end of the selection, or to two rows that share an id; False if stopped."""
    position = ledger.position or Position()
    rows = ledger.rows_from(selection.first)
    with closing(inputs.rows(ledger.position)) as reader:  # type: ignore[type-var]
        while ledger.twice is None:
            if _holds(selection, position.ordinal, rows):
                break
            row = next(reader, None)
            if row is None:
                break
            position = row.next_position
            if row.selected and row.ordinal >= ledger.start:
                ledger.add(row.id, row.ordinal)
                rows += row.ordinal >= selection.first
            if ledger.held >= HELD_ROWS:
                ledger.flush(position)
            if not position.ordinal % _ROWS_AT_ONCE and stop():
                ledger.flush(position)
                return False
    ledger.flush(position)
    return True


def _holds(selection: Selection, ordinal: int, rows: int) -> bool:
    """Whether a selection ends before a row, or with so many."""
    past_end = selection.stop is not None and ordinal >= selection.stop
    return past_end or (selection.limit is not None and rows >= selection.limit)


def _goes_beyond(ledger: IdLedger, selection: Selection) -> bool:
    """Whether a ledger, of a selection that was larger, knows ids of rows that are not selected now."""
    past_end = selection.stop is not None and ledger.end > selection.stop
    return past_end or (selection.limit is not None and ledger.rows > selection.limit)


def forget_ids(folder: Path) -> None:
    """Remove what is known of the ids of an input that has changed. Raises StorageError."""
    with storage(folder, action="removed"):
        for path in (*folder.glob("ids-*-*"), *folder.glob("decided-*")):
            path.unlink(missing_ok=True)


class UniqueIds:
    """Makes sure, beside a run, that no two rows have one id.

    Args:
        inputs: read here, by a thread.
        folder: `.batchgen/index`.
        selection: the rows.
        found: called, from the thread, with the error that ends the run.
    """

    def __init__(
        self, inputs: InputSet, folder: Path, selection: Selection, found: Callable[[BatchgenError], None]
    ) -> None:
        self._inputs = inputs
        self._folder = folder
        self._selection = selection
        self._found = found
        self._started = False
        self._stop = threading.Event()
        self._error: BatchgenError | Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ids", daemon=True)

    def start_if_needed(self) -> None:
        """Begin, or go on where an earlier run stopped, if rows are known to have ids."""
        if has_ids(self._inputs) or (self._folder / _WANTED).exists():
            self.start()

    def start(self) -> None:
        """Begin, because a row with an id was met; again does nothing."""
        if not self._started:
            self._started = True
            # Also for a later run, which does not meet that row again.
            atomic_write(self._folder / _WANTED, b"")
            self._thread.start()

    def finish(self, stop: Callable[[], bool]) -> bool:
        """Wait until every id has been looked at; False if `stop` said to give up.

        Raises:
            UsageError: two rows have one id; names both.
            InputError, StorageError: as reading and writing do.
        """
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

    def _run(self) -> None:
        try:
            ledger = IdLedger(self._folder, self._selection.first, find_twice=True)
            if _goes_beyond(ledger, self._selection):
                ledger.clear()
            # What was read before may hold the same id twice, and be found out quickly.
            ledger.merge_all()
            if ledger.twice is None and _read_ids(self._inputs, ledger, self._selection, self._stop.is_set):
                ledger.merge_all()
            if ledger.twice is not None:
                self._error = self._repeated(ledger, *ledger.twice)
                self._found(self._error)
        except BatchgenError as error:
            self._error = error
            self._found(error)
        except Exception as error:
            self._error = error

    def _repeated(self, ledger: IdLedger, first: int, second: int) -> UsageError:
        one, other = (self._row(ledger.nearest(ordinal), ordinal) for ordinal in (first, second))
        return UsageError(
            f"input.id: ids must be distinct, but id {one.id!r} is at {where(one)} and at {where(other)} "
            f"(rows {first} and {second}); remove one of them, name another column in input.id, or set "
            "input.duplicate_ids: suffix or keep_first (finished rows are kept)"
        )

    def _row(self, start: Position | None, ordinal: int) -> Row:
        with closing(self._inputs.rows(start)) as rows:  # type: ignore[type-var]
            return next(row for row in rows if row.ordinal == ordinal)


def where(row: Row) -> str:
    """File and line, or row of the input, for messages."""
    return f"{row.file} line {row.line}" if row.line else f"{row.file} row {row.ordinal}"
