"""Rows of one JSONL file, plain or compressed. `InputSet` drives it."""

from __future__ import annotations

from collections.abc import Callable

from batchgen.data.byte_stream import TruncatedStream, open_stream
from batchgen.data.exact_json import LineDecoder
from batchgen.data.identity import RowIdentity
from batchgen.data.input_file import InputFile
from batchgen.data.line_reader import BLANK, Line, LineReader
from batchgen.data.row import Position, Row
from batchgen.types import ErrorClass, InputError, RowError, RowFailure

_BOM = b"\xef\xbb\xbf"


class JsonlReader:
    """Reads forward from any position at or after where it is.

    Args:
        file: what to read.
        identity: makes the row's id.
        replace_invalid: policy for invalid UTF-8 and lone surrogates.
        keep_truncated: a cut gzip or zstd stream ends the file instead of raising.
        max_line_bytes: longer lines are error rows.
        note: called with a sentence about the file, for the report.

    Attributes:
        position: where the next record begins.
    """

    def __init__(
        self,
        file: InputFile,
        identity: RowIdentity,
        *,
        replace_invalid: bool,
        keep_truncated: bool,
        max_line_bytes: int,
        note: Callable[[str], None],
    ) -> None:
        self.position = Position(file.index)
        self._file = file
        self._identity = identity
        self._keep_truncated = keep_truncated
        self._max_line_bytes = max_line_bytes
        self._note = note
        self._decoder = LineDecoder(replace_invalid)
        self._stream = open_stream(file.path, file.compression, file.size)
        self._lines = LineReader(self._stream, max_line_bytes)

    def seek(self, position: Position) -> None:
        """Goes forward to `position`, which an earlier read of the same content returned."""
        self._lines.seek(position.offset)
        self.position = position

    def read(self) -> Row | None:
        """The next row, or None at the end of the file. Raises InputError for a cut or corrupt file."""
        line_number = self.position.line
        while (line := self._next_line(line_number)) is not None:
            line_number += 1
            if not line.blank and not (line_number == 1 and _is_bom_alone(line)):
                return self._row(line, line_number)
        return None

    def close(self) -> None:
        self._stream.close()

    def _next_line(self, line_number: int) -> Line | None:
        try:
            return self._lines.next()
        except TruncatedStream as e:
            where = (
                f"{self._file.path}: {e} (after line {line_number}, byte {self._lines.offset} of the text)"
            )
            if self._keep_truncated:
                self._note(f"{where}; the lines before it were kept")
                return None
            raise InputError(
                f"{where}; restore the file, or set input.on_truncated: keep to use the lines before it"
            ) from None

    def _row(self, line: Line, line_number: int) -> Row:
        ordinal = self.position.ordinal
        self.position = Position(self._file.index, self._lines.offset, line_number, ordinal + 1)
        row = Row(
            ordinal=ordinal,
            id=self._identity.synthetic(self._file.name, ordinal),
            values={},
            error=None,
            line=line_number,
            file=self._file.name,
            digest=line.digest,
            next_position=self.position,
            size=line.length,
        )
        try:
            self._fill(row, line)
        except RowFailure as e:
            message = f"{row.file} line {row.line}: {e.error.message}"
            row.error = RowError(e.error.error_class, message)
        return row

    def _fill(self, row: Row, line: Line) -> None:
        if line.data is None:
            raise RowFailure(
                ErrorClass.INVALID_JSON,
                f"the line has {line.length} bytes, more than the limit of {self._max_line_bytes}",
            )
        data = line.data.removesuffix(b"\r")
        has_bom = row.line == 1 and data.startswith(_BOM)
        if has_bom:
            data = data.removeprefix(_BOM)
            row.notes = ("bom_stripped",)
        decoded = self._decoder.decode(data)
        row.values = decoded.values
        row.notes += decoded.notes
        row.nonfinite = decoded.nonfinite
        row.id = self._identity.of(row)


def _is_bom_alone(line: Line) -> bool:
    return line.data is not None and not line.data.removeprefix(_BOM).strip(BLANK)
