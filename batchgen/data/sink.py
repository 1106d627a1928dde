"""Writes one part of the output. `job/parts` gives the temporary path and renames it afterwards.

Equal rows and results give equal bytes, for equal versions of batchgen, pyarrow and zstandard: row groups are
cut by rows and by bytes of content, and neither paths nor times are written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from batchgen.data.record_columns import result_arrays
from batchgen.data.record_lines import liner
from batchgen.data.results import OutputPlan, RowResult
from batchgen.data.row import DIGEST_BYTES, Row
from batchgen.grammar import counted
from batchgen.types import StorageError

GROUP_ROWS = 1000
GROUP_BYTES = 4 * 1024 * 1024
_LEVELS: dict[str, Any] = {"zstd": 3, "gzip": 6, "snappy": None, "none": None}
_SUFFIXES = {"zstd": ".jsonl.zst", "gzip": ".jsonl.gz", "none": ".jsonl"}
_LINE_CHARACTERS = 256 * 1024

Record = tuple[Row, RowResult]
OnGroup = Callable[[Sequence[Row], Sequence[RowResult]], None]


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """Rows, bytes and content hash (blake2b-16, hex) of a finished file."""

    rows: int
    bytes: int
    digest: str


def part_suffix(format: str, compression: str) -> str:
    """`.parquet`, `.jsonl`, `.jsonl.zst` or `.jsonl.gz`."""
    return ".parquet" if format == "parquet" else _SUFFIXES[compression]


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
    group_rows: int = GROUP_ROWS,
    group_bytes: int = GROUP_BYTES,
    on_group: OnGroup = lambda rows, results: None,
    disk: Disk | None = None,
) -> WrittenPart:
    """Writes `records` to `path`, flushed to disk; keeps at most one row group in memory.

    Args:
        path: a temporary file; removed again when anything fails.
        records: rows with their results, in input order.
        plan: the columns.
        compression: zstd, gzip or none; of Parquet also snappy.
        group_rows: most rows in one Parquet row group.
        group_bytes: bytes of input and results with which a row group ends, even if it is of one row.
        on_group: called with the rows and results of each group.
        disk: how to reach it; None: directly.

    Raises:
        StorageError: the file cannot be written.
        ValueError: the rows are not in input order.
        Whatever `records` raises.
    """
    with HashingFile(path, disk) as file:
        try:
            rows = write_records(
                file,
                records,
                plan,
                compression=compression,
                group_rows=group_rows,
                group_bytes=group_bytes,
                on_group=on_group,
            )
            file.sync()
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
    return WrittenPart(rows, file.size, file.digest())


def write_records(
    file: Any,
    records: Iterable[Record],
    plan: OutputPlan,
    *,
    compression: str = "zstd",
    group_rows: int = GROUP_ROWS,
    group_bytes: int = GROUP_BYTES,
    on_group: OnGroup = lambda rows, results: None,
) -> int:
    """The same to an open binary file, which need not be seekable; returns the number of rows."""
    groups = _Groups(records, group_rows, group_bytes, on_group)
    if plan.format == "parquet":
        _write_parquet(file, groups, plan, compression)
    else:
        _write_jsonl(file, groups, plan, compression)
    return groups.rows


class _Groups:
    """Cuts records into row groups, counting them; rows out of order must not reach the disk."""

    def __init__(self, records: Iterable[Record], most_rows: int, most_bytes: int, on_group: OnGroup) -> None:
        self._on_group = on_group
        self._records = iter(records)
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._last = -1
        self.rows = 0

    def __iter__(self) -> Iterator[tuple[list[Row], list[RowResult]]]:
        while True:
            rows, results = self._next()
            if not rows:
                return
            self._on_group(rows, results)
            yield rows, results

    def _next(self) -> tuple[list[Row], list[RowResult]]:
        rows: list[Row] = []
        results: list[RowResult] = []
        size, last = 0, self._last
        for row, result in self._records:
            if row.ordinal <= last:
                raise ValueError(
                    f"row {row.ordinal} comes after row {last}; a part holds rows in input order"
                )
            last = row.ordinal
            rows.append(row)
            results.append(result)
            text = result.generated_text
            if text is not None:
                size += len(text) if type(text) is str else sum(map(len, text))
            size += row.size
            if result.included is not None:
                size += result.included_size
            if len(rows) >= self._most_rows or size >= self._most_bytes:
                break
        self._last = last
        self.rows += len(rows)
        return rows, results


def _write_parquet(file: Any, groups: _Groups, plan: OutputPlan, compression: str) -> None:
    schema = plan.schema()
    writer = pq.ParquetWriter(
        file,
        schema,
        compression=compression,
        compression_level=_LEVELS[compression],
        use_dictionary=_repeating(plan, schema),
    )
    try:
        for rows, results in groups:
            table = pa.Table.from_arrays(result_arrays(plan, rows, results), schema=schema)
            writer.write_table(table, row_group_size=len(table))
    except BaseException:
        # Closing writes the footer, which fails too when writing does; the first error is the one to tell.
        with contextlib.suppress(StorageError, pa.ArrowException):
            writer.close()
        raise
    writer.close()


def _repeating(plan: OutputPlan, schema: pa.Schema) -> list[str]:
    """Columns in which values may occur many times; a dictionary of texts that differ only takes space."""
    unique = {plan.names.get(key) for key in ("row", "id", "sample", "generated_text", "prompt")}
    return [field.name for field in schema if field.name not in unique and not pa.types.is_nested(field.type)]


def _write_jsonl(file: Writable, groups: _Groups, plan: OutputPlan, compression: str) -> None:
    with compressed(file, compression) as out:
        for text in _texts(groups, plan):
            out.write(text.encode())


def _texts(groups: _Groups, plan: OutputPlan) -> Iterator[str]:
    """Lines joined to texts of some size."""
    line_of = liner(plan)
    lines: list[str] = []
    size = 0
    for rows, results in groups:
        for row, result in zip(rows, results, strict=True):
            line = line_of(row, result)
            lines.append(line)
            size += len(line)
            if size >= _LINE_CHARACTERS:
                yield "\n".join([*lines, ""])
                lines.clear()
                size = 0
    if lines:
        yield "\n".join([*lines, ""])


class Writable(Protocol):
    def write(self, data: bytes, /) -> Any: ...


@contextlib.contextmanager
def compressed(file: Writable, compression: str) -> Iterator[Writable]:
    """What to write plain bytes to, so that `file` gets them compressed; the file stays open.

    Args:
        file: gets the bytes.
        compression: zstd, gzip or none. No time and no name goes into the bytes.
    """
    if compression == "zstd":
        compressor = zstandard.ZstdCompressor(level=_LEVELS["zstd"], write_checksum=True)
        with compressor.stream_writer(cast(IO[bytes], file), closefd=False) as zstd:
            yield zstd
    elif compression == "gzip":
        gzip = _Gzip(file)
        yield gzip
        gzip.finish()
    else:
        yield file


class _Gzip:
    """A gzip stream; the standard library's own writes the time."""

    def __init__(self, file: Writable) -> None:
        self._file = file
        self._deflate = zlib.compressobj(_LEVELS["gzip"], zlib.DEFLATED, wbits=31)

    def write(self, data: bytes, /) -> None:
        self._file.write(self._deflate.compress(data))

    def finish(self) -> None:
        self._file.write(self._deflate.flush())


class Disk(Protocol):
    """The system calls that can fail half-way; `batchgen.job.files.FileOps` is one that tests make fail."""

    def create(self, path: Path) -> int: ...
    def write(self, fd: int, data: bytes) -> int: ...
    def fsync(self, fd: int) -> None: ...


class _OsDisk:
    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: bytes) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)


class HashingFile(io.RawIOBase):
    """A new file that counts and hashes what is written, so that nothing has to be read back."""

    def __init__(self, path: str | os.PathLike[str], disk: Disk | None = None) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._disk = disk or _OsDisk()
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.size = 0
        self._fd = -1
        with self._storage_errors():
            self._fd = self._disk.create(Path(path))

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._storage_errors():
            written = 0
            while written < len(view):
                # A regular file takes nothing only where nothing fits.
                taken = self._disk.write(self._fd, view[written:])  # type: ignore[arg-type]
                if taken <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += taken
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def sync(self) -> None:
        with self._storage_errors():
            self._disk.fsync(self._fd)

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
                f"{self._path}: cannot be written after {counted(self.size, 'byte')}: {e.strerror}; free "
                "space or fix the permission, then run the same command again"
            ) from e
