"""A part is there entirely or not at all, and is known again afterwards."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_files import FailingFiles
from job_inputs import data_bytes, read_output, write_jsonl, write_parquet

from batchgen.data.results import OutputPlan, RowResult, plan_output
from batchgen.data.row import PartIndexEntry, Position
from batchgen.data.source import InputSet, open_input
from batchgen.job.files import OS_FILES, FileOps
from batchgen.job.folder import JobFolder
from batchgen.job.index import InputIndex
from batchgen.job.part_reader import read_part
from batchgen.job.parts import PartStore
from batchgen.types import InputError, OwnershipError, RowError, StorageError

SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl.zst"}


class Bench:
    """One input, one output folder, and a store that commits parts of ten rows."""

    def __init__(self, root: Path, input_format: str, output_format: str) -> None:
        maker: Callable[[Path, int], Path] = write_parquet if input_format == "parquet" else write_jsonl
        self.inputs: InputSet = open_input([str(maker(root / f"in.{input_format}", 50))])
        self.plan: OutputPlan = plan_output(self.inputs, format=output_format)
        self.folder = JobFolder(root / "out")
        self.folder.create()
        self.suffix = SUFFIXES[output_format]
        self.said: list[str] = []

    def store(self, epoch: int = 1, files: FileOps = OS_FILES) -> PartStore:
        store = PartStore(self.folder, self.suffix, epoch, files)
        store.recognise(self.said.append, lambda: None)
        return store

    def commit(
        self, store: PartStore, part: int, owner: Callable[[], None] = lambda: None, rows: int = 10
    ) -> Any:
        return store.commit(part, self.records(part, rows), self.plan, "zstd", owner)

    def records(self, part: int, rows: int) -> list[tuple[Any, RowResult]]:
        chosen = [r for r in self.inputs.rows() if r.ordinal // 10 == part][:rows]
        return [(row, self.result(row)) for row in chosen]

    @staticmethod
    def result(row: Any) -> RowResult:
        if row.error is not None:
            return RowResult.from_error(row.error)
        return RowResult("ok", f"text\n{row.ordinal} é", "stop", None, None, (3, row.ordinal, 0))


@pytest.fixture(params=["jsonl-parquet", "jsonl-jsonl", "parquet-parquet", "parquet-jsonl"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(tmp_path, *request.param.split("-"))


def test_a_committed_part_is_recognised_and_reads_back(bench: Bench) -> None:
    store = bench.store()
    commit = bench.commit(store, 1)
    again = bench.store(epoch=2)
    assert again.committed == {1: commit}
    assert commit.rows == 10
    assert commit.counts.completion_tokens == sum(r.usage[1] for _, r in bench.records(1, 10) if r.usage)
    path = bench.folder.part(1, bench.suffix)
    assert [r.result for r in read_part(path, bench.plan.to_json())] == [r for _, r in bench.records(1, 10)]
    assert bench.said == []


def test_a_torn_or_foreign_part_goes_to_quarantine(bench: Bench) -> None:
    store = bench.store()
    bench.commit(store, 0)
    bench.commit(store, 1)
    torn = bench.folder.part(0, bench.suffix)
    torn.write_bytes(torn.read_bytes()[:-3])
    bench.folder.part(7, bench.suffix).write_bytes(b"foreign")
    (bench.folder.data / "notes.txt").write_text("mine")
    assert set(bench.store(epoch=2).committed) == {1}
    assert sorted(os.listdir(bench.folder.quarantine)) == [
        f"part-000000{bench.suffix}",
        f"part-000007{bench.suffix}",
    ]
    assert sorted(os.listdir(bench.folder.data)) == ["notes.txt", f"part-000001{bench.suffix}"]
    assert all("moved to" in sentence for sentence in bench.said)
    assert len(bench.said) == 2


def test_a_changed_byte_is_found_by_its_time_stamp(bench: Bench) -> None:
    bench.commit(bench.store(), 0)
    path = bench.folder.part(0, bench.suffix)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert bench.store(epoch=2).committed == {}


def test_a_copied_folder_keeps_its_parts(bench: Bench) -> None:
    bench.commit(bench.store(), 0)
    os.utime(bench.folder.part(0, bench.suffix), (0, 0))
    assert set(bench.store(epoch=2).committed) == {0}


def test_a_longer_part_replaces_a_shorter_one(bench: Bench) -> None:
    bench.commit(bench.store(), 0, rows=4)
    bench.commit(bench.store(epoch=2), 0)
    assert bench.store(epoch=3).committed[0].rows == 10
    assert len(read_output(bench.folder.root)) == 10


def test_an_owner_that_lost_the_folder_does_not_rename(bench: Bench) -> None:
    def lost() -> None:
        raise OwnershipError("lost")

    with pytest.raises(OwnershipError):
        bench.commit(bench.store(), 0, lost)
    assert data_bytes(bench.folder.root) == {}
    assert bench.store(epoch=2).committed == {}


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "fsync_folder"])
def test_a_failing_disk_leaves_no_half_part(bench: Bench, operation: str) -> None:
    files = FailingFiles(lambda name, _: errno.ENOSPC if name == operation else None)
    with pytest.raises(StorageError, match="No space left"):
        bench.commit(bench.store(files=files), 0)
    assert not [name for name in data_bytes(bench.folder.root) if name.startswith(".tmp")]
    after = bench.store(epoch=2)
    bench.commit(after, 0)
    assert set(bench.store(epoch=3).committed) == {0}


def test_a_row_result_with_an_error_reads_back(tmp_path: Path) -> None:
    from batchgen.types import ErrorClass

    bench = Bench(tmp_path, "jsonl", "jsonl")
    row = next(iter(bench.inputs.rows()))
    failed = RowResult.from_error(RowError(ErrorClass.CONTEXT_LENGTH, "too long"))
    bench.store().commit(0, [(row, failed)], bench.plan, "zstd", lambda: None)
    (read,) = read_part(bench.folder.part(0, bench.suffix), bench.plan.to_json())
    assert (read.row, read.id, read.result) == (0, "in.jsonl:0", failed)


def entry(part: int, rows: int, digest: str = "aa") -> PartIndexEntry:
    return PartIndexEntry(part, Position(0, part * 100, part * 10, part * 10), rows, digest)


def after(part: int) -> Position:
    return Position(0, part * 100 + 100, part * 10 + 10, part * 10 + 10)


def test_the_index_is_read_back_whatever_was_torn(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.create()
    index = InputIndex(folder, 1)
    for part in range(3):
        index.record(entry(part, 10), after(part))
    index.record_end(30)
    index.close()
    path = folder.index / "e000001.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = InputIndex(folder, 2)
    assert [e.part for e in again] == [0, 1, 2]
    assert again.end is None
    assert len(again.damaged) == 1
    assert again.nearest_start(3) == after(2)
    assert again.nearest_start(2) == after(1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"x" + lines[3][1:]]))
    assert InputIndex(folder).nearest_start(2) == after(0)


def test_a_part_that_was_read_differently_is_a_changed_input(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.create()
    index = InputIndex(folder, 1)
    index.record(entry(0, 10), after(0))
    index.check(entry(0, 10), "in.jsonl")
    with pytest.raises(InputError, match=r"in\.jsonl: rows 0 to 9 are not what they were"):
        index.check(entry(0, 10, "bb"), "in.jsonl")
