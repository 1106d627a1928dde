"""Rows of one Parquet or Arrow file, batch by batch. `InputSet` drives it.

Batches lie on a fixed grid from the beginning of each row group, whatever position reading starts at: so the
Arrow arrays behind a row are the same in every run, and with them the bytes of the output.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchgen.data.arrow_values import (
    drop_null_fields,
    find_undecodable,
    replace_undecodable,
    to_python,
    values_digest,
)
from batchgen.data.identity import RowIdentity
from batchgen.data.input_file import InputFile
from batchgen.data.read_ahead import ReadAhead
from batchgen.data.row import Position, Row
from batchgen.data.table_file import Batches, open_table
from batchgen.types import ErrorClass, RowError, RowFailure


@dataclass(slots=True)
class ArrowBatch:
    """A record batch and its values as Python, converted once; nulls in structs are kept."""

    batch: pa.RecordBatch
    columns: dict[str, list[Any]] = field(init=False)
    has_undecodable: bool = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.row_bytes = self.batch.nbytes // max(1, self.batch.num_rows)
        names = self.batch.schema.names
        self.columns = {name: to_python(self.batch.column(i)) for i, name in enumerate(names)}
        self.has_undecodable = not _is_valid(self.batch)


class ArrowRow(Mapping[str, Any]):
    """The values of one row as prompts see them: null struct fields left out."""

    __slots__ = ("batch", "index")

    def __init__(self, batch: ArrowBatch, index: int) -> None:
        self.batch = batch
        self.index = index

    def __getitem__(self, name: str) -> Any:
        return drop_null_fields(self.full(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.batch.columns)

    def __len__(self) -> int:
        return len(self.batch.columns)

    def full(self, name: str) -> Any:
        """The value with the null fields of structs, as the passthrough writes it."""
        value = self.batch.columns[name][self.index]
        return replace_undecodable(value) if self.batch.has_undecodable else value


class TableReader:
    """Reads forward from any position at or after where it is.

    Args:
        file: what to read.
        names: the columns in the order of the first file; each exists.
        identity: makes the row's id.
        replace_invalid: strings that are not UTF-8 get U+FFFD instead of an error.

    Attributes:
        position: where the next record begins.
    """

    def __init__(
        self, file: InputFile, names: list[str], identity: RowIdentity, *, replace_invalid: bool
    ) -> None:
        self.position = Position(file.index)
        self._file = file
        self._names = names
        self._identity = identity
        self._replace_invalid = replace_invalid
        self._table = open_table(file)
        self._batches = self._read_from(0)
        self._start = 0
        self._end = 0
        self._batch: ArrowBatch | None = None

    def seek(self, position: Position) -> None:
        """Goes forward to `position`; jumps over row groups, decodes and drops batches within one."""
        group = self._group_of(position.offset)
        if position.offset >= self._end and group > self._group_of(self._start):
            self._batches.close()
            self._batches = self._read_from(group)
        self.position = position

    def read(self) -> Row | None:
        """The next row, or None at the end of the file. Raises InputError for corrupt data."""
        offset = self.position.offset
        while offset >= self._end:
            found = next(self._batches, None)
            if found is None:
                return None
            self._start, batch = found
            self._end = self._start + batch.num_rows
            self._batch = ArrowBatch(batch) if offset < self._end else None
        if self._batch is None:
            return None
        return self._row(self._batch, offset - self._start)

    def close(self) -> None:
        self._batches.close()
        self._table.close()

    def _group_of(self, offset: int) -> int:
        return max(0, bisect_right(self._table.group_starts, offset) - 1)

    def _read_from(self, group: int) -> Batches | ReadAhead[tuple[int, pa.RecordBatch]]:
        batches = self._table.batches(group, self._names)
        if self._file.url is None:
            return batches
        return ReadAhead(batches, lambda item: int(item[1].nbytes))

    def _row(self, batch: ArrowBatch, index: int) -> Row:
        ordinal = self.position.ordinal
        self.position = Position(self._file.index, self.position.offset + 1, 0, ordinal + 1)
        values = [column[index] for column in batch.columns.values()]
        row = Row(
            ordinal=ordinal,
            id=self._identity.synthetic(self._file.name, ordinal),
            values=ArrowRow(batch, index),
            error=None,
            line=0,
            file=self._file.name,
            digest=values_digest(values),
            next_position=self.position,
            size=batch.row_bytes,
        )
        try:
            if batch.has_undecodable:
                self._check_text(row, values)
            row.id = self._identity.of(row)
        except RowFailure as e:
            message = f"{row.file} row {self.position.offset - 1}: {e.error.message}"
            row.error = RowError(e.error.error_class, message)
        return row

    def _check_text(self, row: Row, values: list[Any]) -> None:
        for name, value in zip(self._names, values, strict=True):
            bad = find_undecodable(value)
            if bad is None:
                continue
            if not self._replace_invalid:
                raise RowFailure(
                    ErrorClass.INVALID_UNICODE,
                    f"column {name!r}: byte {bad.offset} of the text is not valid UTF-8; "
                    "repair it or set input.unicode: replace",
                )
            row.notes = ("invalid_unicode_replaced",)


def _is_valid(batch: pa.RecordBatch) -> bool:
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
