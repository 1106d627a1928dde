"""Rows of one text file of any format. `InputSet` drives it; each format brings its records and its decoder.

Records are cut out of the (decompressed) text by a `RecordSource`, made into values by a `Decode` function;
what every format has in common (positions, error rows, cut files) is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from batchgen.data.byte_stream import ByteStream, TruncatedStream
from batchgen.data.exact_json import Decoded
from batchgen.data.identity import RowIdentity
from batchgen.data.input_file import InputFile
from batchgen.data.row import Position, Row
from batchgen.types import InputError, RowError, RowFailure

BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Record:
    """The bytes of one record.

    Args:
        data: without what separates it from the next; None where `failure` says why.
        size: its bytes.
        digest: of what the row is made of.
        line: physical line on which it begins, from 1.
        notes: what was repaired around it, as `Row.notes`.
        failure: why it has no data.
    """

    data: bytes | None
    size: int
    digest: bytes
    line: int
    notes: tuple[str, ...] = ()
    failure: RowFailure | None = None


class RecordSource(Protocol):
    """Cuts a text into records, forward.

    Attributes:
        offset: bytes of text before the next record; a seek to it goes on there.
        line: physical lines before that place.
    """

    @property
    def offset(self) -> int: ...

    @property
    def line(self) -> int: ...

    def seek(self, offset: int, line: int) -> None:
        """Goes forward to a place that `offset` and `line` had after some record."""

    def next(self) -> Record | None:
        """The next record, or None at the end. Raises TruncatedStream, InputError."""


class RefusedRecord(RowFailure):
    """A record that can be read and not be used; its row keeps its id.

    Args:
        failure: why.
        row_id: of the record.
    """

    def __init__(self, failure: RowFailure, row_id: str) -> None:
        super().__init__(failure.error.error_class, failure.error.message)
        self.row_id = row_id


Decode = Callable[[Record], Decoded]
"""From a record that has data to its values. Raises RowFailure, whose message names no line."""


class TextReader:
    """Reads forward from any position at or after where it is.

    Args:
        file: what to read.
        identity: makes the row's id.
        stream: of the file; closed with the reader.
        records: over `stream`.
        decode: of the format.
        keep_truncated: a cut file ends there instead of raising.
        note: called with a sentence about the file, for the report.

    Attributes:
        position: where the next record begins.
    """

    def __init__(
        self,
        file: InputFile,
        identity: RowIdentity,
        *,
        stream: ByteStream,
        records: RecordSource,
        decode: Decode,
        keep_truncated: bool,
        note: Callable[[str], None],
    ) -> None:
        self.position = Position(file.index)
        self._file = file
        self._identity = identity
        self._stream = stream
        self._records = records
        self._decode = decode
        self._keep_truncated = keep_truncated
        self._note = note

    def seek(self, position: Position) -> None:
        """Goes forward to `position`, which an earlier read of the same content returned."""
        if position.offset:
            self._records.seek(position.offset, position.line)
        self.position = position

    def read(self) -> Row | None:
        """The next row, or None at the end of the file. Raises InputError for a cut or corrupt file."""
        try:
            record = self._records.next()
        except TruncatedStream as e:
            self._truncated(e)
            return None
        return None if record is None else self._row(record)

    def close(self) -> None:
        self._stream.close()

    def _truncated(self, error: TruncatedStream) -> None:
        records = self._records
        where = f"{self._file.path}: {error} (after line {records.line}, byte {records.offset} of the text)"
        if not self._keep_truncated:
            raise InputError(
                f"{where}; restore the file, or set input.on_truncated: keep to use the rows before it"
            ) from None
        self._note(f"{where}; the rows before it were kept")

    def _row(self, record: Record) -> Row:
        ordinal, file = self.position.ordinal, self._file
        self.position = Position(file.index, self._records.offset, self._records.line, ordinal + 1)
        # By place, because every row passes here.
        row = Row(
            ordinal,
            "",
            {},
            None,
            record.line,
            file.name,
            record.digest,
            self.position,
            record.notes,
            size=record.size,
        )
        try:
            self._fill(row, record)
        except RowFailure as e:
            message = f"{row.file} line {row.line}: {e.error.message}"
            row.error = RowError(e.error.error_class, message)
            row.id = e.row_id if isinstance(e, RefusedRecord) else self._identity.synthetic(row.file, ordinal)
        return row

    def _fill(self, row: Row, record: Record) -> None:
        if record.failure is not None:
            raise record.failure
        decoded = self._decode(record)
        row.values = decoded.values
        row.notes += decoded.notes
        row.nonfinite = decoded.nonfinite
        row.id = self._identity.of(row)
