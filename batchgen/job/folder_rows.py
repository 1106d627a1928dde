"""The final rows of an output folder as the sink takes them: of committed parts, and of the journal.

`export` reads them. Takes no locks and works on any host that sees the folder, while its job runs or after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchgen.data.id_decisions import recorded_decisions
from batchgen.data.record_columns import result_arrays
from batchgen.data.results import OutputPlan
from batchgen.data.row_result import RowResult
from batchgen.data.sink import Record
from batchgen.job.claims import Claims
from batchgen.job.folder import JobFolder
from batchgen.job.index import InputIndex, changed_input
from batchgen.job.journal import JournalReader, unpack_result
from batchgen.job.manifest import require_manifest
from batchgen.job.part_reader import read_records, records_of
from batchgen.job.parts import PartCommit, recognise_parts
from batchgen.job.replay import Replay, replay
from batchgen.job.selection import Selection
from batchgen.job.success import refuse_lost
from batchgen.types import StorageError

if TYPE_CHECKING:
    from batchgen.data.source import InputSet


class FolderRows:
    """The final rows of an output folder, in input order, part by part.

    Args:
        root: the folder.
        inputs: of the job, for rows that are in no part yet; None leaves those out.

    Raises:
        UsageError: it is not an output folder.
        StorageError: it was complete, and parts are missing or damaged.
    """

    def __init__(self, root: Path, inputs: InputSet | None = None) -> None:
        self._folder = JobFolder(root)
        self.manifest = require_manifest(self._folder)
        self.plan: Mapping[str, Any] = self.manifest.output_plan
        self._inputs = inputs
        self._found = Replay.empty() if inputs is None else self._replay()
        # Looked at last: a row that left the journal in between is in one of them.
        self._parts = recognise_parts(self._folder)
        refuse_lost(self._folder, sum(commit.rows for commit in self._parts.values()))
        self._index = InputIndex(self._folder)
        self._reader = JournalReader(self._folder.journal, self.manifest.job_id)

    def numbers(self) -> list[int]:
        """Of the parts that have rows."""
        size = self.manifest.part_rows
        return sorted({*self._parts, *(row // size for row in self._found.results)})

    def records(self, part: int) -> Iterator[Record]:
        """The rows of one part, final ones only.

        Raises:
            StorageError: what is there cannot be read.
            InputError: the input is not what it was.
        """
        commit = self._parts.get(part)
        return self._journalled(part) if commit is None else self._committed(commit)

    def close(self) -> None:
        """Close files."""
        self._reader.close()

    def _replay(self) -> Replay:
        accepted = Claims(self._folder).accepted_now()
        return replay(self._folder.journal, self.manifest.job_id, accepted, self.manifest.part_rows, {})

    def _committed(self, commit: PartCommit) -> Iterator[Record]:
        path = self._folder.data / commit.file
        try:
            yield from read_records(path, self.plan)
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{path}: not what a part holds ({error}); `batchgen verify` says more, and running the job "
                "again makes the part anew"
            ) from error

    def _journalled(self, part: int) -> Iterator[Record]:
        first = part * self.manifest.part_rows
        rows = range(first, first + self.manifest.part_rows)
        found = {row: self._found.results[row] for row in rows if row in self._found.results}
        try:
            payloads = self._reader.results([(row, result.location) for row, result in found.items()])
        except StorageError:
            # A job that runs puts its rows into a part and removes them from the journal.
            commit = recognise_parts(self._folder).get(part)
            if commit is None:
                raise
            yield from self._committed(commit)
            return
        results = dict(zip(found, payloads, strict=True))
        yield from self._as_in_a_part(self._with_input(part, results))

    def _with_input(self, part: int, payloads: Mapping[int, bytes]) -> Iterator[Record]:
        assert self._inputs is not None
        selection = Selection.of(self.manifest.rows, self.manifest.limit)
        first, last = selection.span(part, self.manifest.part_rows)[0], max(payloads)
        decisions = recorded_decisions(self._folder.index)
        for row in self._inputs.rows(self._index.nearest_start(part)):
            if row.ordinal > last:
                return
            if decisions is not None:
                decisions.apply(row)
            payload = payloads.get(row.ordinal)
            if payload is not None:
                digest, *values = unpack_result(payload)
                if digest != row.digest:
                    raise changed_input(row.ordinal, 1, row.file)
                yield row, RowResult.of(*values)
            elif row.error is not None and row.ordinal >= first:
                yield row, RowResult.from_error(row.error)

    def _as_in_a_part(self, records: Iterator[Record]) -> Iterator[Record]:
        """What reading the rows from a committed part would give."""
        assert self._inputs is not None
        plan = OutputPlan.from_json(self.plan, self._inputs)
        if plan.format != "parquet":
            for row, result in records:
                row.values = plan.passthrough.members(row)  # type: ignore[union-attr]
                yield row, result
            return
        schema = plan.schema()
        for row, result in records:
            table = pa.Table.from_arrays(result_arrays(plan, [row], [result]), schema=schema)
            yield from records_of(table.combine_chunks().to_batches(), plan.names, plan.samples)
