"""What `status` and `verify` say of folders in every state."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_driver import Settings, run_here, setup_of
from job_inputs import write_jsonl

import batchgen
from batchgen.data.source import open_input
from batchgen.job.folder import JobFolder
from batchgen.job.folder_rows import FolderRows
from batchgen.job.lease import LeaseRecord, Owner
from batchgen.job.manifest import checksum
from batchgen.job.report.collect import collect_report
from batchgen.job.selection import Selection
from batchgen.job.status import JobStatus, read_status
from batchgen.job.verify import VerifyReport, verify_folder
from batchgen.types import InputError, StorageError, UsageError

FATAL = {"faults": [{"do": "fatal", "after_tokens": 200, "exit_code": 3, "message": "the card fell out"}]}


def job(tmp_path: Path, **changes: Any) -> Settings:
    write_jsonl(tmp_path / "in.jsonl", 60)
    return Settings(output=str(tmp_path / "out"), input=str(tmp_path / "in.jsonl"), **changes)


@pytest.fixture
def complete(tmp_path: Path) -> Settings:
    settings = job(tmp_path)
    run_here(settings)
    return settings


@pytest.fixture
def failed(tmp_path: Path) -> Settings:
    settings = job(tmp_path, worker=FATAL)
    with pytest.raises(InputError):
        run_here(settings)
    return settings


def verify(settings: Settings, *, with_input: bool = False) -> VerifyReport:
    inputs = open_input([settings.input]) if with_input else None
    report = verify_folder(Path(settings.output), inputs)
    if inputs is not None:
        inputs.close()
    json.dumps(report.to_json())
    return report


def status(settings: Settings, **clock: Any) -> JobStatus:
    found = read_status(Path(settings.output), **clock)
    json.dumps(found.to_json())
    return found


def test_status_of_a_complete_job(complete: Settings) -> None:
    found = status(complete)
    assert (found.state, found.rows_total, found.rows_done, found.error) == ("complete", 60, 60, 3)
    assert (found.rows_in_parts, found.parts, found.attempts) == (60, 6, 1)
    assert found.tokens_lost == 0
    assert found.tokens_sampled == found.tokens_kept > 0
    assert [(w.lost_at_most, w.end) for w in found.workers] == [(0, "ended with exit code 0")]
    assert found.last_error is None


def test_a_complete_folder_that_lost_a_part_is_not_taken_for_complete(complete: Settings) -> None:
    folder = Path(complete.output)
    gone = next(iter((folder / "data").iterdir()))
    gone.unlink()
    found = status(complete)
    assert found.state == "failed"
    assert found.last_error is not None
    assert "10 rows of this complete job are gone" in found.last_error
    with pytest.raises(StorageError, match="10 rows of this complete job are gone"):
        FolderRows(folder)
    with pytest.raises(StorageError, match="running the job again"):
        batchgen.open(folder).table()
    assert run_here(complete).exit_code == 0
    assert status(complete).state == "complete"
    assert len(batchgen.open(folder).table()) == found.rows_total


def test_status_of_a_failed_job_counts_the_journal(failed: Settings) -> None:
    found = status(failed)
    assert found.state == "failed"
    assert found.last_error == "the card fell out"
    assert 0 < found.rows_done < 60
    assert found.tokens_kept + found.tokens_lost == found.tokens_sampled
    assert found.tokens_lost <= sum(worker.lost_at_most for worker in found.workers)


def test_status_of_a_dead_job(failed: Settings) -> None:
    path = JobFolder(Path(failed.output)).attempts / "0001.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "exit_code": None, "reason": "running", "error": None}))
    found = status(failed)
    assert found.state == "dead"
    assert found.last_error is not None
    assert "ended without a word" in found.last_error


def test_status_watches_the_heartbeat_of_another_host(failed: Settings) -> None:
    folder = JobFolder(Path(failed.output))
    owner = Owner("faraway", 4242, "another boot", "pid:[1]", 99)
    beats = iter(range(100))
    now = [0.0]

    def beat() -> None:
        record = LeaseRecord(owner, next(beats), 2.0, 60.0, released=False)
        folder.lease.write_bytes(record.encode())

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1:
            beat()

    beat()
    found = status(failed, clock=lambda: now[0], sleep=sleep)
    assert found.state == "running"
    assert found.owner == {"host": "faraway", "pid": 4242, "beat": 0, "released": False, "alive": True}

    def only_sleep(seconds: float) -> None:
        now[0] += seconds

    assert status(failed, clock=lambda: now[0], sleep=only_sleep).state == "failed"


def test_status_survives_torn_files(failed: Settings) -> None:
    folder = JobFolder(Path(failed.output))
    for path in (*folder.commits.iterdir(), *folder.journal.iterdir()):
        path.write_bytes(path.read_bytes()[:-3] + b"garbage")
    folder.lease.write_bytes(b"{")
    (folder.attempts / "0001.progress.json").write_bytes(b"{")
    found = status(failed)
    assert any("torn or damaged" in message for message in found.messages)


def test_a_folder_that_is_no_job_is_refused(tmp_path: Path) -> None:
    for look in (read_status, verify_folder):
        with pytest.raises(UsageError, match=r"no manifest\.json"):
            look(tmp_path / "nowhere")


def test_verify_finds_nothing_wrong_with_a_complete_job(complete: Settings) -> None:
    report = verify(complete, with_input=True)
    assert (report.faults, report.rows, report.parts) == ([], 60, 6)
    setup = setup_of(complete)
    assert verify_folder(Path(complete.output), setup.inputs, setup.fingerprints).ok
    setup.inputs.close()


def test_rows_that_only_a_larger_selection_had_are_not_counted(tmp_path: Path) -> None:
    fatal = {"do": "fatal", "exit_code": 3, "message": "the card fell out"}
    large = job(tmp_path, part_rows=60, worker={"faults": [{**fatal, "after_tokens": 400}]})
    with pytest.raises(InputError):
        run_here(large)
    rows = status(large).rows_done
    assert rows > 3
    small = replace(large, rows="57:60", worker={"faults": [{**fatal, "after_tokens": 1}]})
    with pytest.raises(InputError):
        run_here(small)
    found = status(small)
    assert found.rows_done <= found.rows_total == 3
    report = collect_report(Path(small.output))
    assert report["rows"]["done"] == found.rows_done
    with pytest.raises(InputError):
        run_here(replace(small, rows=None))
    assert status(small).rows_done >= rows


def test_a_limit_says_which_rows_only_where_all_are_let_through() -> None:
    selection = Selection(first=10, limit=3)
    assert [row for row in range(20) if selection.may_hold(row, has_where=False)] == [10, 11, 12]
    assert [row for row in range(20) if selection.may_hold(row, has_where=True)] == list(range(10, 20))


def test_verify_says_that_a_job_is_not_complete(failed: Settings) -> None:
    report = verify(failed)
    assert len(report.faults) == 1
    assert "not complete" in report.faults[0]


def damage_byte(data: Path) -> None:
    path = data / "part-000002.jsonl"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(bytes(content))


def lose_part(data: Path) -> None:
    (data / "part-000003.jsonl").unlink()


def swap_parts(data: Path) -> None:
    (data / "part-000001.jsonl").rename(data / "x")
    (data / "part-000002.jsonl").rename(data / "part-000001.jsonl")
    (data / "x").rename(data / "part-000002.jsonl")


def double_row(data: Path) -> None:
    path = data / "part-000004.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[2], *lines[4:]]))


def cut_part(data: Path) -> None:
    path = data / "part-000005.jsonl"
    path.write_bytes(path.read_bytes()[:-30])


def promise_more(data: Path) -> None:
    (data.parent / "_SUCCESS").write_text('{"rows": 70}')


def forge_fingerprint(data: Path) -> None:
    path = data.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["fingerprints"]["result"]["sampling"]["temperature"] = 1.0
    manifest["checksum"] = checksum({key: value for key, value in manifest.items() if key != "checksum"})
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage_byte, "part-000002.jsonl: its checksum is not the recorded one"),
        (lose_part, "part 3 is missing"),
        (swap_parts, "row 20 stands where rows 10 to 19 belong"),
        (double_row, "row 42 stands where rows 43 to 49 belong"),
        (cut_part, "part-000005.jsonl: cannot be read as a part"),
        (promise_more, "_SUCCESS promises 70 rows and the parts hold 60"),
        (forge_fingerprint, "the result fingerprint does not match its own checksum"),
    ],
)
def test_verify_finds(complete: Settings, harm: Any, words: str) -> None:
    harm(Path(complete.output) / "data")
    report = verify(complete)
    assert any(words in fault for fault in report.faults), report.faults


def test_verify_compares_with_the_input(complete: Settings) -> None:
    path = Path(complete.input)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"n": 25', b'"n": 26'))
    faults = verify(complete, with_input=True).faults
    assert len(faults) == 1
    assert "part-000002.jsonl: its rows of the input are not what they were" in faults[0]
    path.write_bytes(content.partition(b"\n")[2])
    assert verify(complete, with_input=True).faults


def test_verify_notes_what_lies_about(complete: Settings) -> None:
    data = Path(complete.output) / "data"
    shutil.copy(data / "part-000000.jsonl", data / ".tmp-part-000000.jsonl-1")
    os.mkdir(data / "mine")
    report = verify(complete)
    assert report.ok
    assert len(report.notes) == 2
