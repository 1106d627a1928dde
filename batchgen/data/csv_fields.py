"""One CSV record as fields, by RFC 4180. `CsvRecords` feeds it the physical lines of a record.

A field that begins with a quote goes on to the next lone quote, over delimiters and line breaks; two quotes
in it stand for one. A quote anywhere else is an error and not data, because a reader that guesses there
takes other rows for part of this one.
"""

from __future__ import annotations

import re

_TO_QUOTE = re.compile(rb'[^"]*+(?:""[^"]*+)*+')
_QUOTE = b'"'

Field = bytes | None
"""None is an empty field without quotes."""


class MalformedRecord(ValueError):
    """The lines so far are not, and will not become, a record."""


class FieldSplitter:
    """Splits one record.

    Args:
        delimiter: one byte.

    Attributes:
        fields: those that are complete.
        open: whether the record goes on behind the line break, inside a quoted field.
    """

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._quoted: list[bytes] = []
        self.fields: list[Field] = []
        self.open = False

    def add(self, line: bytes) -> None:
        """Takes one physical line without its `\\n`. Raises MalformedRecord."""
        place = self._add_quoted(line, 0) if self.open else self._add_field(line, 0)
        while place < len(line):
            if line[place : place + 1] != self._delimiter:
                raise MalformedRecord(
                    f"text follows the closing quote of field {len(self.fields)}; double every quote inside"
                )
            place = self._add_field(line, place + 1)
        if self.open:
            self._quoted.append(b"\n")

    def _add_field(self, line: bytes, place: int) -> int:
        """Takes the field at `place`; returns where it ends. The `\\r` at the end of a record is no data."""
        if line.startswith(_QUOTE, place):
            self._quoted = []
            return self._add_quoted(line, place + 1)
        end = line.find(self._delimiter, place)
        text = line[place:end] if end >= 0 else line[place:].removesuffix(b"\r")
        if _QUOTE in text:
            raise MalformedRecord(
                f"field {len(self.fields) + 1} holds a quote but does not begin with one; "
                "quote the field and double the quotes inside"
            )
        self.fields.append(text or None)
        return end if end >= 0 else len(line)

    def _add_quoted(self, line: bytes, place: int) -> int:
        found = _TO_QUOTE.match(line, place)
        end = len(line) if found is None else found.end()
        self._quoted.append(line[place:end])
        self.open = end == len(line)
        if self.open:
            return end
        self.fields.append(b"".join(self._quoted).replace(b'""', b'"'))
        return len(line) if line[end + 1 :] == b"\r" else end + 1


def split_line(line: bytes, delimiter: bytes) -> list[Field]:
    """The fields of a line that holds no quote."""
    return [field or None for field in line.removesuffix(b"\r").split(delimiter)]
