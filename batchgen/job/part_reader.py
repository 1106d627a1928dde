"""Results back out of a committed part, for a part that is opened again and for `verify`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.data.results import RowResult
from batchgen.job.files import storage
from batchgen.types import ErrorClass, RowError

_READ_BYTES = 1024 * 1024


class PartRow(NamedTuple):
    """Our own columns of one row."""

    row: int
    id: str
    result: RowResult


def read_part(path: Path, names: Mapping[str, str]) -> Iterator[PartRow]:
    """Rows of a part in file order, lazily.

    Args:
        path: of the part.
        names: `OutputPlan.names`: our columns to what they are called.

    Raises:
        StorageError: the file cannot be read.
        ValueError: its content is not what a part holds; `verify` reports it.
    """
    rows = _parquet_rows(path, names) if path.suffix == ".parquet" else _json_rows(path)
    with storage(path, action="read"):
        for values in rows:
            yield _part_row(values, names)


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
    )
    return PartRow(ours("row"), ours("id"), result)


def _parquet_rows(path: Path, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=list(names.values())):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not readable as Parquet: {error}") from error


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    import zstandard

    from batchgen.data.exact_json import LineDecoder
    from batchgen.types import RowFailure

    decoder = LineDecoder(replace_invalid=False)
    try:
        with path.open("rb") as raw:
            stream: Any = raw
            if path.suffix == ".zst":
                reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
                stream = io.BufferedReader(reader, _READ_BYTES)
            for line in stream:
                yield decoder.decode(line).values
    except (zstandard.ZstdError, RowFailure) as error:
        raise ValueError(f"{path}: not readable: {error}") from error
