"""Writes one part of the output. `job/parts` gives the temporary path and renames it afterwards.

Equal rows and results give equal bytes, for equal versions of batchgen, pyarrow and zstandard: row groups are
cut by row count, and neither paths nor times are written.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, Self, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from batchgen.data.exact_json import encode
from batchgen.data.results import OutputPlan, RowResult, result_arrays, result_members
from batchgen.data.row import DIGEST_BYTES, Row
from batchgen.types import StorageError, UsageError

ROW_GROUP_ROWS = 1000
ZSTD_LEVEL = 3
COMPRESSIONS = ("zstd", "none")
_LINES_AT_ONCE = 64

Record = tuple[Row, RowResult]


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """Rows, bytes and content hash (blake2b-16, hex) of a finished file."""

    rows: int
    bytes: int
    digest: str


def part_suffix(format: str, compression: str) -> str:
    """`.parquet`, `.jsonl` or `.jsonl.zst`."""
    if format == "parquet":
        return ".parquet"
    return ".jsonl.zst" if compression == "zstd" else ".jsonl"


def warm_up() -> None:
    """Load what writing a part needs (pyarrow imports pandas when it converts the first list)."""
    table = pa.table({"row": pa.array([0], pa.int64())})
    pq.write_table(table, io.BytesIO(), compression="zstd")


def write_part(
    path: str | os.PathLike[str],
    records: Iterable[Record],
    plan: OutputPlan,
    *,
    compression: str = "zstd",
    row_group_rows: int = ROW_GROUP_ROWS,
) -> WrittenPart:
    """Writes `records` to `path`, flushed to disk; keeps at most one row group in memory.

    Args:
        path: a temporary file; removed again when anything fails.
        records: rows with their results, in input order.
        plan: the columns.
        compression: zstd or none.
        row_group_rows: rows in one Parquet row group.

    Raises:
        StorageError: the file cannot be written.
        ValueError: the rows are not in input order.
        Whatever `records` raises.
    """
    if compression not in COMPRESSIONS:
        raise UsageError(f"output.compression: {compression!r} is not supported; use zstd or none")
    ordered = _Ordered(records)
    with _HashingFile(path) as file:
        try:
            if plan.format == "parquet":
                _write_parquet(file, ordered, plan, compression, row_group_rows)
            else:
                _write_jsonl(file, ordered, plan, compression)
            file.sync()
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
    return WrittenPart(ordered.rows, file.size, file.digest())


def _write_parquet(
    file: _HashingFile, records: Iterator[Record], plan: OutputPlan, compression: str, group_rows: int
) -> None:
    schema = plan.schema()
    level = ZSTD_LEVEL if compression == "zstd" else None
    writer = pq.ParquetWriter(file, schema, compression=compression, compression_level=level)
    try:
        while group := list(islice(records, group_rows)):
            rows, results = zip(*group, strict=True)
            table = pa.Table.from_arrays(result_arrays(plan, rows, results), schema=schema)
            writer.write_table(table, row_group_size=group_rows)
    except BaseException:
        # Closing writes the footer, which fails too when writing does; the first error is the one to tell.
        with contextlib.suppress(StorageError, pa.ArrowException):
            writer.close()
        raise
    writer.close()


def _write_jsonl(file: _HashingFile, records: Iterator[Record], plan: OutputPlan, compression: str) -> None:
    if compression == "none":
        _write_lines(file, records, plan)
        return
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
    with compressor.stream_writer(cast(IO[bytes], file), closefd=False) as compressed:
        _write_lines(compressed, records, plan)


def _write_lines(out: Any, records: Iterator[Record], plan: OutputPlan) -> None:
    while group := list(islice(records, _LINES_AT_ONCE)):
        lines = (encode(result_members(plan, row, result)) for row, result in group)
        out.write("".join(f"{line}\n" for line in lines).encode())


class _Ordered:
    """Passes records on, counting them; rows out of order are a bug that must not reach the disk."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = iter(records)
        self._last = -1
        self.rows = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        record = next(self._records)
        ordinal = record[0].ordinal
        if ordinal <= self._last:
            raise ValueError(f"row {ordinal} comes after row {self._last}; a part holds rows in input order")
        self._last = ordinal
        self.rows += 1
        return record


class _HashingFile(io.RawIOBase):
    """A new file that counts and hashes what is written, so that nothing has to be read back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.size = 0
        self._fd = -1
        with self._storage_errors():
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._storage_errors():
            written = 0
            while written < len(view):
                written += os.write(self._fd, view[written:])
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def sync(self) -> None:
        with self._storage_errors():
            os.fsync(self._fd)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._fd >= 0:
                with self._storage_errors():
                    os.close(self._fd)

    def digest(self) -> str:
        return self._hash.hexdigest()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise StorageError(
                f"{self._path}: cannot be written after {self.size} bytes: {e.strerror}; free space or fix "
                "the permission, then run the same command again"
            ) from e
