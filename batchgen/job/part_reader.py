"""Results back out of a committed part, for a part that is opened again and for `verify`."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from batchgen.data.openai_logprobs import read_logprobs
from batchgen.data.packed_logprobs import PackedLogprobs
from batchgen.data.row import Position, Row
from batchgen.data.row_result import INCLUDED, TOKEN_IDS, RowResult, pack_ids
from batchgen.data.task_columns import ALL_TASK_COLUMNS, pack_vector, plain_logprobs
from batchgen.job.files import OS_FILES, open_existing, storage
from batchgen.types import ErrorClass, RowError, Status

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.data.sink import Record

_READ_BYTES = 1024 * 1024


class PartRow(NamedTuple):
    """Our own columns of one row."""

    row: int
    id: str
    result: RowResult


def read_part(path: Path, plan: Mapping[str, Any], only: Collection[str] | None = None) -> Iterator[PartRow]:
    """Rows of a part in file order, lazily.

    Args:
        path: of the part.
        plan: `OutputPlan.to_json()`: its format, and what our columns are called.
        only: those of our columns that are needed; None for all.

    Raises:
        StorageError: the file cannot be read.
        ValueError: its content is not what a part holds; `verify` reports it.
    """
    names = {key: name for key, name in plan["names"].items() if only is None or key in only}
    with storage(path, action="read"):
        if plan["format"] == "openai_batch":
            yield from map(_batch_row, json_rows(path))
        else:
            rows = _parquet_rows(path, names) if path.suffix == ".parquet" else json_rows(path)
            yield from (_part_row(values, names) for values in rows)


def read_records(path: Path, plan: Mapping[str, Any]) -> Iterator[Record]:
    """The same rows as the sink takes them: with the columns of the user's, as they are in the part.

    Raises:
        StorageError: the file cannot be read.
        ValueError: its content is not what a part holds.
    """
    names = plan["names"]
    with storage(path, action="read"):
        if plan["format"] == "parquet":
            for batch in _parquet_batches(path, None):
                yield from records_of(batch, names)
        elif plan["format"] == "openai_batch":
            for line in json_rows(path):
                found = _batch_row(line)
                yield _row(found, {}), found.result
        else:
            ours = set(names.values())
            for line in json_rows(path):
                found = _part_row(line, names)
                rest = {name: value for name, value in line.items() if name not in ours}
                yield _row(found, rest), found.result


def records_of(batch: pa.RecordBatch, names: Mapping[str, str]) -> Iterator[Record]:
    """The records of a batch of a Parquet part."""
    from batchgen.data.table_reader import ArrowBatch, ArrowRow

    ours = set(names.values())
    rest = ArrowBatch(batch.select([name for name in batch.schema.names if name not in ours]))
    own = batch.select([name for name in batch.schema.names if name in ours])
    for index, values in enumerate(own.to_pylist()):
        found = _part_row(values, names)
        yield _row(found, ArrowRow(rest, index), rest.row_bytes), found.result


def _row(found: PartRow, values: Mapping[str, Any], size: int = 0) -> Row:
    return Row(found.row, found.id, values, None, 0, "", b"", Position(), size=size)


def _part_row(values: dict[str, Any], names: Mapping[str, str]) -> PartRow:
    def ours(key: str) -> Any:
        return values.get(names[key]) if key in names else None

    error, usage = ours("error"), ours("usage")
    result = RowResult(
        status=ours("status"),
        generated_text=ours("generated_text"),
        finish_reason=ours("finish_reason"),
        stop_reason=ours("stop_reason"),
        error=error and RowError(ErrorClass(error["class"]), error["message"]),
        usage=usage and (usage["prompt_tokens"], usage["completion_tokens"], usage["truncated_tokens"]),
        included=_included(ours) or None,
    )
    return PartRow(ours("row"), ours("id"), result)


def _included(ours: Callable[[str], Any]) -> dict[str, Any]:
    found = {key: ours(key) for key in (*INCLUDED, *ALL_TASK_COLUMNS)}
    return {key: _reported(key, value) for key, value in found.items() if value is not None}


def _reported(key: str, value: Any) -> Any:
    """A value of the output as a worker reports it."""
    if key in TOKEN_IDS:
        return pack_ids(value)
    if key == "embedding":
        return pack_vector(value)
    if key == "scores":
        return [[one["label"], one["score"]] for one in value]
    if key == "logprobs":
        return PackedLogprobs.from_records(value).pack()
    return plain_logprobs(value) if key == "prompt_logprobs" else value


def _batch_row(line: dict[str, Any]) -> PartRow:
    """A row of the format openai_batch; its ordinal is part of its id."""
    row, error, response = int(line["id"].rpartition("_")[2]), line["error"], line["response"]
    if response is None:
        skipped = error["code"] == Status.SKIPPED
        status = Status.SKIPPED if skipped else Status.ERROR
        known = _why(error["message"]) if skipped else RowError(ErrorClass(error["code"]), error["message"])
        return PartRow(row, line["custom_id"], RowResult(status.value, error=known))
    choice, usage = response["body"]["choices"][0], response["body"]["usage"]
    message = choice.get("message", choice)
    text, reasoning = message.get("content", message.get("text")), message.get("reasoning_content")
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage.get("truncated_tokens", 0)
    reasons = choice["finish_reason"], choice["stop_reason"]
    included = {} if reasoning is None else {"reasoning": reasoning}
    if choice["logprobs"] is not None:
        included["logprobs"] = read_logprobs(choice["logprobs"]).pack()
    result = RowResult("ok", text, *reasons, None, counts, included or None)
    return PartRow(row, line["custom_id"], result)


def _why(message: str) -> RowError | None:
    """Why a row was left out, which its line says as `class: message`."""
    name, colon, text = message.partition(": ")
    return RowError(ErrorClass(name), text) if colon and name in set(ErrorClass) else None


def _parquet_rows(path: Path, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for batch in _parquet_batches(path, list(names.values())):
        yield from batch.to_pylist()


def _parquet_batches(path: Path, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield from file.iter_batches(columns=columns, row_groups=[group])
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not readable as Parquet: {error}") from error


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL part. Raises ValueError where it is not one."""
    from batchgen.data.exact_json import LineDecoder
    from batchgen.types import RowFailure

    decoder = LineDecoder(replace_invalid=False)
    try:
        with open_lines(path) as lines:
            for line in lines:
                yield decoder.decode(line).values
    except RowFailure as error:
        raise ValueError(f"{path}: not readable: {error}") from error


@contextlib.contextmanager
def open_lines(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed lines of a JSONL part. Raises ValueError where they cannot be decompressed."""
    import zstandard

    try:
        with contextlib.ExitStack() as stack:
            stream: Any = stack.enter_context(os.fdopen(open_existing(OS_FILES, path), "rb"))
            if path.suffix == ".zst":
                reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
                stream = io.BufferedReader(reader, _READ_BYTES)
            elif path.suffix == ".gz":
                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
            yield stream
    except (zstandard.ZstdError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not readable: {error}") from error
