"""Who owns an output folder right now. The lease keeps two runs from wasting work; it is not what keeps
the output right: that is the epochs of `claims.py`.

On one host the kernel knows: a lock on `.batchgen/lock`, and the owner's process id with its start time, so
that a run right after `kill -9` does not wait. From another host, or when the owner is stopped, only the
heartbeat in `lease.json` tells: a counter, watched on the observer's own monotonic clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen.job.files import atomic_write, storage
from batchgen.job.folder import JobFolder
from batchgen.types import OwnershipError

RECORD_BYTES = 1024
LONGEST_BEAT_SECONDS = 2.0
_POLL_SECONDS = 0.1
_HELD = -1
_NO_LOCKS = -2


@dataclass(frozen=True, slots=True)
class Owner:
    """One process, named so that nobody else can be taken for it.

    Args:
        boot: identity of the running kernel; empty where it cannot be known.
        pid_namespace: in which `pid` counts.
        started: start time of the process in clock ticks since boot.
        locked: whether it holds the lock as well.
    """

    host: str
    pid: int
    boot: str
    pid_namespace: str
    started: int
    locked: bool = False

    @classmethod
    def myself(cls, *, locked: bool) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _boot_id(), _pid_namespace(), _start_time(pid) or 0, locked)

    def is_here(self) -> bool:
        """Whether this kernel, and this namespace, is where the process would be."""
        return bool(self.boot) and self.boot == _boot_id() and self.pid_namespace == _pid_namespace()

    def is_dead(self, *, have_lock: bool) -> bool:
        """Whether this kernel knows that the owner is gone; False when it cannot tell."""
        if not self.boot or self.boot != _boot_id():
            return False
        if self.locked and have_lock:
            return True
        return self.is_here() and _start_time(self.pid) != self.started


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What `lease.json` holds. `beat` grows while the owner lives."""

    owner: Owner
    beat: int
    beat_seconds: float
    lease_seconds: float
    released: bool

    def encode(self) -> bytes:
        """Always the same length, so that a beat overwrites in place and needs no space."""
        text = json.dumps(asdict(self)).encode()
        return text.ljust(RECORD_BYTES - 1) + b"\n"


def read_lease(path: Path) -> LeaseRecord | None:
    """The lease as it is on disk; None where there is none, or while it is being overwritten."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        return LeaseRecord(**{**record, "owner": Owner(**record["owner"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Lease:
    """Ownership of a folder, kept alive by a thread until `release`; made by `acquire_lease`."""

    def __init__(self, folder: JobFolder, lease_seconds: float, lock: int) -> None:
        self._path = folder.lease
        self._lock = lock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        beat_seconds = min(lease_seconds / 4, LONGEST_BEAT_SECONDS)
        owner = Owner.myself(locked=lock >= 0)
        self._record = LeaseRecord(owner, 1, beat_seconds, lease_seconds, released=False)
        # A new file under the name: an earlier owner that wakes goes on beating in its own, unlinked one.
        atomic_write(self._path, self._record.encode())
        with storage(self._path):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def start(self, on_lost: Callable[[], None]) -> None:
        """Begin to beat; `on_lost` is called once, from the thread, when another process has taken over."""
        self._thread = threading.Thread(target=self._beat, args=(on_lost,), name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop beating and let the next run start at once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            if self.held:
                self._write(released=True)
        os.close(self._fd)
        if self._lock >= 0:
            os.close(self._lock)

    def _beat(self, on_lost: Callable[[], None]) -> None:
        while not self._stop.wait(self._record.beat_seconds):
            # A beat that fails is tried again with the next; only ownership that moved ends the run.
            with contextlib.suppress(OSError):
                if not self.held:
                    on_lost()
                    return
                self._write(released=False)

    def _write(self, *, released: bool) -> None:
        old = self._record
        self._record = LeaseRecord(old.owner, old.beat + 1, old.beat_seconds, old.lease_seconds, released)
        os.pwrite(self._fd, self._record.encode(), 0)
        os.fsync(self._fd)

    @property
    def held(self) -> bool:
        """Whether the lease file is still this process's."""
        try:
            there, ours = os.stat(self._path), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def acquire_lease(
    folder: JobFolder,
    lease_seconds: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Become the owner, at once if the last one is known to be gone.

    Args:
        folder: whose `.batchgen` exists.
        lease_seconds: how long a heartbeat may stand still before its owner counts as gone.
        say: told when there is something to wait for.
        clock, sleep: replaced in tests.

    Raises:
        OwnershipError: another owner lives; names its host and process.
    """
    lock = _try_lock(folder.lock)
    try:
        record = read_lease(folder.lease)
        if not _free(record, lock):
            lock = _wait_for_lapse(folder, record, lock, lease_seconds, say, clock, sleep)
        return Lease(folder, lease_seconds, lock)
    except BaseException:
        if lock >= 0:
            os.close(lock)
        raise


def _free(record: LeaseRecord | None, lock: int) -> bool:
    """Whether nobody owns the folder. Whoever holds the lock is at least about to."""
    if lock == _HELD:
        return False
    return record is None or record.released or record.owner.is_dead(have_lock=lock >= 0)


def _wait_for_lapse(
    folder: JobFolder,
    record: LeaseRecord | None,
    lock: int,
    lease_seconds: float,
    say: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int:
    """Watch the heartbeat; returns the lock, if it could be had since."""
    say(
        f"{folder.root} is owned by {_describe(record)}; waiting up to {lease_seconds:g} s "
        "to see whether it still lives"
    )
    deadline = clock() + lease_seconds
    while clock() < deadline:
        sleep(min(_POLL_SECONDS, lease_seconds / 20))
        now = read_lease(folder.lease)
        if lock == _HELD:
            lock = _try_lock(folder.lock)
        if _free(now, lock):
            return lock
        if now is not None and not now.released and _moved(record, now):
            raise OwnershipError(
                f"{folder.root}: {_describe(now)} is running this job; wait until it ends, "
                "or stop it first (kill it with SIGTERM) and run the same command again"
            )
    say(f"{_describe(record)} has shown no life for {lease_seconds:g} s; taking over")
    return lock


def _moved(before: LeaseRecord | None, now: LeaseRecord) -> bool:
    return before is None or before.owner != now.owner or before.beat != now.beat


def _describe(record: LeaseRecord | None) -> str:
    if record is None:
        return "a process that is just starting"
    return f"process {record.owner.pid} on host {record.owner.host}"


def _try_lock(path: Path) -> int:
    """A descriptor that holds the lock, `_HELD` when another process does, or `_NO_LOCKS`."""
    with storage(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except OSError as error:
        os.close(fd)
        return _HELD if error.errno in (errno.EAGAIN, errno.EACCES) else _NO_LOCKS


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which the process started; None if there is none, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, spaces and parentheses too.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
