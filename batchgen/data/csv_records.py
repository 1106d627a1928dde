"""The records of CSV: a header, then lines or groups of lines. For `open_text`.

delimiter     `,`, `;` or tab: the one that the header holds most often outside quotes, the first of
              these where two are as frequent; always tab in a file named .tsv or .tab
header        required; its names are distinct and not empty
values        strings as they are; an empty field is null, and `""` the empty string
blank lines   are no records; nor are lines of spaces, except where the file has a single column
a bad record  is an error row and costs its first physical line: reading goes on at the next one, so that
              a quote that is never closed does not swallow the rows behind it
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from batchgen.data.byte_stream import TruncatedStream, open_stream
from batchgen.data.csv_fields import Field, FieldSplitter, MalformedRecord, split_line
from batchgen.data.exact_json import REPLACEMENT, Decoded
from batchgen.data.input_file import InputFile
from batchgen.data.line_reader import Line, LineReader, too_long
from batchgen.data.row import digest
from batchgen.data.text_reader import BOM, Record
from batchgen.grammar import counted
from batchgen.types import ErrorClass, InputError, RowFailure, UsageError

DELIMITERS = (b",", b";", b"\t")
MAX_HEADER_BYTES = 1024 * 1024
_TAB_SUFFIXES = {".tsv", ".tab"}


@dataclass(slots=True)
class CsvRecord(Record):
    """A record with its fields; `data` is not used."""

    fields: tuple[Field, ...] = ()


@dataclass(frozen=True, slots=True)
class Header:
    """The first record of a file.

    Args:
        names: of the columns.
        delimiter: one byte.
        bom: whether a byte order mark stood before it.
        offset, line: bytes of text and physical lines up to the first row.
        digest: of its bytes; part of each row's digest, because the names are part of what a row says.
    """

    names: tuple[str, ...]
    delimiter: bytes
    bom: bool
    offset: int
    line: int
    digest: bytes


def read_header(file: InputFile) -> Header:
    """The header of a file. Raises UsageError or InputError, naming the file and what is wrong."""
    stream = open_stream(file)
    try:
        lines = LineReader(stream, MAX_HEADER_BYTES)
        return _header(lines, file)
    except TruncatedStream as e:
        raise InputError(f"{file.path}: {e}, inside the header; restore the file") from None
    finally:
        stream.close()


class CsvRecords:
    """The rows below the header.

    Args:
        lines: of the file, from its beginning.
        header: of the same file.
        max_bytes: a longer record is a bad one.
    """

    def __init__(self, lines: LineReader, header: Header, max_bytes: int) -> None:
        self._lines = lines
        self._header = header
        self._max_bytes = max_bytes
        self._ahead: deque[Line] = deque()
        self.offset = 0
        self.line = 0

    def seek(self, offset: int, line: int) -> None:
        while self._ahead and self.offset < offset:
            self.offset = self._ahead.popleft().end
        if not self._ahead:
            self._lines.go_to(offset)
        self.offset, self.line = offset, line

    def next(self) -> CsvRecord | None:
        if self.offset < self._header.offset:
            self.seek(self._header.offset, self._header.line)
        notes = ("bom_stripped",) if self._header.bom and self.offset == self._header.offset else ()
        while (line := self._peek(0)) is not None:
            if not self._is_blank(line):
                return self._record(line, notes)
            self._consume(1)
        return None

    def _is_blank(self, line: Line) -> bool:
        if not line.blank or line.data is None:
            return False
        data = line.data.removesuffix(b"\r")
        return not (data if len(self._header.names) == 1 else data.strip(b" "))

    def _record(self, first: Line, notes: tuple[str, ...]) -> CsvRecord:
        number = self.line + 1
        try:
            if first.data is None:
                raise MalformedRecord(too_long("line", first.length, self._max_bytes))
            if b'"' in first.data:
                fields, count = self._quoted_record(first.data)
            else:
                fields, count = split_line(first.data, self._header.delimiter), 1
        except MalformedRecord as e:
            self._consume(1)
            failure = RowFailure(ErrorClass.INVALID_CSV, f"not valid CSV: {e}")
            return CsvRecord(None, first.length, self._digest(first.digest), number, notes, failure)
        hashes = [self._ahead[i].digest for i in range(count)]
        size = sum(self._ahead[i].length for i in range(count))
        self._consume(count)
        return CsvRecord(b"", size, self._digest(*hashes), number, notes, None, tuple(fields))

    def _quoted_record(self, data: bytes) -> tuple[list[Field], int]:
        splitter = FieldSplitter(self._header.delimiter)
        splitter.add(data)
        count, length = 1, len(data)
        while splitter.open:
            line = self._peek(count)
            if line is None:
                raise MalformedRecord("the quote that opens in this line is never closed")
            length += line.length + 1
            if line.data is None or length > self._max_bytes:
                raise MalformedRecord(
                    "the quote that opens in this line is not closed within the limit of "
                    f"{self._max_bytes:,} bytes"
                )
            splitter.add(line.data)
            count += 1
        return splitter.fields, count

    def _digest(self, *lines: bytes) -> bytes:
        return digest(b"".join([self._header.digest, *lines]))

    def _peek(self, index: int) -> Line | None:
        """A line that is not consumed yet, `index` behind the next one."""
        while len(self._ahead) <= index:
            line = self._lines.next()
            if line is None:
                return None
            self._ahead.append(line)
        return self._ahead[index]

    def _consume(self, count: int) -> None:
        for _ in range(count):
            self.offset = self._ahead.popleft().end
        self.line += count


class CsvDecoder:
    """From fields to the values of a row.

    Args:
        names: of the columns.
        replace_invalid: bytes that are not UTF-8 become U+FFFD instead of an error.
    """

    def __init__(self, names: tuple[str, ...], replace_invalid: bool) -> None:
        self._names = names
        self._replace_invalid = replace_invalid

    def __call__(self, record: Record) -> Decoded:
        assert isinstance(record, CsvRecord)
        if len(record.fields) != len(self._names):
            raise RowFailure(
                ErrorClass.INVALID_CSV,
                f"the record has {counted(len(record.fields), 'field')} and the header {len(self._names)}; "
                "quote a field that holds the delimiter",
            )
        notes: tuple[str, ...] = ()
        try:
            texts = [None if field is None else field.decode() for field in record.fields]
        except UnicodeDecodeError:
            self._refuse_invalid(record.fields)
            texts = [None if field is None else field.decode(errors="replace") for field in record.fields]
            notes = ("invalid_unicode_replaced",)
        values: dict[str, Any] = dict(zip(self._names, texts, strict=True))
        return Decoded(values, notes, ())

    def _refuse_invalid(self, fields: tuple[Field, ...]) -> None:
        if self._replace_invalid:
            return
        for name, field in zip(self._names, fields, strict=True):
            try:
                (field or b"").decode()
            except UnicodeDecodeError as e:
                raise RowFailure(
                    ErrorClass.INVALID_UNICODE,
                    f"byte 0x{e.object[e.start]:02x} at byte {e.start} of column {name!r} is not valid "
                    f"UTF-8; repair it or set input.unicode: replace (it becomes {REPLACEMENT})",
                ) from None


def _header(lines: LineReader, file: InputFile) -> Header:
    number = 0
    bom = False
    while (line := lines.next()) is not None:
        number += 1
        data = line.data
        if data is None:
            raise UsageError(
                f"input.path: {file.path} has a first line of {counted(line.length, 'byte')}, no CSV header; "
                "give a CSV file, or say what it is in input.format"
            )
        if number == 1 and data.startswith(BOM):
            data, bom = data.removeprefix(BOM), True
        if data.strip(b" \r"):
            return _parse_header(lines, file, data, number, bom)
    raise InputError(f"{file.path}: is empty; a CSV file begins with a header that names its columns")


def _parse_header(lines: LineReader, file: InputFile, data: bytes, number: int, bom: bool) -> Header:
    delimiter = _delimiter(file, data)
    splitter = FieldSplitter(delimiter)
    raw = [data]
    try:
        splitter.add(data)
        while splitter.open:
            line = lines.next()
            if line is None or line.data is None:
                raise MalformedRecord("a quote is never closed")
            number += 1
            raw.append(line.data)
            splitter.add(line.data)
    except MalformedRecord as e:
        raise UsageError(
            f"input.path: {file.path} line {number}: the CSV header is not valid: {e}; correct it"
        ) from None
    names = _names(file, splitter.fields)
    return Header(names, delimiter, bom, lines.offset, number, digest(delimiter + b"\n".join(raw)))


def _delimiter(file: InputFile, header: bytes) -> bytes:
    pure = PurePath(file.name)
    if not _TAB_SUFFIXES.isdisjoint({suffix.lower() for suffix in pure.suffixes[-2:]}):
        return b"\t"
    outside = b"".join(header.split(b'"')[::2])
    return max(DELIMITERS, key=outside.count)


def _names(file: InputFile, fields: list[Field]) -> tuple[str, ...]:
    names: list[str] = []
    for place, field in enumerate(fields, 1):
        try:
            name = (field or b"").decode()
        except UnicodeDecodeError:
            raise UsageError(
                f"input.path: {file.path}: name {place} in the CSV header is not valid UTF-8; repair it"
            ) from None
        if not name.strip():
            raise UsageError(
                f"input.path: {file.path}: column {place} has no name in the CSV header; name it "
                "(pandas writes such a column for its index: to_csv(index=False) leaves it out)"
            )
        if "\r" in name:
            raise UsageError(
                f"input.path: {file.path}: the CSV header holds a bare carriage return; "
                "rewrite the file with \\n or \\r\\n as line breaks"
            )
        if name in names:
            raise UsageError(
                f"input.path: {file.path}: two columns of the CSV header are named {name!r}; rename one"
            )
        names.append(name)
    return tuple(names)
