"""The journal gives back what was committed, whatever happens to the bytes around it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from failing_files import FailingFiles
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.row_result import RowResult
from batchgen.job.files import OS_FILES
from batchgen.job.journal import (
    HEADER,
    MAGIC,
    JournalReader,
    JournalWriter,
    Kind,
    PartialRecord,
    ResultRecord,
    SegmentName,
    encode_record,
    scan_segment,
    segment_seed,
)
from batchgen.job.replay import replay
from batchgen.types import StorageError

JOB = "job-1"
DIGEST = b"d" * 16


def result(text: str, digest: bytes = DIGEST) -> bytes:
    return ResultRecord(digest, RowResult("ok", text, "stop", usage=(3, len(text), 0))).pack()


def partial(start: int, ids: list[int], digest: bytes = DIGEST) -> bytes:
    return PartialRecord(digest, start, ids).pack()


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.seg")}


def texts(folder: Path, accepted: dict[str, int] | None = None, job: str = JOB) -> dict[int, str]:
    found = replay(folder, job, sizes(folder) if accepted is None else accepted, 100, {})
    reader = JournalReader(folder, job)
    payloads = reader.results([(row, result.location) for row, result in found.results.items()])
    reader.close()
    return dict(zip(found.results, map(text_of, payloads), strict=True))


def text_of(payload: bytes) -> str:
    return str(ResultRecord.unpack(payload).result.generated_text)


payloads = st.lists(
    st.one_of(st.binary(max_size=40), st.just(MAGIC * 3), st.binary(max_size=9).map(lambda b: MAGIC + b)),
    min_size=1,
    max_size=8,
)


def segment(contents: list[bytes], seed: int) -> tuple[bytes, list[int]]:
    """The bytes, and where each record begins; the last entry is the end."""
    data, starts = b"", [0]
    for row, payload in enumerate(contents):
        data += encode_record(seed, Kind.RESULT, row, payload)
        starts.append(len(data))
    return data, starts


@settings(max_examples=100, deadline=None)
@given(payloads, st.data())
def test_a_cut_loses_only_the_record_it_cuts(contents: list[bytes], draw: st.DataObject) -> None:
    data, starts = segment(contents, 7)
    cut = draw.draw(st.integers(0, len(data)))
    dropped: list = []
    rows = [record.row for record in scan_segment("s", data[:cut], 7, dropped)]
    assert rows == [row for row in range(len(contents)) if starts[row + 1] <= cut]
    assert sum(d.length for d in dropped) == cut - max(s for s in starts if s <= cut)


@settings(max_examples=150, deadline=None)
@given(payloads, st.data())
def test_a_damaged_byte_loses_only_its_record(contents: list[bytes], draw: st.DataObject) -> None:
    data, starts = segment(contents, 7)
    place = draw.draw(st.integers(0, len(data) - 1))
    value = draw.draw(st.integers(0, 255).filter(lambda v: v != data[place]))
    damaged = data[:place] + bytes([value]) + data[place + 1 :]
    hit = max(row for row in range(len(contents)) if starts[row] <= place)
    dropped: list = []
    found = {r.row: r.payload for r in scan_segment("s", damaged, 7, dropped)}
    assert found == {row: p for row, p in enumerate(contents) if row != hit}
    assert len(dropped) == 1
    assert dropped[0].length == starts[hit + 1] - starts[hit]


@settings(max_examples=60, deadline=None)
@given(payloads, st.binary(max_size=60), st.binary(max_size=60))
def test_garbage_around_records_is_reported_and_skipped(
    contents: list[bytes], before: bytes, after: bytes
) -> None:
    data, _ = segment(contents, 7)
    dropped: list = []
    found = [r.payload for r in scan_segment("s", before + data + after, 7, dropped)]
    assert found == contents
    assert sum(d.length for d in dropped) == len(before) + len(after)


def test_a_record_inside_a_damaged_record_does_not_count() -> None:
    """Text that looks like a record of another segment is none, even where what surrounds it is damaged."""
    inner = encode_record(segment_seed(JOB, "other"), Kind.RESULT, 5, b"forged")
    data = bytearray(encode_record(segment_seed(JOB, "this"), Kind.RESULT, 1, inner))
    data[6] ^= 1
    assert list(scan_segment("this", bytes(data), segment_seed(JOB, "this"))) == []


def test_what_commit_returns_can_be_read_back(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 3)
    writer.append(Kind.RESULT, 4, result("four"))
    writer.append(Kind.PARTIAL, 5, partial(0, [1, 2]))
    committed = writer.commit()
    assert [(c.kind, c.row) for c in committed] == [(Kind.RESULT, 4), (Kind.PARTIAL, 5)]
    assert writer.commit() == []
    assert texts(tmp_path) == {4: "four"}
    assert list(sizes(tmp_path)) == [str(SegmentName(3, 0, 1))]


def test_segments_roll(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 1, segment_bytes=200)
    for row in range(10):
        writer.append(Kind.RESULT, row, result("x" * 60))
        writer.commit()
    assert len(sizes(tmp_path)) == 5
    assert len(texts(tmp_path)) == 10


def test_rows_of_committed_parts_are_left_out_and_parts_of_segments_known(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 1)
    for row in (5, 150, 205):
        writer.append(Kind.RESULT, row, result("t"))
    writer.commit()
    found = replay(tmp_path, JOB, sizes(tmp_path), 100, {1: None})
    assert set(found.results) == {5, 205}
    assert found.parts_of == {str(SegmentName(1, 0, 1)): {0, 1, 2}}


def test_the_higher_epoch_wins_then_the_first_in_order(tmp_path: Path) -> None:
    for epoch, words in ((1, ["old", "old again"]), (2, ["new", "new again"])):
        writer = JournalWriter(tmp_path, JOB, epoch)
        for word in words:
            writer.append(Kind.RESULT, 0, result(word))
            writer.commit()
            writer.close()
    assert texts(tmp_path) == {0: "new"}


def test_bytes_beyond_the_accepted_length_are_void(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 1)
    writer.append(Kind.RESULT, 0, result("kept"))
    writer.commit()
    accepted = sizes(tmp_path)
    writer.append(Kind.RESULT, 1, result("late"))
    writer.commit()
    assert texts(tmp_path, accepted) == {0: "kept"}


def test_a_renamed_segment_or_another_job_counts_for_nothing(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 1)
    writer.append(Kind.RESULT, 0, result("t"))
    writer.commit()
    assert texts(tmp_path, job="job-2") == {}
    (tmp_path / str(SegmentName(1, 0, 1))).rename(tmp_path / str(SegmentName(1, 0, 2)))
    assert texts(tmp_path) == {}


def ids_of(folder: Path) -> dict[int, list[int]]:
    found = samples_of(folder)
    assert all(len(samples) == 1 for samples in found.values())
    return {row: ids for row, (ids,) in found.items()}


def samples_of(folder: Path) -> dict[int, list[list[int]]]:
    partials = replay(folder, JOB, sizes(folder), 100, {}).partials
    return {row: [ids.tolist() for ids in found.samples] for row, found in partials.items()}


def test_partials_are_joined_without_gaps(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 1)
    writer.append(Kind.PARTIAL, 1, partial(0, [1, 2]))
    writer.append(Kind.PARTIAL, 1, partial(2, [3]))
    writer.append(Kind.PARTIAL, 1, partial(4, [5]))
    writer.append(Kind.PARTIAL, 2, partial(0, [9]))
    writer.append(Kind.RESULT, 2, result("done"))
    writer.append(Kind.PARTIAL, 3, partial(1, [7]))
    writer.commit()
    assert ids_of(tmp_path) == {1: [1, 2, 3]}


def test_a_later_writer_continues_where_it_resumed(tmp_path: Path) -> None:
    first = JournalWriter(tmp_path, JOB, 1)
    first.append(Kind.PARTIAL, 1, partial(0, [1, 2, 3, 4]))
    first.commit()
    second = JournalWriter(tmp_path, JOB, 2)
    second.append(Kind.PARTIAL, 1, partial(2, [30]))
    second.commit()
    assert ids_of(tmp_path) == {1: [1, 2, 30]}


def test_partials_of_samples_are_kept_apart(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 1)
    for sample, start, ids in [
        (0, 0, [1]),
        (2, 0, [3]),
        (0, 1, [4]),
        (2, 1, [5, 6]),
        (1, 1, [9]),
        (2, 2, [7]),
    ]:
        writer.append(Kind.PARTIAL, 1, PartialRecord(b"d" * 16, start, ids, sample).pack())
    writer.append(Kind.PARTIAL, 2, PartialRecord(b"d" * 16, 1, [1], 5).pack())
    writer.commit()
    assert samples_of(tmp_path) == {1: [[1, 4], [], [3, 5, 7]]}


def test_partials_of_another_content_do_not_mix(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 1)
    writer.append(Kind.PARTIAL, 1, partial(0, [1, 2]))
    writer.append(Kind.PARTIAL, 1, partial(2, [3], b"e" * 16))
    writer.append(Kind.PARTIAL, 1, partial(0, [8], b"f" * 16))
    writer.commit()
    assert ids_of(tmp_path) == {1: [8]}


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "fsync_folder"])
def test_one_failure_moves_the_batch_to_a_new_segment(tmp_path: Path, operation: str) -> None:
    failed: list[int] = []

    def decide(name: str, number: int) -> int | None:
        if name == operation and not failed:
            failed.append(number)
            return errno.EIO
        return None

    writer = JournalWriter(tmp_path, JOB, 1, files=FailingFiles(decide))
    for row in range(3):
        writer.append(Kind.RESULT, row, result(f"r{row}"))
    committed = writer.commit()
    assert failed
    assert {c.location.segment for c in committed} == {str(SegmentName(1, 0, 2))}
    assert texts(tmp_path) == {0: "r0", 1: "r1", 2: "r2"}


def test_a_second_failure_is_a_storage_error_that_says_how_much_is_needed(tmp_path: Path) -> None:
    def decide(name: str, number: int) -> int | None:
        return errno.ENOSPC if name == "write" and number > 3 else None

    writer = JournalWriter(tmp_path, JOB, 1, files=FailingFiles(decide))
    writer.append(Kind.RESULT, 0, result("safe"))
    writer.commit()
    writer.append(Kind.RESULT, 1, result("x" * 5000))
    with pytest.raises(StorageError, match=r"No space left.*free at least 5,\d\d\d bytes.*same command"):
        writer.commit()
    assert texts(tmp_path) == {0: "safe"}


faults = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from([errno.EIO, errno.ENOSPC, -1, -30])), max_size=6
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), faults)
def test_committed_rows_survive_any_failing_disk(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int], failing: list[tuple[int, int]]
) -> None:
    """The model: a row is promised once `commit` has returned, and is then read back; nothing else is."""
    folder = tmp_path_factory.mktemp("journal")
    verdicts = dict(failing)
    writer = JournalWriter(
        folder, JOB, 1, segment_bytes=300, files=FailingFiles(lambda _, number: verdicts.get(number))
    )
    promised: dict[int, str] = {}
    row = 0
    for size in batches:
        batch = {row + i: f"text {row + i}" for i in range(size)}
        row += size
        for r, text in batch.items():
            writer.append(Kind.RESULT, r, result(text))
        try:
            committed = writer.commit()
        except StorageError:
            break
        assert [c.row for c in committed] == list(batch)
        promised |= batch
        reader = JournalReader(folder, JOB)
        payloads = reader.results([(c.row, c.location) for c in reversed(committed)])
        assert [text_of(p) for p in payloads] == [batch[c.row] for c in reversed(committed)]
        reader.close()
    found = texts(folder)
    assert promised.items() <= found.items()


def test_a_record_damaged_after_it_was_written_is_noticed(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, JOB, 1)
    writer.append(Kind.RESULT, 0, result("t"))
    (committed,) = writer.commit()
    path = tmp_path / committed.location.segment
    with path.open("r+b") as file:
        file.seek(HEADER.size + 3)
        file.write(b"\0")
    reader = JournalReader(tmp_path, JOB)
    with pytest.raises(StorageError, match=r"record of row 0 at byte 0 was damaged.*same command"):
        reader.results([(0, committed.location)])
    reader.close()


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "gone", JOB, 1, files=OS_FILES)
    writer.append(Kind.RESULT, 0, result("t"))
    with pytest.raises(StorageError, match=os.strerror(errno.ENOENT)):
        writer.commit()
