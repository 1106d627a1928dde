"""Small real files for the tests of the data layer."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from batchgen.data.results import OutputPlan, RowResult
from batchgen.data.row import Row
from batchgen.data.sink import WrittenPart, write_part
from batchgen.data.source import InputSet, open_input

TEXT_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.zst")


def compress(data: bytes, suffix: str) -> bytes:
    """`data` as the file of this suffix holds it, cut into several gzip members or zstd frames."""
    kind = suffix.rpartition(".")[2]
    if kind not in {"gz", "bz2", "zst"}:
        return data
    middle = len(data) // 2
    pieces = [data[:middle], data[middle:]]
    if kind == "gz":
        return b"".join(gzip.compress(piece, mtime=0) for piece in pieces)
    if kind == "bz2":
        return b"".join(map(bz2.compress, pieces))
    return b"".join(zstandard.ZstdCompressor(write_checksum=True).compress(piece) for piece in pieces)


def write(folder: Path, name: str, data: bytes | str) -> str:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def jsonl(folder: Path, *lines: str | bytes, name: str = "in.jsonl", **options: Any) -> InputSet:
    """An input of one JSONL file; each line gets a newline."""
    data = b"".join((x.encode() if isinstance(x, str) else x) + b"\n" for x in lines)
    return open_input(write(folder, name, data), **options)


def parquet(folder: Path, table: pa.Table, name: str = "in.parquet", **options: Any) -> str:
    path = str(folder / name)
    pq.write_table(table, path, **options)
    return path


def result(row: Row, text: str = "answer") -> RowResult:
    """A result that is a function of the row: its error, or one and the same text."""
    if row.error is not None:
        return RowResult.from_error(row.error)
    return RowResult("ok", text, "stop", None, None, (3, 1, 0))


def write_rows(path: Path, rows: Iterable[Row], plan: OutputPlan, **options: Any) -> WrittenPart:
    return write_part(path, ((row, result(row)) for row in rows), plan, **options)


def classes(rows: Iterable[Row]) -> list[str | None]:
    """The error class of each row, None where it has none."""
    return [None if row.error is None else row.error.error_class.value for row in rows]
