"""Rows and results as CSV by RFC 4180, for `export`.

Null is an empty field, an empty text is `""`. Numbers keep their digits; what is nested is JSON. A NUL, which
ends the file for many readers, becomes U+FFFD. `safe` is for files that people open in a spreadsheet: a text
that such a program would take for a formula gets an apostrophe before it, and other control characters but
tab and line break become U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from batchgen.data.exact_json import clean_text, encode
from batchgen.data.record_lines import shown
from batchgen.data.row import Row
from batchgen.data.row_result import RowResult, exploded

_QUOTED = re.compile('[",\r\n]|^ | $|^$')
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_BEFORE = ("row", "id", "sample")
_NESTED = {
    "error": ("class", "message"),
    "usage": ("prompt_tokens", "completion_tokens", "truncated_tokens", "reasoning_tokens"),
}


class CsvLines:
    """Lines with their line breaks.

    Args:
        names: our columns to what they are called; `error` and `usage` become a column for each member,
            such as `error.class`.
        members: the user's columns that go through, of a row.
        columns: their names, in order.
        rest: name of a column for JSON of the members that are not among `columns`; None if there are none.
        samples, reasoning_tokens: as of `OutputPlan`.
        safe: guard what a spreadsheet would run.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        members: Callable[[Row], Mapping[str, Any]],
        columns: Sequence[str],
        rest: str | None,
        safe: bool,
        samples: str | None = None,
        *,
        reasoning_tokens: bool = False,
    ) -> None:
        self._num_counts = len(_NESTED["usage"]) - (not reasoning_tokens)
        self._names = names
        self._members = members
        self._columns = columns
        self._known = frozenset(columns)
        self._rest = rest
        self._safe = safe
        self._samples = samples

    def header(self) -> str:
        """The first line."""
        before = [name for key, name in self._names.items() if key in _BEFORE]
        after = [column for key in self._names if key not in _BEFORE for column in self._split(key)]
        rest = [] if self._rest is None else [self._rest]
        return self._line([*before, *self._columns, *rest, *after])

    def line(self, row: Row, result: RowResult) -> str:
        """The line of one record."""
        before = {"row": row.ordinal, "id": row.id, "sample": result.sample}
        values = self._members(row)
        cells = [before[key] for key in self._names if key in before]
        cells += [values.get(name) for name in self._columns]
        if self._rest is not None:
            rest = {name: value for name, value in values.items() if name not in self._known}
            cells.append(rest or None)
        for key in self._names:
            if key not in before:
                cells += self._own(key, result)
        return self._line(cells)

    def lines(self, records: Iterator[tuple[Row, RowResult]]) -> Iterator[str]:
        """The whole file."""
        yield self.header()
        for row, result in records:
            each = exploded(result) if self._samples == "explode" else (result,)
            yield from (self.line(row, one) for one in each)

    def _split(self, key: str) -> list[str]:
        name = self._names[key]
        if key == "usage":
            return [f"{name}.{member}" for member in _NESTED[key][: self._num_counts]]
        return [f"{name}.{member}" for member in _NESTED[key]] if key in _NESTED else [name]

    def _own(self, key: str, result: RowResult) -> list[Any]:
        if key == "error":
            error = result.error
            return [None, None] if error is None else [error.error_class.value, error.message]
        if key == "usage":
            counts = [None] * self._num_counts if result.usage is None else [*result.usage]
            return counts[: self._num_counts]
        if hasattr(result, key):
            return [getattr(result, key)]
        return [shown(key, (result.included or {}).get(key), lists=self._samples == "list")]

    def _line(self, cells: Sequence[Any]) -> str:
        return ",".join(map(self._cell, cells)) + "\r\n"

    def _cell(self, value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, str):
            text = encode(value)
            if isinstance(value, bytes):
                text = text[1:-1]
            return self._quote(text) if isinstance(value, list | tuple | dict) else text
        text = clean_text(value).replace("\0", "\ufffd")
        if self._safe:
            text = _CONTROL.sub("\ufffd", text)
            if text.startswith(_FORMULA):
                text = f"'{text}"
        return self._quote(text)

    @staticmethod
    def _quote(text: str) -> str:
        return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text
