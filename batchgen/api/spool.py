"""The columns that a job reads, copied out of a data set into a file: the input of the job behind `map`.

A copy, so that the job can be continued by another process: it knows its input by content, whatever the data
set's own files and caches do.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.cache import cache_dir
from batchgen.job.files import storage
from batchgen.job.parts import file_digest
from batchgen.types import UsageError

if TYPE_CHECKING:
    import datasets

ID = "_batchgen_row"
"""The column with the row's number, its id: a data set may have ids that occur twice."""

_BATCH_ROWS = 1000
_DIGEST_BYTES = 10


@dataclass(frozen=True, slots=True)
class Spool:
    """A finished copy.

    Args:
        path: of the file.
        digest: of its bytes; equal rows give equal bytes.
    """

    path: Path
    digest: str

    def kept_in(self, folder: Path) -> Path:
        """Where `keep` puts the file."""
        return folder / f"input-{self.digest}{self.path.suffix}"

    def keep(self, folder: Path) -> Path:
        """Move the file to `folder`, unless it is there already; returns its path there."""
        kept = self.kept_in(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # A file with a new time stamp would look like a changed input.
        if not kept.exists():
            os.replace(self.path, kept)
        return kept


@contextmanager
def new_workplace(output: Path | None) -> Iterator[Path]:
    """A folder that is gone afterwards, on the file system of the call's folder so that files can move there.

    Args:
        output: the call's folder, made if it is not there; None: one of the cache.

    Raises:
        StorageError: it cannot be made.
    """
    place = output or cache_dir() / "map"
    with storage(place):
        place.mkdir(parents=True, exist_ok=True)
        workplace = tempfile.TemporaryDirectory(prefix=".new-", dir=place)
    with workplace as folder:
        yield Path(folder)


def map_folder(call: Mapping[str, Any], spool: Spool) -> Path:
    """Where the job of a call over these rows is kept: calls with equal results find it again."""
    values = {key: call[key] for key in call.keys() - {"run", "engine"}}
    text = json.dumps(values, sort_keys=True)
    key = blake2b(f"{text}\n{spool.digest}".encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return cache_dir() / "map" / key


def spool_dataset(dataset: datasets.Dataset, columns: list[str], workplace: Path) -> Spool:
    """Copy columns of a data set to a Parquet file, with the row's number as id."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = workplace / "input.parquet"
    view = dataset.select_columns(columns).with_format("arrow") if columns else None
    fields = list(view.features.arrow_schema) if view is not None else []
    schema = pa.schema([*fields, pa.field(ID, pa.int64())])
    with storage(path), pq.ParquetWriter(path, schema) as writer:
        for first in range(0, len(dataset), _BATCH_ROWS):
            last = min(first + _BATCH_ROWS, len(dataset))
            table = pa.table({}) if view is None else view[first:last]
            arrays = [*table.columns, pa.array(range(first, last), pa.int64())]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return Spool(path, file_digest(path))


def spool_stream(dataset: datasets.IterableDataset, columns: list[str], workplace: Path) -> Spool:
    """Copy columns of a stream to a JSONL file, reading it once from its beginning."""
    path = workplace / "input.jsonl"
    with storage(path):
        file = path.open("w", encoding="utf-8", errors="surrogatepass")
    try:
        # What goes wrong in the stream itself is not about this file.
        for number, row in enumerate(dataset):
            line = stream_line(number, row, columns)
            with storage(path, len(line)):
                file.write(line)
    finally:
        with storage(path):
            file.close()
    return Spool(path, file_digest(path))


def stream_line(number: int, row: Mapping[str, Any], columns: list[str]) -> str:
    """One row of a stream as it stands in the copy.

    Raises:
        UsageError: a value is not text, a number, a list or a dict of such.
    """
    values = {name: row[name] for name in columns if name in row}
    try:
        return json.dumps({ID: number, **values}) + "\n"
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"map: row {number} of the stream cannot go into a prompt ({error}); convert it with the "
            "stream's `map`"
        ) from error
