"""Who owns a folder, and what an owner that has lost it can still do: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import PATIENCE

from batchgen.data.row_result import RowResult
from batchgen.job.claims import Claims
from batchgen.job.folder import JobFolder
from batchgen.job.journal import JournalWriter, Kind, ResultRecord
from batchgen.job.lease import Lease, LeaseRecord, Owner, acquire_lease, read_lease
from batchgen.job.replay import replay
from batchgen.types import OwnershipError

OWNER = """
import sys, time
from pathlib import Path
from batchgen.job.folder import JobFolder
from batchgen.job.lease import acquire_lease
lease = acquire_lease(JobFolder(Path(sys.argv[1])), float(sys.argv[2]), print)
lease.start(lambda: None)
print("owner", flush=True)
time.sleep(6000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "out")
    made.create()
    return made


@pytest.fixture
def owner(folder: JobFolder) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the folder and beats every 0.1 s."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(folder.root), "0.4"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "owner\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


class Clock:
    """A clock that only `sleep` moves; `after` is called with the time after each sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0
        self.after: Callable[[float], None] = lambda now: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now += seconds
        self.after(self.now)


def take(folder: JobFolder, said: list[str], clock: Clock | None = None) -> Lease:
    if clock is None:
        return acquire_lease(folder, 60.0, said.append)
    return acquire_lease(folder, 60.0, said.append, clock, clock.sleep)


def elsewhere(folder: JobFolder, beat: int = 5) -> LeaseRecord:
    """A lease of a process on another host."""
    owner = Owner("faraway", 4242, "another boot", "pid:[1]", 99, locked=True)
    record = LeaseRecord(owner, beat, 2.0, 60.0, released=False)
    folder.lease.write_bytes(record.encode())
    return record


def beat_after(seconds: float, now: float, folder: JobFolder) -> None:
    if now > seconds:
        elsewhere(folder, beat=6)


def test_a_living_owner_is_named(folder: JobFolder, owner: subprocess.Popen[str]) -> None:
    said: list[str] = []
    with pytest.raises(OwnershipError, match=rf"process {owner.pid} on host .* is running this job"):
        take(folder, said)
    assert f"process {owner.pid}" in said[0]
    assert "waiting up to 60 s" in said[0]


def test_a_run_right_after_kill_9_does_not_wait(folder: JobFolder, owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()
    said: list[str] = []
    take(folder, said, Clock()).release()
    assert said == []


def test_a_run_right_after_kill_9_does_not_wait_for_the_remains(
    folder: JobFolder, owner: subprocess.Popen[str]
) -> None:
    """The owner is dead but nobody has collected its exit code yet."""
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    said: list[str] = []
    take(folder, said, Clock()).release()
    assert said == []


def test_a_stopped_owner_loses_the_lease_and_notices(folder: JobFolder, owner: subprocess.Popen[str]) -> None:
    owner.send_signal(signal.SIGSTOP)
    said: list[str] = []
    lease = acquire_lease(folder, 0.6, said.append)
    mine = read_lease(folder.lease)
    owner.send_signal(signal.SIGCONT)
    time.sleep(0.4)
    assert read_lease(folder.lease) == mine
    assert "has shown no life" in said[-1]
    lease.release()


def test_another_host_that_beats_is_respected(folder: JobFolder) -> None:
    elsewhere(folder)
    clock = Clock()
    clock.after = lambda now: beat_after(20, now, folder)
    said: list[str] = []
    with pytest.raises(OwnershipError, match="process 4242 on host faraway"):
        take(folder, said, clock)
    assert clock.now < 22


def test_another_host_that_is_silent_is_waited_for_once(folder: JobFolder) -> None:
    elsewhere(folder)
    clock = Clock()
    said: list[str] = []
    take(folder, said, clock).release()
    assert clock.now >= 60
    assert len(said) == 2


def test_a_clock_that_differs_between_hosts_does_not_matter(folder: JobFolder) -> None:
    """Times of the file do not count, only that the counter moves."""
    elsewhere(folder)
    os.utime(folder.lease, (0, 0))
    clock = Clock()
    clock.after = lambda now: beat_after(5, now, folder)
    with pytest.raises(OwnershipError):
        take(folder, [], clock)


def test_a_released_lease_is_free_at_once(folder: JobFolder) -> None:
    take(folder, []).release()
    clock = Clock()
    take(folder, [], clock).release()
    assert clock.slept == 0


def test_a_torn_lease_file_does_not_stop_anyone(folder: JobFolder) -> None:
    folder.lease.write_bytes(b'{"owner": {"ho')
    take(folder, [], Clock()).release()


def test_a_process_with_the_same_pid_is_not_the_owner(folder: JobFolder) -> None:
    me = Owner.myself(locked=False)
    record = LeaseRecord(replace(me, started=me.started - 1), 1, 2.0, 60.0, released=False)
    folder.lease.write_bytes(record.encode())
    clock = Clock()
    take(folder, [], clock).release()
    assert clock.slept == 0


def test_losing_the_lease_is_reported(folder: JobFolder) -> None:
    lost = threading.Event()
    lease = acquire_lease(folder, 0.2, print)
    lease.start(lost.set)
    folder.lease.unlink()
    assert lost.wait(PATIENCE)
    lease.release()


def test_epochs_grow_and_older_holders_notice(folder: JobFolder) -> None:
    claims = Claims(folder)
    first = claims.take({"pid": 1})
    claims.check(first.epoch)
    second = claims.take({"pid": 2})
    assert second.epoch == first.epoch + 1
    with pytest.raises(OwnershipError, match="another run took over"):
        claims.check(first.epoch)


def write_row(folder: JobFolder, epoch: int, row: int) -> JournalWriter:
    writer = JournalWriter(folder.journal, "job", epoch)
    add_row(writer, row)
    return writer


def add_row(writer: JournalWriter, row: int) -> None:
    writer.append(Kind.RESULT, row, ResultRecord(b"d" * 16, RowResult("ok")).pack())
    writer.commit()


def rows_accepted(folder: JobFolder, accepted: dict[str, int]) -> set[int]:
    return set(replay(folder.journal, "job", accepted, 1000, {}).results)


def test_what_a_frozen_writer_adds_after_a_takeover_is_void(folder: JobFolder) -> None:
    claims = Claims(folder)
    frozen = write_row(folder, claims.take({}).epoch, 1)
    second = claims.take({})
    add_row(frozen, 2)
    late = JournalWriter(folder.journal, "job", 1, writer=1)
    add_row(late, 3)
    write_row(folder, second.epoch, 4)
    assert rows_accepted(folder, dict(second.accepted)) == {1}
    third = claims.take({})
    assert rows_accepted(folder, dict(third.accepted)) == {1, 4}
    add_row(frozen, 5)
    assert rows_accepted(folder, dict(claims.take({}).accepted)) == {1, 4}
    assert [p.name for p in claims.void_segments(third)] == ["e000001-w001-000001.seg"]


def test_a_claim_that_was_never_finished_accepts_nothing_and_hides_nothing(folder: JobFolder) -> None:
    claims = Claims(folder)
    write_row(folder, claims.take({}).epoch, 1)
    (folder.claims / "000002").mkdir()
    third = claims.take({})
    assert third.epoch == 3
    assert rows_accepted(folder, dict(third.accepted)) == {1}
    write_row(folder, 2, 2)
    assert rows_accepted(folder, dict(claims.take({}).accepted)) == {1}


def test_old_claims_can_be_forgotten(folder: JobFolder) -> None:
    claims = Claims(folder)
    for _ in range(3):
        claims.take({})
    claims.forget_before(3)
    assert os.listdir(folder.claims) == ["000003"]
    assert claims.current() == 3
