"""What can be wrong with the first rows of a job's input. For `checks`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from batchgen.api.check_report import Report
from batchgen.api.job_input import placed, where_of
from batchgen.grammar import agreeing, counted
from batchgen.types import InputError, UsageError

if TYPE_CHECKING:
    from batchgen.data.source import InputSet
    from batchgen.job.selection import Selection
    from batchgen.job.spec.job import JobSpec


def check_priority(spec: JobSpec, inputs: InputSet) -> None:
    column, columns = spec.run.priority, list(inputs.columns())
    if column is not None and column not in columns:
        raise UsageError(
            f"run.priority: the input has no column {column!r} (it has {', '.join(map(repr, columns))}); "
            "name one of these, or remove run.priority"
        )


def check_rows(spec: JobSpec, inputs: InputSet, report: Report, most: int) -> None:
    """Look at the first rows: those that are bad, and, where a column holds ids, those that occur twice."""
    from batchgen.data.identity import AUTO_COLUMN
    from batchgen.data.source import WINDOW_ROWS
    from batchgen.job.selection import Selection

    with_ids = inputs.options.id_column is not None or AUTO_COLUMN in inputs.columns()
    selection = Selection.of(spec.input.rows, spec.input.limit)
    scan = _scan(inputs, selection, most if with_ids else min(most, WINDOW_ROWS), with_ids=with_ids)
    report.facts |= {"rows_read": scan.read, "bad_rows": scan.bad, "columns": list(inputs.columns())}
    report.notes += inputs.notes
    report.notes += _undeclared(inputs)
    if not scan.read:
        report.notes.append("the input has no rows")
    if scan.bad and (setting := _stopping_setting(spec)) is not None:
        report.faults.append(
            InputError(
                f"input.path: {scan.bad} of the first {counted(scan.read, 'row')} cannot be read and "
                f"{setting} is set; {scan.first_bad}; correct the row, or let bad rows be recorded "
                "(input.on_bad_row: record, run.fail_fast: false)"
            )
        )
    elif scan.bad:
        report.notes.append(
            f"{scan.bad} of the first {counted(scan.read, 'row')} cannot be read and each becomes an "
            f"error row; {scan.first_bad}"
        )
    if scan.unanswered:
        _judge_unanswered(scan)
        report.notes.append(
            f"input.where has no answer for {scan.unanswered} of the first {counted(scan.read, 'row')}, "
            f"which become error rows; {scan.first_unanswered}"
        )
    elif scan.read > selection.first and not scan.selected:
        report.notes.append(f"none of the first {counted(scan.read, 'row')} is selected by input.where")
    if with_ids and scan.read == most:
        report.notes.append(
            f"only the first {most:,} rows were checked for ids that occur twice; `run` looks at all"
        )
    if scan.twice and spec.input.duplicate_ids != "error":
        fate = "is skipped" if spec.input.duplicate_ids == "keep_first" else "gets a number behind its id"
        report.notes.append(
            f"{len(scan.twice)} of the first {counted(scan.read, 'row')} "
            f"{agreeing(len(scan.twice), 'has', 'have')} the id of an earlier row, and each "
            f"{fate}; {scan.twice[0]}"
        )
    elif scan.twice:
        more = f" and {len(scan.twice) - 3} more" if len(scan.twice) > 3 else ""
        raise UsageError(
            f"input.id: ids must be distinct, but {'; '.join(scan.twice[:3])}{more}; "
            "remove one of each pair, name another column in input.id, or set input.duplicate_ids: suffix or "
            "keep_first"
        )


@dataclass(slots=True)
class _Scan:
    """What the first rows hold.

    Args:
        read: rows.
        selected: of these, in the selection.
        bad, first_bad: rows that cannot be read.
        unanswered, first_unanswered: rows for which `input.where` has no answer.
        twice: pairs of rows with one id.
    """

    read: int = 0
    selected: int = 0
    bad: int = 0
    first_bad: str = ""
    unanswered: int = 0
    first_unanswered: str = ""
    twice: list[str] = field(default_factory=list)


def _scan(inputs: InputSet, selection: Selection, most: int, *, with_ids: bool) -> _Scan:
    from batchgen.data.where import is_unanswered

    scan = _Scan()
    seen: dict[str, str] = {}
    for row in islice(inputs.rows(), most if selection.stop is None else min(most, selection.stop)):
        scan.read += 1
        if not row.selected or row.ordinal < selection.first:
            continue
        scan.selected += 1
        if row.error is not None and is_unanswered(row.error):
            scan.unanswered += 1
            scan.first_unanswered = scan.first_unanswered or row.error.message
        elif row.error is not None:
            scan.bad += 1
            scan.first_bad = scan.first_bad or placed(row, row.error.message)
        elif with_ids and row.id in seen:
            scan.twice.append(f"id {row.id!r} is at {seen[row.id]} and at {where_of(row)}")
        elif with_ids:
            seen[row.id] = where_of(row)
        if scan.selected == selection.limit:
            break
    return scan


def _stopping_setting(spec: JobSpec) -> str | None:
    """Because of which setting a bad row ends the run."""
    if spec.input.on_bad_row == "stop":
        return "input.on_bad_row: stop"
    return "run.fail_fast: true" if spec.run.fail_fast else None


def _undeclared(inputs: InputSet) -> Iterator[str]:
    """Columns of `input.schema` that none of the first rows has: rare ones, or misspelled."""
    schema = inputs.options.schema or {}
    seen = {name for row in inputs.window() for name in row.values} if schema else set()
    for name in schema:
        if seen and name not in seen:
            near = difflib.get_close_matches(name, seen - schema.keys(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"input.schema: none of the first rows has a column {name!r}{hint}"


def _judge_unanswered(scan: _Scan) -> None:
    """An expression that says nothing of any row is wrong; of a few rows, the rows are."""
    if scan.unanswered + scan.bad == scan.selected == scan.read:
        raise UsageError(
            f"{scan.first_unanswered}; it has no answer for any row that was looked at; correct it"
        )
