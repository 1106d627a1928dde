"""Results back out of a committed part, for a part that is opened again and for `verify`."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from batchgen.data.openai_logprobs import read_logprobs
from batchgen.data.packed_logprobs import PackedLogprobs
from batchgen.data.row import Position, Row
from batchgen.data.row_result import INCLUDED, OF_SAMPLES, TOKEN_IDS, RowResult, imploded, pack_ids
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
    samples = plan.get("samples")
    wanted = None if only is None else {*only, "row", "sample"}
    names = {key: name for key, name in plan["names"].items() if wanted is None or key in wanted}
    with storage(path, action="read"):
        if plan["format"] == "openai_batch":
            yield from (_batch_row(line, lists=samples is not None) for line in json_rows(path))
        else:
            values = _parquet_rows(path, names) if path.suffix == ".parquet" else json_rows(path)
            rows = (_part_row(value, names, lists=samples == "list") for value in values)
            yield from _whole_rows(rows) if samples == "explode" else rows


def read_records(path: Path, plan: Mapping[str, Any]) -> Iterator[Record]:
    """The same rows as the sink takes them: with the columns of the user's, as they are in the part.

    Raises:
        StorageError: the file cannot be read.
        ValueError: its content is not what a part holds.
    """
    with storage(path, action="read"):
        if plan["format"] == "parquet":
            yield from records_of(_parquet_batches(path, None), plan["names"], plan.get("samples"))
        elif plan["format"] == "openai_batch":
            for line in json_rows(path):
                found = _batch_row(line, lists=plan.get("samples") is not None)
                yield _row(found, {}), found.result
        else:
            records = _line_records(path, plan["names"], lists=plan.get("samples") == "list")
            yield from _whole_records(records) if plan.get("samples") == "explode" else records


def _line_records(path: Path, names: Mapping[str, str], *, lists: bool) -> Iterator[Record]:
    ours = set(names.values())
    for line in json_rows(path):
        found = _part_row(line, names, lists=lists)
        rest = {name: value for name, value in line.items() if name not in ours}
        yield _row(found, rest), found.result


def records_of(
    batches: Iterable[pa.RecordBatch], names: Mapping[str, str], samples: str | None
) -> Iterator[Record]:
    """The rows of batches of a Parquet part.

    Args:
        batches: of its columns.
        names: of `OutputPlan`.
        samples: of `OutputPlan`.

    Raises:
        ValueError: a record of a sample is not in its place.
    """
    each = (_batch_records(batch, names, lists=samples == "list") for batch in batches)
    records = chain.from_iterable(each)
    return _whole_records(records) if samples == "explode" else records


def _whole_records(records: Iterable[Record]) -> Iterator[Record]:
    for _, found in groupby(records, key=lambda record: record[0].ordinal):
        rows, results = zip(*found, strict=True)
        yield rows[0], imploded(results)


def _whole_rows(rows: Iterable[PartRow]) -> Iterator[PartRow]:
    for _, found in groupby(rows, key=attrgetter("row")):
        records = list(found)
        yield records[0]._replace(result=imploded([record.result for record in records]))


def _batch_records(batch: pa.RecordBatch, names: Mapping[str, str], *, lists: bool) -> Iterator[Record]:
    from batchgen.data.table_reader import ArrowBatch, ArrowRow

    ours = set(names.values())
    rest = ArrowBatch(batch.select([name for name in batch.schema.names if name not in ours]))
    own = batch.select([name for name in batch.schema.names if name in ours])
    for index, values in enumerate(own.to_pylist()):
        found = _part_row(values, names, lists=lists)
        yield _row(found, ArrowRow(rest, index), rest.row_bytes), found.result


def _row(found: PartRow, values: Mapping[str, Any], size: int = 0) -> Row:
    return Row(found.row, found.id, values, None, 0, "", b"", Position(), size=size)


def _part_row(values: dict[str, Any], names: Mapping[str, str], *, lists: bool) -> PartRow:
    def ours(key: str) -> Any:
        return values.get(names[key]) if key in names else None

    error, usage = ours("error"), ours("usage")
    result = RowResult(
        status=ours("status"),
        generated_text=ours("generated_text"),
        finish_reason=ours("finish_reason"),
        stop_reason=ours("stop_reason"),
        error=error and RowError(ErrorClass(error["class"]), error["message"]),
        usage=usage and _counts(usage, usage),
        included=_included(ours, lists=lists) or None,
        sample=ours("sample"),
    )
    return PartRow(ours("row"), ours("id"), result)


def _included(ours: Callable[[str], Any], *, lists: bool) -> dict[str, Any]:
    found = {key: ours(key) for key in (*INCLUDED, *ALL_TASK_COLUMNS)}
    return {key: _reported(key, value, lists=lists) for key, value in found.items() if value is not None}


def _reported(key: str, value: Any, *, lists: bool = False) -> Any:
    """A value of the output as a worker reports it; with `lists`, what each sample has is one."""
    if value is None:
        return None
    if lists and key in OF_SAMPLES:
        return [_reported(key, one) for one in value]
    if key in TOKEN_IDS:
        return pack_ids(value)
    if key == "embedding":
        return pack_vector(value)
    if key == "scores":
        return [[one["label"], one["score"]] for one in value]
    if key == "logprobs":
        return PackedLogprobs.from_records(value).pack()
    return plain_logprobs(value) if key == "prompt_logprobs" else value


def _batch_row(line: dict[str, Any], *, lists: bool) -> PartRow:
    """A row of the format openai_batch; its ordinal is part of its id.

    Args:
        line: as it was written.
        lists: whether rows of the job have lists of samples.
    """
    row, error, response = int(line["id"].rpartition("_")[2]), line["error"], line["response"]
    if response is None:
        skipped = error["code"] == Status.SKIPPED
        status = Status.SKIPPED if skipped else Status.ERROR
        known = _why(error["message"]) if skipped else RowError(ErrorClass(error["code"]), error["message"])
        return PartRow(row, line["custom_id"], RowResult(status.value, error=known))
    choices, usage = response["body"]["choices"], response["body"]["usage"]
    counts = _counts(usage, usage.get("completion_tokens_details", {}))
    samples = [_choice(choice, counts) for choice in choices]
    if not lists:
        return PartRow(row, line["custom_id"], samples[0])
    numbered = [one._replace(sample=choice["index"]) for one, choice in zip(samples, choices, strict=True)]
    return PartRow(row, line["custom_id"], imploded(numbered))


def _choice(choice: Mapping[str, Any], usage: tuple[int, ...]) -> RowResult:
    message = choice.get("message", choice)
    text, reasoning = message.get("content", message.get("text")), message.get("reasoning_content")
    included = {} if reasoning is None else {"reasoning": reasoning}
    if choice["logprobs"] is not None:
        included["logprobs"] = read_logprobs(choice["logprobs"]).pack()
    reasons = choice["finish_reason"], choice["stop_reason"]
    return RowResult("ok", text, *reasons, None, usage, included or None)


def _counts(usage: Mapping[str, Any], details: Mapping[str, Any]) -> tuple[int, ...]:
    """As of `RowResult.usage`; reasoning is counted in folders of jobs that split it off."""
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage.get("truncated_tokens", 0)
    return (*counts, details["reasoning_tokens"]) if "reasoning_tokens" in details else counts


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
