"""The records of a JSON file: the elements of its one array, cut out of the stream. For `open_text`.

Only strings and brackets are looked at here, so that an array of any size is read in the memory of one
element; what an element holds is for `exact_json` to judge.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from batchgen.data.byte_stream import ByteStream, TruncatedStream
from batchgen.data.line_reader import ChunkCursor, Pieces, too_long
from batchgen.data.row import digest
from batchgen.data.text_reader import BOM, Record
from batchgen.types import ErrorClass, InputError, RowFailure

WHITE = b" \t\r\n"
_NOT_WHITE = re.compile(rb"[^ \t\r\n]")
_STRUCTURE = re.compile(rb'["\[\]{},]')
_STRING_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_QUOTE, _COMMA, _OPEN, _CLOSE = b'",[]'


class _State(Enum):
    BEFORE_ARRAY = auto()
    AFTER_ELEMENT = auto()
    AT_END = auto()


class JsonArrayRecords(ChunkCursor):
    """The elements of the array that is the whole file. `offset` is after an element, before its comma.

    Args:
        stream: at the beginning of the text.
        path: of the file, for messages.
        max_bytes: a longer element is passed over and comes back as a failure.
    """

    def __init__(self, stream: ByteStream, path: str, max_bytes: int) -> None:
        super().__init__(stream)
        self._path = path
        self._max_bytes = max_bytes
        self._state = _State.BEFORE_ARRAY
        self.line = 0

    def seek(self, offset: int, line: int) -> None:
        self.go_to(offset)
        self.line, self._state = line, _State.AFTER_ELEMENT

    def next(self) -> Record | None:
        """The next element, or None after the last.

        Raises:
            TruncatedStream: the text ends inside the array.
            InputError: the text is not one array.
        """
        if self._state is _State.AT_END:
            return None
        notes: tuple[str, ...] = ()
        first = self._state is _State.BEFORE_ARRAY
        if first:
            notes = self._open_array()
        elif self._take() == _CLOSE:
            self._close_array()
            return None
        self._skip_white()
        line = self.line + 1
        pieces = self._element()
        self._state = _State.AFTER_ELEMENT
        if first and not pieces.length and self._peek() == _CLOSE:
            self._take()
            self._close_array()
            return None
        return self._record(pieces, line, notes)

    def _record(self, pieces: Pieces, line: int, notes: tuple[str, ...]) -> Record:
        if pieces.too_long is not None:
            failure = _failure(too_long("record", pieces.length, self._max_bytes))
            return Record(None, pieces.length, pieces.too_long.digest(), line, notes, failure)
        data = b"".join(pieces.kept).rstrip(WHITE)
        if not data:
            return Record(None, 0, digest(data), line, notes, _failure("a comma with no record beside it"))
        return Record(data, len(data), digest(data), line, notes)

    def _open_array(self) -> tuple[str, ...]:
        while len(self._chunk) < len(BOM) and (more := self._stream.read_chunk()):
            self._chunk += more
        notes: tuple[str, ...] = ()
        if self._chunk.startswith(BOM):
            self._advance(len(BOM))
            notes = ("bom_stripped",)
        self._skip_white()
        if not self._chunk:
            raise InputError(f"{self._path}: is empty; a JSON file holds one array of records, [] at least")
        if self._chunk[self._start] != _OPEN:
            raise InputError(
                f"{self._path}: line {self.line + 1} does not begin an array [...] of records; put the "
                "records into one array, or write one object on each line and set input.format: jsonl"
            )
        self._advance(self._start + 1)
        return notes

    def _close_array(self) -> None:
        self._state = _State.AT_END
        self._skip_white()
        if self._chunk:
            raise InputError(
                f"{self._path}: line {self.line + 1} goes on after the end of the array, at byte "
                f"{self.offset} of the text; remove it, or put all records into one array"
            )

    def _element(self) -> Pieces:
        """Everything up to the comma or bracket that ends the element."""
        pieces = Pieces(self._max_bytes)
        before, line = self.offset, self.line
        depth = 0
        in_string = escaped = False
        place = self._start
        while True:
            chunk = self._chunk
            if place >= len(chunk):
                pieces.add(chunk[self._start :])
                if not self._refill():
                    self.offset, self.line = before, line
                    raise _not_closed(line + 1, before + pieces.length)
                place = 0
            elif escaped:
                escaped = False
                place += 1
            elif in_string:
                found = _STRING_REST.match(chunk, place)
                place = len(chunk) if found is None else found.end()
                if place < len(chunk):
                    in_string = chunk[place] != _QUOTE
                    escaped = in_string
                    place += 1
            elif (token := _STRUCTURE.search(chunk, place)) is None:
                place = len(chunk)
            else:
                byte = chunk[token.start()]
                place = token.end()
                if byte == _QUOTE:
                    in_string = True
                elif byte in b"[{":
                    depth += 1
                elif depth == 0 and byte in b",]":
                    pieces.add(chunk[self._start : place - 1])
                    self._advance(place - 1)
                    return pieces
                elif byte != _COMMA:
                    depth = max(0, depth - 1)

    def _skip_white(self) -> None:
        """To the next byte that is not white space; the chunk is empty at the end of the text."""
        while (found := _NOT_WHITE.search(self._chunk, self._start)) is None:
            if not self._refill():
                return
        self._advance(found.start())

    def _peek(self) -> int:
        return self._chunk[self._start]

    def _take(self) -> int:
        """The comma or bracket after an element; it is there, because the element ended at it."""
        if self._start >= len(self._chunk) and not self._refill():
            raise _not_closed(self.line + 1, self.offset)
        byte = self._peek()
        self._advance(self._start + 1)
        return byte

    def _refill(self) -> bool:
        self._advance(len(self._chunk))
        self._chunk, self._start = self._stream.read_chunk(), 0
        return bool(self._chunk)

    def _advance(self, place: int) -> None:
        """Counts what lies between the current place in the chunk and `place`, and goes there."""
        self.offset += place - self._start
        self.line += self._chunk.count(b"\n", self._start, place)
        self._start = place


def _not_closed(line: int, end: int) -> TruncatedStream:
    return TruncatedStream(
        f"the array is not closed at byte {end}, where the text ends: it is cut, or a quote or bracket is "
        f"missing in the record that begins at line {line}",
        end,
    )


def _failure(message: str) -> RowFailure:
    return RowFailure(ErrorClass.INVALID_JSON, message)
