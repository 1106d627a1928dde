"""C35, exhaustively: every byte of a small journal, log or claim flipped, garbage and stale files about."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_driver import Settings, run_here
from job_inputs import data_bytes, write_jsonl

from batchgen.data.row_result import RowResult
from batchgen.job.claims import Claims
from batchgen.job.folder import JobFolder
from batchgen.job.journal import (
    Dropped,
    JournalWriter,
    Kind,
    PartialRecord,
    ResultRecord,
    scan_segment,
    segment_seed,
)
from batchgen.job.linelog import encode_line, read_lines
from batchgen.job.status import read_status
from batchgen.job.verify import verify_folder
from batchgen.types import InputError, StorageError

FATAL = {"faults": [{"do": "fatal", "after_tokens": 300, "exit_code": 3, "message": "the card fell out"}]}


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes, list[tuple[int, int, bytes]]]:
    """A journal segment with five records: its name, its bytes, and what the records are."""
    folder = tmp_path_factory.mktemp("journal")
    writer = JournalWriter(folder, "job", 3)
    for row in range(4):
        writer.append(Kind.RESULT, row, ResultRecord(b"d" * 16, RowResult("ok")).pack())
    writer.append(Kind.PARTIAL, 4, PartialRecord(b"d" * 16, 0, [1, 2, 70_000]).pack())
    writer.commit()
    writer.close()
    name = writer.current_segment
    data = (folder / name).read_bytes()
    return (
        name,
        data,
        [(r.kind, r.row, r.payload) for r in scan_segment(name, data, segment_seed("job", name))],
    )


def scan(name: str, data: bytes, dropped: list[Dropped]) -> list[tuple[int, int, bytes]]:
    return [(r.kind, r.row, r.payload) for r in scan_segment(name, data, segment_seed("job", name), dropped)]


def test_a_flipped_byte_costs_its_record_and_no_other(segment: tuple[str, bytes, list]) -> None:
    name, data, records = segment
    assert len(records) == 5
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            harmed = bytearray(data)
            harmed[place] ^= flip
            dropped: list[Dropped] = []
            left = scan(name, bytes(harmed), dropped)
            assert len(left) == 4
            assert set(left) < set(records)
            (gap,) = dropped
            assert gap.offset <= place < gap.offset + gap.length


def test_a_cut_at_any_byte_costs_the_records_behind_it(segment: tuple[str, bytes, list]) -> None:
    name, data, records = segment
    for length in range(len(data)):
        dropped: list[Dropped] = []
        left = scan(name, data[:length], dropped)
        assert left == records[: len(left)]
        assert len(dropped) <= 1
        assert sum(gap.length for gap in dropped) < len(data) / 4


@settings(max_examples=50, deadline=None)
@given(garbage=st.binary(max_size=60), place=st.integers(0, 5))
def test_garbage_between_records_costs_none(
    segment: tuple[str, bytes, list], garbage: bytes, place: int
) -> None:
    name, data, records = segment
    ends = [0]
    for record in scan_segment(name, data, segment_seed("job", name)):
        ends.append(record.location.offset + record.location.length)
    cut = ends[place]
    dropped: list[Dropped] = []
    assert scan(name, data[:cut] + garbage + data[cut:], dropped) == records
    assert sum(gap.length for gap in dropped) == len(garbage)


def test_a_segment_under_another_name_or_of_another_job_says_nothing(
    segment: tuple[str, bytes, list],
) -> None:
    name, data, _ = segment
    assert list(scan_segment(name, data, segment_seed("other job", name))) == []
    assert scan(name.replace("e000003", "e000004"), data, []) == []


def test_a_flipped_byte_of_a_log_costs_its_line_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "e000001.jsonl"
    lines = [{"part": n, "name": f"größe {n}"} for n in range(4)]
    data = b"".join(map(encode_line, lines))
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            harmed = bytearray(data)
            harmed[place] ^= flip
            path.write_bytes(harmed)
            damaged: list[str] = []
            left = list(read_lines(path, damaged))
            assert [line for line in lines if line in left] == left
            assert len(left) >= 3
            assert len(damaged) == 4 - len(left)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, dict[str, bytes]]:
    """A job that ended half-way, and the data/ that it will have."""
    root = tmp_path_factory.mktemp("begun")
    path = write_jsonl(root / "in.jsonl", 60)
    run_here(Settings(output=str(root / "calm"), input=str(path)))
    settings = Settings(output=str(root / "out"), input=str(path), worker=FATAL)
    with pytest.raises(InputError):
        run_here(settings)
    settings.worker = {}
    return settings, data_bytes(root / "calm")


def copy_of(settings: Settings, tmp_path: Path) -> Settings:
    shutil.copytree(settings.output, tmp_path / "out")
    return Settings(output=str(tmp_path / "out"), input=settings.input)


def test_damage_everywhere_at_once_is_reported_and_costs_only_work(
    tmp_path: Path, begun: tuple[Settings, dict[str, bytes]]
) -> None:
    """Torn, flipped and foreign files, a part that is also in the journal, a segment of a void epoch."""
    settings = copy_of(begun[0], tmp_path)
    folder = JobFolder(Path(settings.output))
    (segment,) = folder.journal.glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[60] ^= 0xFF
    segment.write_bytes(data[:-5] + os.urandom(30))
    (folder.journal / "e000000-w000-000001.seg").write_bytes(b"of nobody")
    (folder.journal / "notes.txt").write_bytes(b"mine")
    for log in (*folder.commits.iterdir(), *folder.index.iterdir()):
        log.write_bytes(log.read_bytes()[:-4] + b"\xff")
    (folder.data / "part-000777.jsonl").write_bytes(b"{}\n")
    folder.lease.write_bytes(b"{")
    found = read_status(folder.root)
    assert any("torn or damaged" in message for message in found.messages)
    said: list[str] = []
    assert run_here(settings, said).exit_code == 0
    for words in (
        "bytes at",
        "e000000-w000-000001.seg belongs to no claim",
        "notes.txt",
        "part-000777.jsonl",
    ):
        assert any(words in sentence for sentence in said), words
    assert data_bytes(folder.root) == begun[1]
    assert verify_folder(folder.root).ok
    kept = {path.name for path in folder.quarantine.iterdir()}
    assert {"e000000-w000-000001.seg", "notes.txt", "part-000777.jsonl"} <= kept


def test_a_damaged_claim_voids_no_more_than_work(
    tmp_path: Path, begun: tuple[Settings, dict[str, bytes]]
) -> None:
    """Flipped digits must not be taken for lengths."""
    settings = copy_of(begun[0], tmp_path)
    folder = JobFolder(Path(settings.output))
    for name in os.listdir(folder.claims):
        path = folder.claims / name / "claim.json"
        path.write_bytes(path.read_bytes().replace(b'"epoch":1', b'"epoch":7'))
    assert Claims(folder).latest() is None
    assert run_here(settings).exit_code == 0
    assert data_bytes(folder.root) == begun[1]


def test_a_damaged_manifest_is_not_believed(tmp_path: Path, begun: tuple[Settings, dict[str, bytes]]) -> None:
    settings = copy_of(begun[0], tmp_path)
    manifest = Path(settings.output) / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"part_rows": 10', '"part_rows": 11'))
    with pytest.raises(StorageError, match=r"manifest\.json: damaged \(its checksum does not match\)"):
        run_here(settings)
    manifest.write_text(text)
    assert run_here(settings).exit_code == 0
    assert data_bytes(Path(settings.output)) == begun[1]
