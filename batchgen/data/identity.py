"""The user's id of a row. Both readers call it.

`input.id: auto` takes the column `id` where a row has it. A row without one gets
`<base name of the file>:<ordinal>`. The ordinal counts all records of the
input, so two files of the same base name never share an id, and the id does not depend on where files lie.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from batchgen.data.exact_json import ExactFloat, encode
from batchgen.data.row import Row
from batchgen.types import ErrorClass, RowFailure

AUTO_COLUMN = "id"


class RowIdentity:
    """Makes ids; `column` is None for `input.id: auto`."""

    def __init__(self, column: str | None) -> None:
        self.column = column
        self._name = AUTO_COLUMN if column is None else column

    def synthetic(self, file_name: str, ordinal: int) -> str:
        """The id of a row that has none of its own, or that cannot be read."""
        return f"{file_name}:{ordinal}"

    def of(self, row: Row) -> str:
        """The id of a readable row, always a string.

        Raises:
            RowFailure: missing_column when the id column is absent, null or not a scalar.
        """
        value = row.values.get(self._name)
        if value is None:
            if self.column is None:
                return self.synthetic(row.file, row.ordinal)
            problem = "is null; fill it" if self._name in row.values else "is missing; add it"
            raise self._failure(f"{problem}, or set input.id: auto")
        text = id_text(value)
        if text is None:
            raise self._failure(f"holds a {type(value).__name__}; an id must be a string or a number")
        return text

    def _failure(self, problem: str) -> RowFailure:
        return RowFailure(ErrorClass.MISSING_COLUMN, f"the id column {self._name!r} {problem}")


def id_text(value: Any) -> str | None:
    """A scalar as the text that ids are compared by: digits as written, `true`; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, ExactFloat):
        return value.text
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return encode(value) if isinstance(value, (bool, int, float, Decimal)) else None
