"""Physical lines of a byte stream, in bounded memory. The JSONL and CSV readers build on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from batchgen.data.byte_stream import ByteStream
from batchgen.data.row import DIGEST_BYTES

MAX_RECORD_BYTES = 256 * 1024 * 1024
BLANK = b" \t\r"
"""JSON's own white space; a line of nothing else is no record. (Python's strip() knows more of it.)"""


@dataclass(slots=True)
class Line:
    """One physical line without its newline. `data` is None when it is longer than the limit.

    Args:
        length: its bytes.
        digest: of its bytes.
        blank: it holds nothing but white space.
        end: bytes of text up to the beginning of the next line.
    """

    data: bytes | None
    length: int
    digest: bytes
    blank: bool
    end: int


def too_long(what: str, length: int, limit: int) -> str:
    """A sentence about a line or record that is longer than the limit, both in bytes."""
    return f"the {what} has {length:,} bytes, more than the limit of {limit:,}; shorten or split it"


class ChunkCursor:
    """A place in a byte stream that is read a chunk at a time.

    Args:
        stream: positioned at its beginning.

    Attributes:
        offset: bytes of text before the place.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._chunk = b""
        self._start = 0
        self.offset = 0

    def go_to(self, offset: int) -> None:
        """Goes forward, within the chunk if it reaches that far."""
        ahead = offset - self.offset
        if ahead <= len(self._chunk) - self._start:
            self._start += ahead
        else:
            self._chunk, self._start = b"", 0
            self._stream.seek(offset)
        self.offset = offset


class LineReader(ChunkCursor):
    """Splits on `\\n` only; the last line may lack it.

    Args:
        stream: positioned at its beginning.
        max_line_bytes: longer lines are passed over piece by piece and come back without data.

    Attributes:
        offset: bytes of text before the next line.
    """

    def __init__(self, stream: ByteStream, max_line_bytes: int) -> None:
        super().__init__(stream)
        self._max = max_line_bytes

    def next(self) -> Line | None:
        """The next line, or None at the end. Raises what the stream raises; a cut line is not returned."""
        end = self._chunk.find(b"\n", self._start)
        if end < 0:
            return self._next_across_chunks()
        data = self._chunk[self._start : end]
        self._start = end + 1
        return self._line(data, newline=1)

    def next_beginning(self, beginning: bytes) -> bytes | None:
        """The next line, if it begins so, is not too long and lies in memory; else None, and nothing is read.

        Most lines of a file are like this, and need no more said of them.
        """
        start = self._start
        if not self._chunk.startswith(beginning, start):
            return None
        end = self._chunk.find(b"\n", start)
        if end < 0 or end - start > self._max:
            return None
        self._start = end + 1
        self.offset += end + 1 - start
        return self._chunk[start:end]

    def _next_across_chunks(self) -> Line | None:
        pieces = Pieces(self._max)
        end = -1
        while end < 0:
            pieces.add(self._chunk[self._start :])
            self._chunk, self._start = self._stream.read_chunk(), 0
            if not self._chunk:
                return self._last(pieces)
            end = self._chunk.find(b"\n")
        pieces.add(self._chunk[:end])
        self._start = end + 1
        return self._finish(pieces, newline=1)

    def _last(self, pieces: Pieces) -> Line | None:
        return self._finish(pieces, newline=0) if pieces.length else None

    def _finish(self, pieces: Pieces, newline: int) -> Line:
        if pieces.too_long is None:
            return self._line(b"".join(pieces.kept), newline)
        self.offset += pieces.length + newline
        return Line(None, pieces.length, pieces.too_long.digest(), pieces.blank, self.offset)

    def _line(self, data: bytes, newline: int) -> Line:
        self.offset += len(data) + newline
        kept = data if len(data) <= self._max else None
        return Line(kept, len(data), _hash(data).digest(), not data.strip(BLANK), self.offset)


class Pieces:
    """A record that spans chunks. Beyond the limit only its hash, length and blankness are kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.kept: list[bytes] = []
        self.length = 0
        self.blank = True
        self.too_long: hashlib.blake2b | None = None

    def add(self, piece: bytes) -> None:
        self.length += len(piece)
        self.blank = self.blank and not piece.strip(BLANK)
        self.kept.append(piece)
        if self.too_long is None and self.length > self._limit:
            self.too_long = _hash(b"")
        if self.too_long is not None:
            for kept in self.kept:
                self.too_long.update(kept)
            self.kept.clear()


def _hash(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)
