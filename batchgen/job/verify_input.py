"""The part of `verify` that reads the input: every selected row is in its part, once, under its id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.data.id_decisions import IdDecisions
from batchgen.data.row import PartIndexer, Row
from batchgen.data.source import InputSet
from batchgen.job.index import InputIndex
from batchgen.job.part_reader import read_part
from batchgen.job.selection import Span
from batchgen.types import InputError, StorageError

Fault = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsOfInput:
    """What a folder says of the rows of its input.

    Args:
        index: what the input contained when it was first read.
        files: by number of the part, the file; None for a part without selected rows.
        spans: by number, the ordinals for which the part was decided.
        part_rows: rows in one part.
        plan: `OutputPlan.to_json()`.
        decisions: what became of ids that occur twice.
    """

    index: InputIndex
    files: Mapping[int, Path | None]
    spans: Mapping[int, Span]
    part_rows: int
    plan: Mapping[str, Any]
    decisions: IdDecisions | None


def compare_with_input(inputs: InputSet, parts: PartsOfInput, fault: Fault) -> None:
    """Read the input once, from the first part to the last, and each part beside it.

    Args:
        inputs: the input, with its `where`.
        parts: of the folder.
        fault: gets a sentence for the first thing that is wrong.
    """
    if not parts.files:
        return
    comparison = _Comparison(parts, fault)
    rows = inputs.rows(parts.index.nearest_start(min(parts.files)))
    try:
        for row in rows:
            if not comparison.add(row):
                return
        comparison.end()
    except (InputError, ValueError, StorageError) as error:
        fault(str(error))
    finally:
        getattr(rows, "close", lambda: None)()
        comparison.close()


class _Comparison:
    """Walks over the parts while the rows of the input pass by."""

    def __init__(self, parts: PartsOfInput, fault: Fault) -> None:
        self._parts = parts
        self._fault = fault
        self._last = max(parts.files)
        self._part = -1
        self._ids: Iterator[tuple[int, str]] = iter(())
        self._indexer: PartIndexer | None = None

    def add(self, row: Row) -> bool:
        """The next row of the input; False when there is nothing more to compare."""
        part = row.ordinal // self._parts.part_rows
        if part != self._part:
            if not self._finish():
                return False
            if part > self._last:
                return False
            self._begin(part)
        if self._indexer is not None:
            first, stop = self._parts.spans[part]
            if row.ordinal < stop:
                self._indexer.add(row)
            if first <= row.ordinal < stop and row.selected:
                if self._parts.decisions is not None:
                    self._parts.decisions.apply(row)
                return self._matches(next(self._ids, None), row)
        return True

    def end(self) -> None:
        """The input has ended."""
        if self._finish():
            missing = next((part for part in sorted(self._parts.files) if part > self._part), None)
            if missing is not None:
                self._fault(f"{self._parts.files[missing]}: the input has ended before its rows")

    def close(self) -> None:
        """Close the part that is being read."""
        getattr(self._ids, "close", lambda: None)()

    def _begin(self, part: int) -> None:
        self._part = part
        self._indexer = None
        if part in self._parts.files:
            path = self._parts.files[part]
            self._ids = iter(()) if path is None else _ids(path, self._parts.plan)
            self._indexer = PartIndexer(part, self._parts.index.nearest_start(part))

    def _matches(self, ours: tuple[int, str] | None, row: Row) -> bool:
        if ours == (row.ordinal, row.id):
            return True
        has = "has ended" if ours is None else f"has row {ours[0]} (id {ours[1]!r})"
        self._fault(f"{self._name()}: {has} where the input has row {row.ordinal} ({row.id!r})")
        return False

    def _finish(self) -> bool:
        if self._indexer is None:
            return True
        ours = next(self._ids, None)
        if ours is not None:
            self._fault(f"{self._name()}: has row {ours[0]} (id {ours[1]!r}) where the input has no such row")
            return False
        known = self._parts.index.get(self._part)
        if known is not None and known.rows == self._indexer.rows and known != self._indexer.entry():
            self._fault(f"{self._name()}: its rows of the input are not what they were when they ran")
        self._indexer = None
        return True

    def _name(self) -> str:
        path = self._parts.files[self._part]
        return f"part {self._part}, in which no row is selected," if path is None else str(path)


def _ids(path: Path, plan: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for row in read_part(path, plan):
        yield row.row, row.id
