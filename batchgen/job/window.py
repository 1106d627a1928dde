"""The open window: which rows may run now. Reads the input in order, at most a few parts ahead of the oldest
part that is not finished, so that the journal and the memory stay small whatever the number of rows.

The supervisor takes rows from here, reports what is safely in the journal, and gets the parts that are whole.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from batchgen.data.id_decisions import IdDecisions
from batchgen.data.prompt_values import pack_prompt_values
from batchgen.data.row import PartIndexEntry, PartIndexer, Position, Row
from batchgen.data.row_result import RowResult
from batchgen.data.source import InputSet
from batchgen.grammar import counted
from batchgen.job.index import InputIndex, changed_input
from batchgen.job.journal import Location
from batchgen.job.parts import Counts, PartCommit
from batchgen.job.replacement import KeptRows, Replaced
from batchgen.job.replay import FoundPartial, FoundResult, Replay
from batchgen.job.row_order import ORDERS, OrderKey
from batchgen.job.selection import Selection
from batchgen.job.unique_ids import UniqueIds
from batchgen.types import DriftError, InputError, Status

_ROW_BYTES = 500
KEPT_BYTES = 16 * 1024 * 1024
"""Of rows of the input, as they lie there, that stay in memory until their part is put together."""
# Rows that are passed over in one go on the way to the first that is selected.
_PASSED_AT_ONCE = 5000
# That are read in one go; fewer where they are large, so that they do not add to what is in flight.
_ROWS_AT_ONCE = 100
_BYTES_AT_ONCE = 256 * 1024
# Each holds the results that stay, about a megabyte.
MOST_REPLACED_PARTS = 32


@dataclass(slots=True)
class Pending:
    """A row that must run.

    Args:
        values: of the columns that the prompt needs, packed.
        digest: of the input record.
        partial: output token ids that are known already, of each sample; none of a new row.
        key: by what rows are ordered.
        priority: higher runs first.
        size: bytes that it takes, roughly.
    """

    row: int
    values: bytes
    digest: bytes
    partial: list[array[int]] = field(default_factory=list)
    key: Any = None
    priority: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = _ROW_BYTES + len(self.values)
        if self.partial:
            self.size += 4 * sum(map(len, self.partial))


@dataclass(slots=True)
class OpenPart:
    """A part of which rows run or wait.

    Args:
        part: its number.
        indexer: digests of the rows that were read.
        first, stop: ordinals of the first row that may be selected, and after the last.
        known: what an earlier reading found.
        selected: how many of the rows that were read are selected.
        done: selected row to where its result lies, or the result itself where it stays from the part that
            this one replaces; None for a row that could not be read and needs no result.
        entry: set when all of its rows have been read.
        notes: what was repaired while reading: rows, and the first of them.
        kept: rows of the part that this one replaces.
        unanswered: rows that must run and have no result, on disk or not.
        rows: the selected rows as they were read, in order; None where they take too much memory, so that
            they have to be read once more.
        rows_bytes: that `rows` takes, roughly.
    """

    part: int
    indexer: PartIndexer
    first: int
    stop: int
    known: PartIndexEntry | None = None
    selected: int = 0
    done: dict[int, Location | RowResult | None] = field(default_factory=dict)
    entry: PartIndexEntry | None = None
    notes: dict[str, list[int]] = field(default_factory=dict)
    kept: KeptRows | None = None
    unanswered: int = 0
    rows: list[Row] | None = field(default_factory=list)
    rows_bytes: int = 0

    @property
    def whole(self) -> bool:
        """Whether every selected row is done."""
        return self.entry is not None and len(self.done) == self.selected

    @property
    def span(self) -> tuple[int, int]:
        """The ordinals for which it was decided which rows are selected."""
        stop = self.indexer.start.ordinal + self.indexer.rows
        return min(self.first, stop), stop


class Window:
    """Rows in input order, from the oldest part that is not committed.

    Args:
        inputs: the input; this window is its only reader.
        index: where parts begin; gets an entry for each part that is read.
        part_rows: rows in one part.
        selection: which rows.
        columns: that the prompt needs.
        order: how rows are ordered.
        priority: column of the rows' priority, if there is one; a value that is no integer counts as 0.
        committed: parts that are final, by number; looked at again as it grows.
        replaced: committed parts that are assembled again.
        found: what the journal says of other rows.
        parts: most parts that are open at a time.
        counts: gets the rows that need to run no more.
        decisions: what becomes of rows whose id an earlier one has; None for nothing.
        ids: told of what is read here; None if nobody wants to know.
        on_done: called once, with a row that an earlier run has answered and how many tokens that took.
        on_bad_row: called with each row that could not be read; may raise InputError.
        on_notes: called with each part in which something was repaired while reading, once it is read: its
            number, and by note how many rows and the first of them.

    Attributes:
        parts: most parts that are open at a time.
        selected: selected rows among those that were read or lie in committed parts passed over.
        exhausted: whether the selection has been read to its end.
        busy: whether `take` came back only so that others get their turn.
    """

    def __init__(
        self,
        inputs: InputSet,
        index: InputIndex,
        *,
        part_rows: int,
        selection: Selection,
        columns: Iterable[str],
        order: OrderKey = ORDERS["input"],
        priority: str | None = None,
        committed: Mapping[int, PartCommit],
        replaced: Mapping[int, Replaced],
        found: Replay,
        parts: int,
        counts: Counts,
        decisions: IdDecisions | None,
        ids: UniqueIds | None,
        on_done: Callable[[Pending, int], None],
        on_bad_row: Callable[[Row], None],
        on_notes: Callable[[int, Mapping[str, list[int]]], None],
    ) -> None:
        self._inputs = inputs
        self._index = index
        self._part_rows = part_rows
        self._selection = selection
        self._columns = tuple(columns)
        self._order = order
        self._priority = priority
        self._committed = committed
        self._replaced = replaced
        self._results: dict[int, FoundResult] = found.results
        self._partials: dict[int, FoundPartial] = found.partials
        self.parts = parts
        self._counts = counts
        self._decisions = decisions
        self._ids = ids
        self._on_done: Callable[[Pending, int], None] | None = on_done
        self._on_bad_row = on_bad_row
        self._on_notes = on_notes
        self._open: dict[int, OpenPart] = {}
        self._reading: OpenPart | None = None
        self._next_part = selection.first // part_rows
        self._position = Position()
        self._rows: Iterator[Row] | None = None
        self._kept_bytes = 0
        self.selected = 0
        self.exhausted = False
        self.busy = False

    @property
    def num_open(self) -> int:
        """Parts that are open."""
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether no row can be read before a part is committed."""
        return not self.exhausted and self._reading is None and self._full()

    @property
    def awaits_commit(self) -> bool:
        """Whether a part is held up by nothing but results that are not on disk yet."""
        return any(
            part.entry is not None and not part.unanswered and not part.whole for part in self._open.values()
        )

    def take(self) -> list[Pending]:
        """The next rows that must run, a few at a time; none while the window is full, and at the end.

        Raises:
            InputError: the input is cut or has changed, or a row is bad and `on_bad_row` says stop.
            DriftError: the selection ends before what the folder holds.
        """
        self.busy = False
        while self._reading is not None or self._open_next():
            pending = self._read_some()
            if pending:
                return pending
        return []

    def answered(self, rows: Iterable[int]) -> None:
        """Note that rows have results, which are not on disk yet; once for each."""
        for part, count in Counter(row // self._part_rows for row in rows).items():
            self._open[part].unanswered -= count

    def finish(self, results: Iterable[tuple[int, Location]]) -> None:
        """Note that results of rows are on disk; twice is harmless."""
        for row, location in results:
            part = self._open.get(row // self._part_rows)
            if part is not None:
                part.done.setdefault(row, location)

    def whole_parts(self) -> list[OpenPart]:
        """Parts of which every row is done, oldest first."""
        return [part for part in self._open.values() if part.whole]

    def close_part(self, part: int) -> None:
        """Forget a part that was committed; the window moves on."""
        self._kept_bytes -= self._open.pop(part).rows_bytes

    def close(self) -> None:
        """Hand the reader back to the input."""
        # Only a generator has something to close; an `InputSet` parks its reader then.
        getattr(self._rows, "close", lambda: None)()
        self._rows = None
        if self._reading is not None and self._reading.kept is not None:
            self._reading.kept.close()

    def _open_next(self) -> bool:
        if self.exhausted:
            return False
        self._pass_committed()
        first = self._next_part * self._part_rows
        if self._limit_reached() or any(
            self._beyond(end, first) for end in (self._selection.stop, self._index.end)
        ):
            self._end()
            return False
        if self._full() or not self._go_to(first):
            return False
        span = self._selection.span(self._next_part, self._part_rows)
        replaced = self._replaced.get(self._next_part)
        kept = None if replaced is None else replaced.kept()
        indexer = PartIndexer(self._next_part, self._position)
        self._reading = OpenPart(
            self._next_part, indexer, *span, known=self._index.get(self._next_part), kept=kept
        )
        self._open[self._next_part] = self._reading
        self._next_part += 1
        if self._ids is not None:
            self._ids.begin(self._position.ordinal)
        return True

    def _pass_committed(self) -> None:
        while (commit := self._committed.get(self._next_part)) is not None:
            self.selected += commit.rows
            self._next_part += 1
        if self._selection.limit is not None and self.selected > self._selection.limit:
            raise self._too_small()

    def _limit_reached(self) -> bool:
        return self._selection.limit is not None and self.selected >= self._selection.limit

    def _end(self) -> None:
        """The selection has been read to its end."""
        if self._limit_reached():
            # Parts are committed by another thread meanwhile.
            beyond = [part for part in list(self._committed) if part >= self._next_part]
            if any(self._committed[part].rows for part in beyond):
                raise self._too_small()
        self.exhausted = True

    def _too_small(self) -> DriftError:
        return DriftError(
            "input.limit: the output folder holds results of rows beyond the first "
            f"{self._selection.limit:,} that are selected; set input.limit to what it was, choose another "
            "output.path, or start over with --overwrite"
        )

    def _full(self) -> bool:
        """Whether enough parts are open. Of one that is replaced few rows run, so more of them may be."""
        ordinary = sum(part.part not in self._replaced for part in self._open.values())
        return ordinary >= self.parts or len(self._open) >= max(self.parts, MOST_REPLACED_PARTS)

    @staticmethod
    def _beyond(end: int | None, first: int) -> bool:
        return end is not None and first >= end

    def _go_to(self, first: int) -> bool:
        """Read on from the row `first`, over committed parts if need be; False if it is not there yet."""
        start = self._index.nearest_start(first // self._part_rows)
        can_go_on = self._rows is not None and self._position.ordinal <= first
        if not can_go_on or start.ordinal > self._position.ordinal:
            self._restart(start)
        stop = min(first, self._position.ordinal + _PASSED_AT_ONCE)
        while self._position.ordinal < stop:
            if self._next_row() is None:
                self._end_before(first)
                return False
        self.busy = stop < first
        return not self.busy

    def _end_before(self, first: int) -> None:
        """The input ends before the row `first`, which may be where the selection would begin."""
        ordinal = self._position.ordinal
        if self._index.rows_seen > ordinal:
            raise changed_input(ordinal, self._index.rows_seen - ordinal, self._input_name())
        self._index.record_end(ordinal)
        self._end()

    def _restart(self, position: Position) -> None:
        self.close()
        self._position = position
        self._rows = self._inputs.rows(position)

    def _next_row(self) -> Row | None:
        row = next(self._rows or iter(()), None)
        if row is not None:
            self._position = row.next_position
        return row

    def _read_some(self) -> list[Pending]:
        """Read on in the part that is being read; the rows of it that must run."""
        part = self._reading
        if part is None:
            return []
        rows = self._next_rows(part)
        if not rows:
            self._end_of_input(part)
            return []
        self._position = rows[-1].next_position
        part.indexer.add_all(rows)
        if part.known is not None:
            self._check(part)
        if part.rows is not None:
            self._take_room(part, rows)
        selected = [row for row in rows if row.selected and row.ordinal >= part.first]
        pending = self._place(part, selected)
        if part.rows is not None:
            part.rows += selected
        if self._position.ordinal == part.stop or self._limit_reached():
            self._close_reading(part)
        return pending

    def _next_rows(self, part: OpenPart) -> list[Row]:
        """A few rows, none of them beyond what the part, its first reading or the limit ends with."""
        most = min(_ROWS_AT_ONCE, part.stop - self._position.ordinal)
        if self._selection.limit is not None:
            most = min(most, self._selection.limit - self.selected)
        if part.known is not None and part.known.rows > part.indexer.rows:
            most = min(most, part.known.rows - part.indexer.rows)
        rows: list[Row] = []
        size = 0
        for row in islice(self._rows or (), most):
            rows.append(row)
            size += row.size
            if size >= _BYTES_AT_ONCE:
                break
        return rows

    def _check(self, part: OpenPart) -> None:
        """Compare with the first reading as soon as as many rows have passed."""
        if part.known is not None and part.known.rows == part.indexer.rows:
            self._index.check(part.indexer.entry(), self._input_name())

    def _take_room(self, part: OpenPart, rows: Sequence[Row]) -> None:
        """Account for rows that may stay in memory; those that `where` drops too: batches stay whole."""
        size = _ROW_BYTES * len(rows) + sum([row.size for row in rows])
        part.rows_bytes += size
        self._kept_bytes += size
        if self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= part.rows_bytes
            part.rows, part.rows_bytes = None, 0

    def _place(self, part: OpenPart, rows: Sequence[Row]) -> list[Pending]:
        """Take selected rows into a part; those that must run."""
        part.selected += len(rows)
        self.selected += len(rows)
        if self._ids is not None:
            self._ids.add(rows)
        if self._decisions is not None:
            for row in rows:
                self._decisions.apply(row)
        pending = [waiting for row in rows if (waiting := self._pending(part, row)) is not None]
        part.unanswered += len(pending)
        return pending

    def _pending(self, part: OpenPart, row: Row) -> Pending | None:
        """A row as one that must run; None where it is done."""
        for note in row.notes:
            part.notes.setdefault(note, [0, row.ordinal])[0] += 1
        if row.skipped:
            part.done[row.ordinal] = RowResult(Status.SKIPPED.value)
            self._counts.count(Status.SKIPPED.value, None)
            return None
        if row.error is not None:
            part.done[row.ordinal] = None
            self._counts.count("error", None)
            self._on_bad_row(row)
            return None
        result = self._results.pop(row.ordinal, None)
        partial = self._partials.pop(row.ordinal, None)
        stays = None if part.kept is None else part.kept.result(row.ordinal)
        if stays is not None:
            part.done[row.ordinal] = stays
            self._count(row, stays.status, stays.usage)
            return None
        if result is not None and result.digest == row.digest:
            part.done[row.ordinal] = result.location
            self._count(row, result.status, result.usage)
            return None
        packed = pack_prompt_values(row, self._columns)
        key = self._order(row.ordinal, map(row.values.get, self._columns), len(packed))
        known = partial.samples if partial is not None and partial.digest == row.digest else []
        return Pending(row.ordinal, packed, row.digest, known, key, self._priority_of(row))

    def _count(self, row: Row, status: str, usage: Sequence[int] | None) -> None:
        """Count a row that has its result from an earlier run."""
        self._counts.count(status, usage)
        if self._on_done is not None and status == Status.OK:
            self._on_done(
                Pending(row.ordinal, pack_prompt_values(row, self._columns), row.digest),
                usage[1] if usage else 0,
            )
            self._on_done = None

    def _priority_of(self, row: Row) -> int:
        value = 0 if self._priority is None else row.values.get(self._priority)
        return value if type(value) is int else 0

    def _close_reading(self, part: OpenPart) -> None:
        part.entry = part.indexer.entry()
        if part.kept is not None:
            part.kept.close()
        self._index.record(part.entry, self._position)
        if self._ids is not None:
            self._ids.end(self._position)
        if part.notes:
            self._on_notes(part.part, part.notes)
        self._reading = None

    def _end_of_input(self, part: OpenPart) -> None:
        known = self._index.get(part.part)
        end = self._position.ordinal
        if known is not None and known.rows > part.indexer.rows:
            raise changed_input(known.start.ordinal, known.rows, self._input_name())
        if self._index.end not in (None, end):
            raise InputError(
                f"{self._input_name()}: ends after {counted(end, 'row')}, and had {self._index.end} when "
                "this job first "
                "read it; restore the input, or start over with --overwrite"
            )
        if part.indexer.rows:
            self._close_reading(part)
        else:
            del self._open[part.part]
            self._reading = None
        self._index.record_end(end)
        self._end()

    def _input_name(self) -> str:
        return self._inputs.files[self._position.file_index % len(self._inputs.files)].path
