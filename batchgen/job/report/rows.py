"""What the report says of rows: from the summaries of parts, the journal, and the row log."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchgen.data.results import RowResult
from batchgen.job.claims import Claims
from batchgen.job.folder import JobFolder
from batchgen.job.histogram import Histogram
from batchgen.job.journal import JournalReader, unpack_result
from batchgen.job.manifest import Manifest
from batchgen.job.part_reader import PartRow, read_part
from batchgen.job.part_summary import PartSummary, summary_of
from batchgen.job.parts import PartCommit, read_summaries
from batchgen.job.replay import replay
from batchgen.job.run_stats import read_rows
from batchgen.job.selection import Selection
from batchgen.types import StorageError

SLOWEST = 10
_PHASES = ("queue_ms", "prefill_ms", "decode_ms")
_NEEDED = ("row", "id", "status", "finish_reason", "error", "usage")


@dataclass(slots=True)
class SlowRow:
    """One of the rows that took longest; id and lengths where its part is committed."""

    row: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    worker: int
    id: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def run_seconds(self) -> float:
        """From its first step to its last."""
        return self.prefill_seconds + self.decode_seconds


@dataclass(slots=True)
class RowLog:
    """What the row logs of all attempts say.

    Args:
        queue_seconds, prefill_seconds, decode_seconds: of rows that ran.
        slowest: longest in prefill and decode together first.
        control_rows, control_tokens: rows whose own text spells control tokens, and how many.
        notes: what the reader repaired: note to its rows' number and the first row.
    """

    queue_seconds: Histogram = field(default_factory=Histogram)
    prefill_seconds: Histogram = field(default_factory=Histogram)
    decode_seconds: Histogram = field(default_factory=Histogram)
    slowest: list[SlowRow] = field(default_factory=list)
    control_rows: int = 0
    control_tokens: int = 0
    notes: dict[str, tuple[int, int]] = field(default_factory=dict)


def read_row_log(folder: JobFolder, damaged: list[str], still_time: Callable[[], None]) -> RowLog:
    """Add up the row logs.

    Args:
        folder: the output folder.
        damaged: gets a sentence for each torn line.
        still_time: called now and then; may raise.
    """
    log = RowLog()
    slowest: list[SlowRow] = []
    notes: dict[int, Mapping[str, list[int]]] = {}
    for record in read_rows(folder, damaged):
        still_time()
        if "notes" in record:
            # A part that is read again is counted once.
            notes[record["part"]] = record["notes"]
            continue
        queue, prefill, decode = (np.array(record[name], dtype=np.float64) / 1000 for name in _PHASES)
        control = np.array(record["control_tokens"], dtype=np.int64)
        log.queue_seconds.add(queue)
        log.prefill_seconds.add(prefill)
        log.decode_seconds.add(decode)
        log.control_rows += int((control > 0).sum())
        log.control_tokens += int(control.sum())
        for i in np.argsort(prefill + decode)[-SLOWEST:]:
            phases = (float(queue[i]), float(prefill[i]), float(decode[i]))
            slowest.append(SlowRow(record["row"][i], *phases, record["worker"][i]))
        slowest = heapq.nlargest(SLOWEST, slowest, key=lambda slow: (slow.run_seconds, -slow.row))
    log.slowest = [slow for slow in slowest if slow.run_seconds > 0]
    for by_note in notes.values():
        for note, (count, first) in by_note.items():
            known = log.notes.get(note, (0, first))
            log.notes[note] = (known[0] + count, min(known[1], first))
    return log


def summarise_rows(
    folder: JobFolder,
    manifest: Manifest,
    parts: Mapping[int, PartCommit],
    damaged: list[str],
    still_time: Callable[[], None],
) -> PartSummary:
    """What became of every row that has a result, in parts and in the journal.

    Args:
        folder: the output folder.
        manifest: of it.
        parts: that are committed.
        damaged: gets a sentence for each thing that could not be read.
        still_time: called now and then; may raise.
    """
    total = PartSummary()
    known = read_summaries(folder, parts, damaged)
    for commit in parts.values():
        still_time()
        summary = known.get(commit.part)
        try:
            total.merge(summary_of(_rows_of(folder, manifest, commit)) if summary is None else summary)
        except (StorageError, ValueError) as error:
            damaged.append(f"{error}; the report leaves its rows out")
    total.merge(summary_of(_journal_rows(folder, manifest, parts, damaged)))
    return total


def describe_slowest(
    folder: JobFolder, manifest: Manifest, parts: Mapping[int, PartCommit], slowest: list[SlowRow]
) -> None:
    """Fill in ids and lengths where the row's part is committed; at most a few parts are read."""
    by_row = {slow.row: slow for slow in slowest}
    wanted = {slow.row // manifest.part_rows for slow in slowest} & parts.keys()
    for part in sorted(wanted):
        try:
            for row in _rows_of(folder, manifest, parts[part]):
                if row.row in by_row:
                    slow = by_row[row.row]
                    slow.id = row.id
                    if row.result.usage is not None:
                        slow.prompt_tokens, slow.output_tokens = row.result.usage[:2]
        except (StorageError, ValueError):
            continue


def _rows_of(folder: JobFolder, manifest: Manifest, commit: PartCommit) -> Iterator[PartRow]:
    return read_part(folder.data / commit.file, manifest.output_plan, only=_NEEDED)


def _journal_rows(
    folder: JobFolder, manifest: Manifest, parts: Mapping[int, Any], damaged: list[str]
) -> Iterator[tuple[int, str, RowResult]]:
    """Rows that are in no part yet; their ids are in the input, which nobody reads for a report."""
    found = replay(folder.journal, manifest.job_id, Claims(folder).accepted_now(), manifest.part_rows, parts)
    damaged += map(str, found.dropped)
    reader = JournalReader(folder.journal, manifest.job_id)
    selection = Selection.of(manifest.rows, manifest.limit)
    try:
        for row, result in sorted(found.results.items()):
            if not selection.may_hold(row, has_where=manifest.has_where):
                continue
            try:
                (payload,) = reader.results([(row, result.location)])
                yield row, "", RowResult.of(*unpack_result(payload)[1:])
            except StorageError:
                # Its owner has moved it to a part since.
                continue
    finally:
        reader.close()
