"""Reading the ids of the selected rows into a ledger in the output folder.

Recovery reads all of them ahead of the run where they decide what becomes of rows; `unique_ids` reads them
beside it where ids that occur twice end it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

from batchgen.data.id_decisions import IdDecisions, decide
from batchgen.data.id_ledger import HELD_ROWS, IdLedger, ReadIds
from batchgen.data.identity import AUTO_COLUMN
from batchgen.data.row import Position, Row
from batchgen.data.source import InputSet
from batchgen.job.files import storage
from batchgen.job.selection import Selection

DuplicatePolicy = Literal["error", "suffix", "keep_first"]

# Between two looks at whether to stop.
_ROWS_AT_ONCE = 1000


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
    with closing(IdReading(ledger, inputs, selection)) as reading:
        while not reading.complete:
            if stops():
                raise Interrupted(stops.reason())
            reading.read()
    ledger.merge_all()
    return decide(ledger, policy, folder)


class IdReading:
    """Fills a ledger with the ids of a selection, in order: from the input, or with what others have read.

    Args:
        ledger: gets the ids; goes on where it ends.
        inputs: the input.
        selection: the rows.

    Attributes:
        position: where the first row begins that was not looked at.
        complete: whether the selection has been read to its end, or an id was found twice.
    """

    def __init__(self, ledger: IdLedger, inputs: InputSet, selection: Selection) -> None:
        self._ledger = ledger
        self._inputs = inputs
        self._selection = selection
        self._reader: Iterator[Row] | None = None
        self._rows = ledger.rows_from(selection.first)
        self.position = ledger.position or Position()
        self.complete = ledger.twice is not None or self._holds()

    @property
    def ordinal(self) -> int:
        """Of the first row that was not looked at."""
        return max(self.position.ordinal, self._ledger.start)

    def read(self) -> None:
        """Read some rows. Raises InputError, StorageError."""
        if self._reader is None:
            self._reader = self._inputs.rows(self.position)
        ledger, first, before = self._ledger, self._selection.first, self.position.ordinal
        for row in islice(self._reader, _ROWS_AT_ONCE):
            self.position = row.next_position
            if row.selected and row.ordinal >= ledger.start:
                ledger.add(row.id, row.ordinal)
                self._rows += row.ordinal >= first
            if self._holds():
                break
        else:
            # A reader that has ended yields nothing more.
            self.complete = self.position.ordinal - before < _ROWS_AT_ONCE
        self._moved()

    def take(self, ids: ReadIds) -> None:
        """Take what others have read, of a stretch that holds the row `ordinal`. Raises StorageError."""
        new = ids.behind(self.ordinal)
        self._ledger.add_read(new)
        self._rows += len(new.behind(self._selection.first).ordinals)
        self._close_reader()
        self.position = ids.end
        self._moved()

    def close(self) -> None:
        """Put everything on disk. Raises StorageError."""
        self._close_reader()
        self._ledger.flush(self.position)

    def _moved(self) -> None:
        if self._ledger.held >= HELD_ROWS:
            self._ledger.flush(self.position)
        self.complete = self.complete or self._ledger.twice is not None or self._holds()

    def _holds(self) -> bool:
        """Whether the selection ends here."""
        stop, limit = self._selection.stop, self._selection.limit
        past_end = stop is not None and self.position.ordinal >= stop
        return past_end or (limit is not None and self._rows >= limit)

    def _close_reader(self) -> None:
        # Only a generator has something to close; an `InputSet` parks its reader then.
        getattr(self._reader, "close", lambda: None)()
        self._reader = None


def goes_beyond(ledger: IdLedger, selection: Selection) -> bool:
    """Whether a ledger, of a selection that was larger, knows ids of rows that are not selected now."""
    past_end = selection.stop is not None and ledger.end > selection.stop
    return past_end or (selection.limit is not None and ledger.rows > selection.limit)


def forget_ids(folder: Path) -> None:
    """Remove what is known of the ids of an input that has changed. Raises StorageError."""
    with storage(folder, action="removed"):
        for path in (*folder.glob("ids-*-*"), *folder.glob("decided-*")):
            path.unlink(missing_ok=True)
