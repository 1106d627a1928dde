"""The final rows of an output folder in another format: one file, a file for each part, or a pipe.

The `export` verb calls it. Rows go through one at a time.
"""

from __future__ import annotations

import difflib
import io
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from batchgen.data.csv_lines import CsvLines
from batchgen.data.passthrough import (
    ArrowPassthrough,
    AsTheyAre,
    NoPassthrough,
    Passthrough,
    TypedPassthrough,
    decide_kinds,
)
from batchgen.data.results import BatchLabels, OutputPlan
from batchgen.data.row import Row
from batchgen.data.row_result import INCLUDED
from batchgen.data.sink import HashingFile, Record, compressed, write_records
from batchgen.data.task_columns import ALL_TASK_COLUMNS
from batchgen.job.files import OS_FILES, storage
from batchgen.job.folder import TEMPORARY, JobFolder
from batchgen.job.folder_rows import FolderRows
from batchgen.types import UsageError

FORMATS = {"parquet": ".parquet", "jsonl": ".jsonl", "csv": ".csv", "openai_batch": ".batch.jsonl"}
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_WINDOW_ROWS = 1000
_WINDOW_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What is to be written.

    Args:
        format: one of `FORMATS`.
        columns: only these, by their names in the output; None for all.
        csv_safe: guard what a spreadsheet would run.
        model: what openai_batch calls the model, where the folder does not say it.
        chat: whether openai_batch has messages, where the folder does not say it.
    """

    format: str
    columns: Sequence[str] | None = None
    csv_safe: bool = False
    model: str = "unknown"
    chat: bool = True


class Exporter:
    """Turns the records of a folder into files of one format.

    Args:
        source: the folder.
        options: what is to be written.

    Raises:
        UsageError: a column that is not there, or none for this format.
    """

    def __init__(self, source: FolderRows, options: ExportOptions) -> None:
        self._source = source
        self._options = options
        self._schema: pa.Schema | None = None
        self._names_seen: dict[str, None] = {}
        self._window: list[Row] = []
        self._look()
        self._plan = self._make_plan()

    def write(self, file: Any, compression: str, parts: Sequence[int] | None = None) -> int:
        """Write rows to an open binary file; returns how many.

        Args:
            file: need not be seekable.
            compression: as `compressed` takes it, or of Parquet.
            parts: only these; None for all.
        """
        records = self._records(self._source.numbers() if parts is None else parts)
        if self._options.format != "csv":
            return write_records(file, records, self._plan, compression=compression)
        rows = 0

        def counted() -> Iterator[Record]:
            nonlocal rows
            for record in records:
                rows += 1
                yield record

        with compressed(file, compression) as out:
            for line in self._csv().lines(counted()):
                out.write(line.encode())
        return rows

    def _records(self, parts: Sequence[int]) -> Iterator[Record]:
        return chain.from_iterable(map(self._source.records, parts))

    def _look(self) -> None:
        """Which columns of the user's there are: by the schema, else by the first rows."""
        size = 0
        ours = set(self._source.plan["names"].values())
        for row, _ in self._records(self._source.numbers()):
            batch = getattr(row.values, "batch", None)
            if batch is not None:
                self._schema = batch.batch.schema
                self._names_seen = dict.fromkeys(name for name in self._schema.names if name not in ours)
                return
            self._names_seen.update(dict.fromkeys(row.values))
            self._window.append(row)
            size += row.size + sum(len(v) for v in row.values.values() if isinstance(v, str))
            if len(self._window) >= _WINDOW_ROWS or size >= _WINDOW_BYTES:
                return

    def _make_plan(self) -> OutputPlan:
        format, columns, plan = self._options.format, self._options.columns, self._source.plan
        names: dict[str, str] = dict(plan["names"])
        if format == "openai_batch":
            if columns is not None:
                raise UsageError("--columns: the format openai_batch has its own members; leave it out")
            if plan.get("dialogues"):
                raise UsageError(
                    "--format: a line of the format openai_batch holds one answer, and rows of this job have "
                    "several; use parquet, jsonl or csv"
                )
            if any(key in ALL_TASK_COLUMNS for key in names):
                raise UsageError(
                    "--format: openai_batch holds answers, and the task of this job gives none; use parquet, "
                    "jsonl or csv"
                )
            samples = plan.get("samples") and "list"
            return OutputPlan(format, _standard(names), NoPassthrough(), self._labels(), samples=samples)
        for column in columns or ():
            self._require(column, [*names.values(), *self._names_seen])
        if columns is not None:
            names = {key: name for key, name in names.items() if name in columns}
        dialogues = plan.get("dialogues", False)
        size = plan.get("embedding_size")
        passthrough = self._passthrough(columns)
        return OutputPlan(
            format,
            names,
            passthrough,
            dialogues=dialogues,
            embedding_size=size,
            samples=plan.get("samples"),
            reasoning_tokens=plan.get("reasoning_tokens", False),
        )

    def _passthrough(self, columns: Sequence[str] | None) -> Passthrough:
        going = [name for name in self._names_seen if columns is None or name in columns]
        if self._schema is not None:
            return ArrowPassthrough(pa.schema([self._schema.field(name) for name in going]))
        if self._options.format == "parquet":
            kinds = decide_kinds(self._window, going)
            taken = {*self._names_seen, *self._source.plan["names"].values()}
            return TypedPassthrough(kinds, _free("extra", taken), columns, ())
        return AsTheyAre(columns)

    def _csv(self) -> CsvLines:
        columns = self._options.columns
        going = [name for name in self._names_seen if columns is None or name in columns]
        rest = None
        if self._schema is None and columns is None and self._source.plan["format"] == "jsonl":
            rest = _free("extra", {*going, *self._plan.names.values()})
        members = self._plan.passthrough.members  # type: ignore[union-attr]
        plan = self._plan
        return CsvLines(
            plan.names,
            members,
            going,
            rest,
            self._options.csv_safe,
            plan.samples,
            reasoning_tokens=plan.reasoning_tokens,
        )

    def _require(self, column: str, known: Sequence[str]) -> None:
        if column not in known:
            near = difflib.get_close_matches(column, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"--columns: the output has no column {column!r}; {hint}")

    def _labels(self) -> BatchLabels:
        pinned = self._source.plan.get("batch")
        if pinned is not None:
            return BatchLabels(**pinned)
        digests = self._source.manifest.digests
        identity = sha256(f"{digests['input']}/{digests['result']}".encode()).hexdigest()[:16]
        return BatchLabels(identity, self._options.model, self._options.chat)


def _standard(names: Mapping[str, str]) -> dict[str, str]:
    return {key: key for key in names if key not in (*INCLUDED, "sample")}


def _free(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def compression_of(format: str, path: Path) -> str:
    """By the name of the file; Parquet compresses inside."""
    return "zstd" if format == "parquet" else _COMPRESSED.get(path.suffix, "none")


def export_to_stream(source: FolderRows, options: ExportOptions, stream: BinaryIO) -> int:
    """Write all rows to a pipe; returns how many."""
    return Exporter(source, options).write(
        _Forward(stream), "zstd" if options.format == "parquet" else "none"
    )


def export_to_file(source: FolderRows, options: ExportOptions, path: Path, *, force: bool) -> int:
    """Write all rows to one file, entirely or not at all; returns how many.

    Raises:
        UsageError: the file exists and `force` is not given.
        StorageError: it cannot be written; what was there is still there.
    """
    return _write_file(Exporter(source, options), path, compression_of(options.format, path), None, force)


def export_to_folder(source: FolderRows, options: ExportOptions, folder: Path, *, force: bool) -> int:
    """Write a file for each part, by our own names; returns the number of rows."""
    exporter = Exporter(source, options)
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    rows = 0
    for part in source.numbers():
        path = folder / f"part-{part:06d}{FORMATS[options.format]}"
        rows += _write_file(exporter, path, compression_of(options.format, path), [part], force)
    return rows


def _write_file(
    exporter: Exporter, path: Path, compression: str, parts: list[int] | None, force: bool
) -> int:
    _refuse_results(path)
    if path.exists() and not force:
        raise UsageError(f"{path} exists; choose another --output, or replace it with --force")
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:12]}")
    try:
        with HashingFile(temporary) as file:
            rows = exporter.write(file, compression, parts)
            file.sync()
        with storage(path):
            os.replace(temporary, path)
            OS_FILES.fsync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return rows


def _refuse_results(path: Path) -> None:
    """Raises UsageError for a file that belongs to a job, whatever force is used."""
    place = path.resolve()
    for folder in map(JobFolder, place.parents):
        # Whoever reads the data set takes every file under data/ for a part of it.
        own = folder.wrote(str(place)) or place.is_relative_to(folder.data)
        if folder.manifest.exists() and own:
            raise UsageError(f"{path} is where a job keeps its own files; choose another --output")


class _Forward(io.RawIOBase):
    """A pipe that knows how much went through it, which is all that writing Parquet asks for."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._written += len(view)
        return len(view)
