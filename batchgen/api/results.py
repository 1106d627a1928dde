"""`batchgen.open`: what an output folder holds, read while the job runs or long after."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.api.arguments import local_path
from batchgen.grammar import counted
from batchgen.job.faults import show_value
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import require_manifest
from batchgen.job.part_reader import open_lines
from batchgen.job.parts import Counts, recognise_parts
from batchgen.job.success import refuse_lost
from batchgen.types import Status, UsageError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from batchgen.job.status import JobStatus


def open(folder: str | os.PathLike[str]) -> Results:
    """The results in an output folder, finished or not.

    Raises:
        UsageError: it is not an output folder.
    """
    results = Results(local_path("folder", folder))
    require_manifest(JobFolder(results.folder))
    return results


class Results:
    """Committed rows of one job, in input order.

    Args:
        folder: the output folder. Parts that are committed later are seen by later calls.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def counts(self) -> Counts:
        """Rows by status, and tokens."""
        counts = Counts()
        for commit in recognise_parts(JobFolder(self.folder)).values():
            counts.add(commit.counts)
        return counts

    @property
    def files(self) -> list[Path]:
        """The committed parts, in input order.

        Raises:
            StorageError: the job was complete, and parts are missing or damaged.
        """
        folder = JobFolder(self.folder)
        commits = recognise_parts(folder)
        refuse_lost(folder, sum(commit.rows for commit in commits.values()))
        return [folder.data / commits[part].file for part in sorted(commits)]

    def __len__(self) -> int:
        return self.counts.rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every row as a dict, part by part: memory is bounded by one batch of rows."""
        for file in self.files:
            yield from _rows(file)

    def status(self) -> JobStatus:
        """How far the job is, and who works on it."""
        from batchgen.job.status import read_status

        return read_status(self.folder)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows as one Arrow table.

        Args:
            columns: those to read; None: all. Of Parquet, a member is one too (`usage.prompt_tokens`).
                Of JSON lines, a column whose values share no Arrow type is JSON text.

        Raises:
            UsageError: no row has such a column.
        """
        import pyarrow as pa

        files = self.files
        self._require(columns, files)
        if any(file.suffix != ".parquet" for file in files):
            return _table_of(list(chain.from_iterable(map(_rows, files))), columns)
        tables = [_table(file, columns) for file in files]
        return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows as Arrow batches, part by part. Columns, and errors, as of `table`."""
        files = self.files
        self._require(columns, files)
        for file in files:
            yield from _table(file, columns).to_batches()

    def errors(self) -> list[dict[str, Any]]:
        """The rows that have no result: `status` is not ok."""
        status = self.columns["status"]
        # Lines of the format openai_batch have an `error` and no status.
        return [
            row for row in self if row.get(status, row.get("error") or Status.OK.value) != Status.OK.value
        ]

    def dataset(self) -> datasets.Dataset:
        """All rows as a `datasets.Dataset`."""
        import datasets

        return datasets.Dataset(self.table())

    @cached_property
    def columns(self) -> dict[str, str]:
        """Our columns by what this job calls them."""
        return dict(require_manifest(JobFolder(self.folder)).output_plan["names"])

    def _require(self, columns: Sequence[str] | None, files: Sequence[Path]) -> None:
        """Raises UsageError where rows have no such columns, and nothing while there are no rows."""
        if columns is None:
            return
        if isinstance(columns, str) or not isinstance(columns, Sequence):
            raise UsageError(
                f"columns: {show_value(columns)} is not a list of names; give one, or None for all"
            )
        # A line leaves out a member that it has no value for.
        lines = any(file.suffix != ".parquet" for file in files)
        known = dict.fromkeys(self.columns.values() if lines else ())
        for file in files:
            if all(column in known for column in columns):
                return
            known.update(dict.fromkeys(_names(file)))
        for column in columns if files else ():
            if column not in known:
                raise UsageError(
                    f"columns: the output has no column {show_value(column)}; there are {', '.join(known)}"
                )

    def __repr__(self) -> str:
        counts = self.counts
        return (
            f"{type(self).__name__}({str(self.folder)!r}: {counted(counts.rows, 'row')}, {counts.ok:,} ok, "
            f"{counts.error:,} error, {counts.skipped:,} skipped)"
        )


def _names(file: Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from _dotted(pq.read_schema(file))
    else:
        for row in _rows(file):
            yield from row


def _dotted(fields: Iterable[pa.Field], before: str = "") -> Iterator[str]:
    """Names of columns, each followed by those of its members, as Arrow's readers take them."""
    import pyarrow as pa

    for field in fields:
        yield before + field.name
        if pa.types.is_struct(field.type):
            yield from _dotted(field.type, f"{before}{field.name}.")


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches():
                yield from batch.to_pylist()
    else:
        with open_lines(file) as lines:
            yield from map(json.loads, lines)


def _table(file: Path, columns: Sequence[str] | None) -> pa.Table:
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        return pq.read_table(file, columns=columns, partitioning=None)
    return _table_of(list(_rows(file)), columns)


def _table_of(rows: list[dict[str, Any]], columns: Sequence[str] | None) -> pa.Table:
    import pyarrow as pa

    # Rows do not all have the same members.
    names = dict.fromkeys(name for row in rows for name in row) if columns is None else columns
    return pa.table({name: _array([row.get(name) for row in rows]) for name in names})


def _array(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if v is None else json.dumps(v, ensure_ascii=False) for v in values])
