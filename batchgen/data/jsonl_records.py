"""The records of JSONL: every physical line that is not blank. For `open_text`."""

from __future__ import annotations

from batchgen.data.line_reader import BLANK, LineReader, too_long
from batchgen.data.row import digest
from batchgen.data.text_reader import BOM, Record
from batchgen.types import ErrorClass, RowFailure


class JsonlRecords:
    """One record a line, without the `\\r` at its end and the BOM at the file's beginning.

    Args:
        lines: of the file, from its beginning.
        max_bytes: what `lines` was made with, for the message.
    """

    def __init__(self, lines: LineReader, max_bytes: int) -> None:
        self._lines = lines
        self._max_bytes = max_bytes
        self.line = 0

    @property
    def offset(self) -> int:
        return self._lines.offset

    def seek(self, offset: int, line: int) -> None:
        self._lines.go_to(offset)
        self.line = line

    def next(self) -> Record | None:
        data = self._lines.next_beginning(b"{")
        if data is None:
            return self._next_of_any()
        self.line += 1
        return Record(data.removesuffix(b"\r"), len(data), digest(data), self.line)

    def _next_of_any(self) -> Record | None:
        """The same, of lines that may be blank, too long, or begin with a BOM."""
        while (line := self._lines.next()) is not None:
            self.line += 1
            if line.blank:
                continue
            if line.data is None:
                failure = RowFailure(ErrorClass.INVALID_JSON, too_long("line", line.length, self._max_bytes))
                return Record(None, line.length, line.digest, self.line, failure=failure)
            data = line.data.removesuffix(b"\r")
            if self.line > 1 or not data.startswith(BOM):
                return Record(data, line.length, line.digest, self.line)
            data = data.removeprefix(BOM)
            if data.strip(BLANK):
                return Record(data, line.length, line.digest, self.line, ("bom_stripped",))
        return None
