"""What the accepted journal says of rows that are in no committed part: the winning result of each, and the
output tokens known so far of those that have none. Read when a run begins, and by `status`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from batchgen.job.journal import (
    Dropped,
    Kind,
    Location,
    PartialRecord,
    Record,
    ResultRecord,
    SegmentName,
    read_segment,
)


@dataclass(frozen=True, slots=True)
class FoundResult:
    """A row's winning result: where it lies, what it answers, and what is counted of it."""

    epoch: int
    location: Location
    digest: bytes
    status: str
    usage: Sequence[int] | None


@dataclass(slots=True)
class FoundPartial:
    """The output token ids of a row's samples, so far, and the records that they were put together from.

    No sample's ids have a gap.
    """

    digest: bytes
    samples: list[array[int]] = field(default_factory=list)
    records: list[Location] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of all samples."""
        return sum(map(len, self.samples))

    def extended(self, partial: PartialRecord, location: Location) -> FoundPartial:
        """With one more record; after a gap it says nothing."""
        known = self if self.digest == partial.digest else FoundPartial(partial.digest)
        if not extend_partial(known.samples, partial.sample, partial.start, partial.ids):
            return self
        known.records.append(location)
        return known

    def whole(self) -> list[PartialRecord]:
        """One record for each sample, which say the same."""
        return [PartialRecord(self.digest, 0, ids, i) for i, ids in enumerate(self.samples) if ids]


@dataclass(slots=True)
class Replay:
    """What the accepted journal says of the rows that are in no committed part.

    Args:
        results, partials: by row; a row with a result has no partial.
        parts_of: segment to the parts that its results belong to.
        dropped: damaged stretches.
    """

    results: dict[int, FoundResult]
    partials: dict[int, FoundPartial]
    parts_of: dict[str, set[int]]
    dropped: list[Dropped]

    @classmethod
    def empty(cls) -> Replay:
        """Of a journal that says nothing."""
        return cls({}, {}, {}, [])


def replay(
    folder: Path,
    job_id: str,
    accepted: Mapping[str, int],
    part_rows: int,
    committed: Mapping[int, Any],
    since: Mapping[int, int] = MappingProxyType({}),
    same_settings: Callable[[int], bool] = lambda epoch: True,
) -> Replay:
    """Read the journal up to the accepted lengths.

    The winner of two results is that of the higher epoch, then the first in segment order. Partials are
    applied in order of writing: one that begins within what is known replaces the rest, because whoever
    wrote it had resumed there; one that begins after a gap says nothing.

    Args:
        folder: `.batchgen/journal`.
        job_id: of the manifest.
        accepted: segment name to bytes.
        part_rows: rows in one part.
        committed: parts whose rows are final, by number.
        since: by part, the epoch before which records say nothing of it any more.
        same_settings: whether rows that were begun in an epoch may go on now.
    """
    found = Replay.empty()
    names = sorted(filter(None, map(SegmentName.parse, accepted)))
    for segment in names:
        name = str(segment)
        found.parts_of[name] = set()
        for record in read_segment(folder, job_id, name, accepted[name], found.dropped):
            part = record.row // part_rows
            if record.kind == Kind.RESULT:
                found.parts_of[name].add(part)
            if part in committed or segment.epoch < since.get(part, 0):
                continue
            if record.kind != Kind.PARTIAL or same_settings(segment.epoch):
                _apply(found, segment.epoch, record)
    for row in found.results:
        found.partials.pop(row, None)
    return found


def _apply(found: Replay, epoch: int, record: Record) -> None:
    if record.kind == Kind.RESULT:
        known = found.results.get(record.row)
        if known is None or known.epoch < epoch:
            answer = ResultRecord.unpack(record.payload)
            found.results[record.row] = FoundResult(
                epoch, record.location, answer.digest, answer.result.status, answer.result.usage
            )
    elif record.kind == Kind.PARTIAL:
        partial = PartialRecord.unpack(record.payload)
        before = found.partials.get(record.row) or FoundPartial(partial.digest)
        now = before.extended(partial, record.location)
        if now.records:
            found.partials[record.row] = now


def put_together(records: Iterable[tuple[bytes | None, Location]]) -> FoundPartial | None:
    """What the records of one row say together, in order of writing; None for a payload that is damaged."""
    known: FoundPartial | None = None
    for payload, location in records:
        if payload is not None:
            partial = PartialRecord.unpack(payload)
            known = (known or FoundPartial(partial.digest)).extended(partial, location)
    return known if known is not None and known.records else None


def extend_partial(known: list[array[int]], sample: int, start: int, ids: Sequence[int]) -> bool:
    """Put `ids` at `start` of what is known of a sample and end there; False, and no change, after a gap."""
    if start > (len(known[sample]) if sample < len(known) else 0):
        return False
    known.extend(array("i") for _ in range(len(known), sample + 1))
    del known[sample][start:]
    known[sample].extend(ids)
    return True
