"""Rows of one Parquet file, batch by batch. `InputSet` drives it.

Batches lie on a fixed grid from the beginning of each row group, whatever position reading starts at: so the
Arrow arrays behind a row are the same in every run, and with them the bytes of the output.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.arrow_values import (
    drop_null_fields,
    find_undecodable,
    replace_undecodable,
    to_python,
    values_digest,
)
from batchgen.data.identity import RowIdentity
from batchgen.data.input_file import InputFile
from batchgen.data.row import Position, Row, digest
from batchgen.types import ErrorClass, InputError, RowError, RowFailure

MAX_BATCH_ROWS = 1024
_BATCH_BYTES = 16 * 1024 * 1024
_READ_BUFFER_BYTES = 1024 * 1024
_MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")


def read_footer(file: InputFile) -> bytes:
    """The raw footer, checked to be there.

    Raises:
        InputError: the file is cut, empty, still being written, or unreadable.
    """
    try:
        with open(file.path, "rb") as f:
            f.seek(max(0, file.size - _TAIL.size))
            tail = f.read(_TAIL.size)
            length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
            if magic != _MAGIC or length + _TAIL.size > file.size:
                raise InputError(
                    f"{file.path}: no Parquet footer at its end (byte {file.size}), so the file is cut or "
                    "still being written; restore it from its source"
                )
            f.seek(file.size - _TAIL.size - length)
            return f.read(length)
    except OSError as e:
        raise InputError(f"{file.path}: cannot be read: {e.strerror}") from e


def footer_hash(file: InputFile) -> str:
    """Hash of the footer, which holds the schema and where and how large every column chunk is."""
    return digest(read_footer(file)).hex()


def open_parquet(file: InputFile) -> pq.ParquetFile:
    """Opens the file after checking its footer. Raises InputError naming it."""
    read_footer(file)
    try:
        return pq.ParquetFile(file.path, buffer_size=_READ_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as e:
        raise InputError(f"{file.path}: not readable as Parquet: {_first_line(e)}") from e


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


class ParquetReader:
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
        self._parquet = open_parquet(file)
        metadata = self._parquet.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._group_starts = list(accumulate(sizes, initial=0))[:-1]
        self._batches = self._read_batches(0)
        self._start = 0
        self._end = 0
        self._batch: ArrowBatch | None = None

    def seek(self, position: Position) -> None:
        """Goes forward to `position`; jumps over row groups, decodes and drops batches within one."""
        group = self._group_of(position.offset)
        if position.offset >= self._end and group > self._group_of(self._start):
            self._batches.close()
            self._batches = self._read_batches(group)
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
        self._parquet.close()

    def _group_of(self, offset: int) -> int:
        return max(0, bisect_right(self._group_starts, offset) - 1)

    def _read_batches(self, first_group: int) -> Generator[tuple[int, pa.RecordBatch]]:
        for group in range(first_group, len(self._group_starts)):
            start = self._group_starts[group]
            try:
                for batch in self._parquet.iter_batches(
                    batch_size=self._batch_rows(group), row_groups=[group], use_threads=False
                ):
                    yield start, batch.select(self._names)
                    start += batch.num_rows
            except (pa.ArrowException, OSError) as e:
                raise InputError(
                    f"{self._file.path}: corrupt data in row group {group} at or after row {start}: "
                    f"{_first_line(e)}; restore the file from its source"
                ) from e

    def _batch_rows(self, group: int) -> int:
        """A function of the file alone, so that the grid of batches is the same in every run."""
        metadata = self._parquet.metadata.row_group(group)
        row_bytes: int = metadata.total_byte_size // max(1, metadata.num_rows) + 1
        return min(MAX_BATCH_ROWS, max(1, _BATCH_BYTES // row_bytes))

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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
