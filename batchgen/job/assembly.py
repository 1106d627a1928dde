"""Puts a whole part together: results from the journal, the user's columns from the rows as they were read.

Rows that took too much memory to be kept are read once more. Runs in a thread beside the supervisor's loop,
with a reader of the input of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from batchgen.data.row import PartIndexer, Row
from batchgen.data.row_result import RowResult
from batchgen.data.sink import Record
from batchgen.data.source import InputSet
from batchgen.job.changes import Runs, add_row, number_of, of_epoch
from batchgen.job.files import is_full
from batchgen.job.index import changed_input
from batchgen.job.journal import JournalReader, Location, SegmentName, unpack_result
from batchgen.job.parts import PartCommit
from batchgen.job.window import OpenPart
from batchgen.types import InputError, StorageError

if TYPE_CHECKING:
    from batchgen.job.recovery import OpenJob

BATCH_ROWS = 500
BATCH_BYTES = 2 * 1024 * 1024


class Assembler:
    """Writes whole parts, one at a time.

    Args:
        job: whose parts they are.
    """

    def __init__(self, job: OpenJob) -> None:
        self._job = job
        self._reader = JournalReader(job.folder.journal, job.manifest.job_id)
        self._inputs: InputSet | None = None
        self._decisions = None if job.decisions is None else job.decisions.another()

    def write(self, part: OpenPart) -> PartCommit:
        """Commit a whole part; after a disk error written again, once, to another file.

        Raises:
            InputError: the input is not what it was when the rows ran.
            StorageError: the part cannot be written, or a journal record is damaged.
            OwnershipError: another process has taken over.
        """
        job = self._job
        if not part.done:
            return job.parts.commit_empty(part.part, part.span)
        try:
            commit = self._commit(part)
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or is_full(error.__cause__):
                raise
            commit = self._commit(part)
        job.replaced.pop(part.part, None)
        return commit

    def _commit(self, part: OpenPart) -> PartCommit:
        job = self._job
        replaced = job.replaced.get(part.part)
        settings: Runs = []
        return job.parts.commit(
            part.part,
            self._records(part, settings),
            job.plan,
            job.manifest.compression,
            job.still_owner,
            sum(done.length for done in part.done.values() if isinstance(done, Location)),
            change=0 if replaced is None else replaced.change,
            settings=settings,
            span=part.span,
            duplicate_ids=job.manifest.duplicate_ids,
        )

    def close(self) -> None:
        """Close files."""
        self._reader.close()
        if self._inputs is not None:
            self._inputs.close()

    def _records(self, part: OpenPart, settings: Runs) -> Iterator[Record]:
        rows = self._read_again(part) if part.rows is None else part.rows
        for batch in _batches(rows, part):
            self._note_changes(settings, part, batch)
            yield from zip(batch, self._results(part, batch), strict=True)

    def _read_again(self, part: OpenPart) -> Iterator[Row]:
        """The selected rows of a part from the input."""
        entry = part.entry
        if entry is None:
            raise ValueError(f"part {part.part} has not been read to its end")
        indexer = PartIndexer(part.part, entry.start)
        rows = self._open_inputs().rows(entry.start)
        try:
            for row in islice(rows, entry.rows):
                indexer.add(row)
                if self._decisions is not None:
                    self._decisions.apply(row)
                if row.ordinal in part.done:
                    yield row
        finally:
            # Parks the reader, so that the next part goes on where this one ended.
            getattr(rows, "close", lambda: None)()
        if indexer.entry() != entry:
            raise self._changed(part)

    def _results(self, part: OpenPart, rows: list[Row]) -> list[RowResult]:
        done = [part.done.get(row.ordinal) for row in rows]
        located = [(row.ordinal, at) for row, at in zip(rows, done, strict=True) if type(at) is Location]
        payloads = iter(self._reader.results(located))
        results = []
        for row, known in zip(rows, done, strict=True):
            if type(known) is Location:
                digest, *values = unpack_result(next(payloads))
                if digest != row.digest:
                    raise self._changed(part)
                results.append(RowResult.of(*values))
            elif type(known) is RowResult:
                results.append(known)
            elif row.error is not None:
                results.append(RowResult.from_error(row.error))
            else:
                raise self._changed(part)
        return results

    def _note_changes(self, settings: Runs, part: OpenPart, rows: list[Row]) -> None:
        """Which rows were computed under a change of the job; mostly it never had any."""
        if self._job.manifest.epochs or part.part in self._job.replaced:
            for row in rows:
                add_row(settings, row.ordinal, self._change(part, row.ordinal))

    def _change(self, part: OpenPart, row: int) -> int:
        """Under which change of the job a row was computed."""
        match part.done.get(row):
            case Location(segment=segment):
                name = SegmentName.parse(segment)
                return 0 if name is None else of_epoch(self._job.manifest.epochs, name.epoch)
            case RowResult():
                replaced = self._job.replaced.get(part.part)
                return 0 if replaced is None else number_of(replaced.commit.settings, row)
            case _:
                return 0

    def _changed(self, part: OpenPart) -> InputError:
        start = part.indexer.start
        path = self._job.inputs.files[min(start.file_index, len(self._job.inputs.files) - 1)].path
        return changed_input(start.ordinal, part.indexer.rows, path)

    def _open_inputs(self) -> InputSet:
        if self._inputs is None:
            self._inputs = InputSet(self._job.inputs.files, self._job.inputs.options)
        return self._inputs


def _batches(rows: Iterable[Row], part: OpenPart) -> Iterator[list[Row]]:
    """Rows in lists that are small in memory together with their results."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        done = part.done.get(row.ordinal)
        size += row.size + (done.length if type(done) is Location else 0)
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
