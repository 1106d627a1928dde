"""Which journal segments stay: those with results of open parts, and few for rows of very many tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.data.row_result import RowResult
from batchgen.job.claims import Claims
from batchgen.job.folder import JobFolder
from batchgen.job.journal import JournalWriter, Kind, PartialRecord, ResultRecord
from batchgen.job.live_segments import LiveSegments
from batchgen.job.replay import Replay, replay
from batchgen.types import OwnershipError

JOB, DIGEST, PART_ROWS = "job", b"d" * 16, 10
RESULT = ResultRecord(DIGEST, RowResult("ok", "x" * 40, "stop", usage=(1, 1, 0))).pack()


class Run:
    """What a run does with the journal of a folder."""

    def __init__(self, folder: JobFolder) -> None:
        self.claims = Claims(folder)
        self.claim = self.claims.take({})
        self.folder = folder.journal
        self.final: set[int] = set()
        self.found = self.replay(self.claim.accepted)
        self.journal = JournalWriter(self.folder, JOB, self.claim.epoch, segment_bytes=1000)
        self.live = LiveSegments(self.folder, JOB, self.journal, self.found, PART_ROWS)

    def replay(self, accepted: dict[str, int]) -> Replay:
        return replay(self.folder, JOB, accepted, PART_ROWS, self.final)

    def tokens(self, row: int, start: int, ids: list[int], sample: int = 0) -> None:
        self.journal.append(Kind.PARTIAL, row, PartialRecord(DIGEST, start, ids, sample).pack())

    def commit(self) -> None:
        self.live.note(self.journal.commit())

    def drop(self) -> None:
        self.live.drop(self.final, lambda: self.claims.check(self.claim.epoch))

    def segments(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.seg"))


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "out")
    made.create()
    return made


def samples_of(found: Replay) -> list[list[int]]:
    """Tokens of row 0."""
    return [ids.tolist() for ids in found.partials[0].samples]


def test_a_row_of_very_many_tokens_keeps_few_segments(folder: JobFolder) -> None:
    """Row 0 runs on, all its samples, while a hundred parts come and go."""
    run = Run(folder)
    for part in range(1, 101):
        for row in range(part * PART_ROWS, part * PART_ROWS + PART_ROWS):
            run.journal.append(Kind.RESULT, row, RESULT)
        for sample in (0, 2):
            run.tokens(0, part - 1, [part + sample], sample)
        run.commit()
        run.final.add(part)
        run.drop()
        assert len(run.segments()) <= 3
    run.journal.close()
    again = Run(folder)
    assert samples_of(again.found) == [list(range(1, 101)), [], list(range(3, 103))]


def test_results_of_open_parts_keep_their_segment(folder: JobFolder) -> None:
    run = Run(folder)
    for row in range(60):
        run.journal.append(Kind.RESULT, row, RESULT)
        run.commit()
    before = run.segments()
    run.final |= {0, 1, 4, 5}
    run.drop()
    kept = set(run.segments())
    assert kept < set(before)
    run.final.clear()
    assert set(range(20, 40)) <= run.replay(run.claims.accepted_now()).results.keys()


def test_an_owner_that_wakes_after_a_takeover_removes_nothing(folder: JobFolder) -> None:
    """It has moved tokens to where they are void for whoever took over."""
    frozen = Run(folder)
    for start in range(0, 400, 40):
        frozen.tokens(0, start, list(range(start, start + 40)))
        frozen.commit()
    frozen.drop()
    claim = Claims(folder).take({})
    frozen.commit()
    segments = frozen.segments()
    with pytest.raises(OwnershipError):
        frozen.drop()
    assert frozen.segments() == segments
    assert samples_of(frozen.replay(claim.accepted)) == [list(range(400))]


def test_tokens_of_rows_that_parts_have_anyway_keep_nothing(folder: JobFolder) -> None:
    """Of a row whose answer stayed from an earlier part the journal never gets a result."""
    first = Run(folder)
    first.tokens(3, 0, [1, 2])
    first.commit()
    first.journal.close()
    run = Run(folder)
    run.final.add(0)
    run.drop()
    assert run.segments() == []


def test_tokens_that_are_damaged_stay_where_they_are(folder: JobFolder) -> None:
    first = Run(folder)
    first.tokens(3, 0, list(range(50)))
    first.commit()
    first.journal.close()
    run = Run(folder)
    (segment,) = run.folder.glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(bytes(data))
    run.drop()
    assert run.journal.pending_bytes == 0
    assert run.segments() == [segment.name]
