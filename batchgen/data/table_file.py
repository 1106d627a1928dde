"""Parquet and Arrow files as groups of record batches. `TableReader` makes rows of them.

A group is what can be entered without reading what lies before: a row group, or a record batch of an Arrow
file. Within a group batches lie on a fixed grid, a function of the file alone.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from itertools import accumulate
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.input_file import InputFile
from batchgen.data.raw_file import SeekableFile, open_raw
from batchgen.data.row import digest
from batchgen.grammar import counted
from batchgen.types import InputError, UsageError

MAX_BATCH_ROWS = 1024
_BATCH_BYTES = 16 * 1024 * 1024
_MAGIC = b"PAR1"
_ARROW_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_TAIL = struct.Struct("<I4s")
_READ_BUFFER_BYTES = 1024 * 1024
_REMOTE_BUFFER_BYTES = 4 * 1024 * 1024

DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""What damaged bytes make the library raise; a name that is not UTF-8 is a ValueError."""

Batches = Generator[tuple[int, pa.RecordBatch]]
"""Record batches, each with the row of the file at which it begins."""


class TableFile(Protocol):
    """An open file.

    Attributes:
        schema: of every batch.
        group_starts: the row at which each group begins.
        num_rows: of the file.
    """

    schema: pa.Schema
    group_starts: list[int]
    num_rows: int

    def batches(self, first_group: int, names: list[str]) -> Batches:
        """Batches of the columns `names` from a group to the end. Raises InputError for corrupt data."""

    def close(self) -> None: ...


def open_table(file: InputFile) -> TableFile:
    """Opens the file and checks how it ends. Raises InputError naming it."""
    return ArrowTable(file) if file.format == "arrow" else ParquetTable(file)


def read_footer(file: InputFile) -> bytes:
    """The raw footer of a Parquet file, checked to be there.

    Raises:
        InputError: the file is cut, empty, still being written, or unreadable.
    """
    raw = open_raw(file)
    try:
        start = max(0, file.size - _TAIL.size)
        tail = raw.read_at(start, file.size - start)
        length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
        if magic != _MAGIC or length + _TAIL.size > file.size:
            raise InputError(
                f"{file.path}: no Parquet footer at its end (byte {file.size}), so the file is cut or "
                "still being written; restore it from its source"
            )
        return raw.read_at(file.size - _TAIL.size - length, length)
    finally:
        raw.close()


def footer_hash(file: InputFile) -> str:
    """Hash of the footer, which holds the schema and where and how large every column chunk is."""
    return digest(read_footer(file)).hex()


class ParquetTable:
    """A Parquet file: its groups are the row groups."""

    def __init__(self, file: InputFile) -> None:
        read_footer(file)
        self._path = file.path
        source: str | SeekableFile
        try:
            if file.url is None:
                source, buffer = file.path, _READ_BUFFER_BYTES
            else:
                source, buffer = SeekableFile(open_raw(file), file.size), _REMOTE_BUFFER_BYTES
            # Pages without a checksum, which is what most writers make, are believed.
            self._parquet = pq.ParquetFile(source, buffer_size=buffer, page_checksum_verification=True)
            self.schema: pa.Schema = self._parquet.schema_arrow
            _check_names(self.schema)
        except DAMAGE as e:
            raise InputError(
                f"{file.path}: not readable as Parquet, it is damaged ({_first_line(e)}); "
                "restore it from its source"
            ) from e
        metadata = self._parquet.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self.group_starts = list(accumulate(sizes, initial=0))[:-1]
        self.num_rows = sum(sizes)

    def batches(self, first_group: int, names: list[str]) -> Batches:
        for group in range(first_group, len(self.group_starts)):
            start = self.group_starts[group]
            try:
                for batch in self._parquet.iter_batches(
                    batch_size=self._batch_rows(group), row_groups=[group], use_threads=False
                ):
                    yield start, batch.select(names)
                    start += batch.num_rows
                self._check_rows(group, start)
            except DAMAGE as e:
                raise _corrupt(self._path, f"row group {group} at or after row {start}", e) from e

    def close(self) -> None:
        self._parquet.close(force=True)

    def _check_rows(self, group: int, end: int) -> None:
        """A damaged footer can make columns end early, without any error of the library."""
        rows = self._parquet.metadata.row_group(group).num_rows
        found = end - self.group_starts[group]
        if found != rows:
            raise pa.ArrowInvalid(f"it has {counted(found, 'row')} and the footer says {rows}")

    def _batch_rows(self, group: int) -> int:
        metadata = self._parquet.metadata.row_group(group)
        return _grid(metadata.total_byte_size, metadata.num_rows)


class ArrowTable:
    """An Arrow file or stream, as `datasets.save_to_disk` writes them: its groups are the record batches."""

    def __init__(self, file: InputFile) -> None:
        if file.url is not None:
            raise UsageError(
                f"input.path: {file.path}: Arrow files are read from a local disk only; download it"
            )
        self._path = file.path
        try:
            self._source = pa.memory_map(file.path)
            self._found, self.schema = _arrow_batches(self._source, file.size)
            _check_names(self.schema)
        except DAMAGE as e:
            raise InputError(
                f"{file.path}: not readable as Arrow, it is cut, damaged or still being written "
                f"({_first_line(e)}); restore it from its source"
            ) from e
        sizes = [batch.num_rows for batch in self._found]
        self.group_starts = list(accumulate(sizes, initial=0))[:-1]
        self.num_rows = sum(sizes)

    def batches(self, first_group: int, names: list[str]) -> Batches:
        for group in range(first_group, len(self._found)):
            batch, start = self._found[group], self.group_starts[group]
            # `nbytes` would follow offsets that nobody has checked yet.
            rows = _grid(batch.get_total_buffer_size(), batch.num_rows)
            for offset in range(0, batch.num_rows, rows):
                piece = batch.slice(offset, rows).select(names)
                self._check(piece, group)
                yield start + offset, piece

    def close(self) -> None:
        self._found = []
        self._source.close()

    def _check(self, batch: pa.RecordBatch, group: int) -> None:
        """Offsets that point elsewhere are damage; text that is not UTF-8 is for the reader to judge."""
        try:
            batch.validate()
            try:
                batch.validate(full=True)
            except pa.ArrowInvalid as e:
                if "UTF8" not in str(e):
                    raise
                # The first fault hides all others, so the same bytes are checked again as no text at all.
                for column in batch.columns:
                    column.view(_as_bytes(column.type)).validate(full=True)
        except DAMAGE as e:
            raise _corrupt(self._path, f"record batch {group}", e) from e


def _as_bytes(type_: pa.DataType) -> pa.DataType:
    """The type with binary in place of text; of the same layout."""
    if pa.types.is_string(type_):
        return pa.binary()
    if pa.types.is_large_string(type_):
        return pa.large_binary()
    if pa.types.is_string_view(type_):
        return pa.binary_view()
    if pa.types.is_struct(type_):
        fields = [type_.field(i) for i in range(type_.num_fields)]
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in fields])
    for is_list, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_list(type_):
            return make(type_.value_field.with_type(_as_bytes(type_.value_type)))
    return type_


def _check_names(schema: pa.Schema) -> None:
    """Raises UnicodeDecodeError for a name that is not UTF-8, however deep."""
    waiting = list(schema)
    while waiting:
        field = waiting.pop()
        str(field.name)
        if pa.types.is_nested(field.type):
            waiting += [field.type.field(i) for i in range(field.type.num_fields)]


def _arrow_batches(source: pa.MemoryMappedFile, size: int) -> tuple[list[pa.RecordBatch], pa.Schema]:
    """Touches what describes the batches, not what they hold."""
    if source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC:
        file = pa.ipc.open_file(source)
        return [file.get_batch(i) for i in range(file.num_record_batches)], file.schema
    source.seek(max(0, size - len(_END_OF_STREAM)))
    if source.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
        raise pa.ArrowInvalid("the mark at its end is missing")
    source.seek(0)
    stream = pa.ipc.open_stream(source)
    return list(stream), stream.schema


def _grid(size: int, rows: int) -> int:
    """Rows of a batch, so that it has about 16 MiB at most."""
    return min(MAX_BATCH_ROWS, max(1, _BATCH_BYTES // (size // max(1, rows) + 1)))


def _corrupt(path: str, where: str, error: Exception) -> InputError:
    if "decrypt" in str(error):
        # Asking the library which columns these are would end the process.
        return InputError(
            f"{path}: holds encrypted columns, which batchgen cannot read; write it unencrypted"
        )
    return InputError(
        f"{path}: corrupt data in {where}: {_first_line(error)}; restore the file from its source"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(": ")
