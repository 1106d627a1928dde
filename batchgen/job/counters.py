"""Counters of one worker process in a small mapped file, so that they survive its death, however it dies.

    magic 8 | pid 8 | sampled 8 | computed 8 || committed 8 || number of rows 8 | row 8 | row 8 …

The worker writes the first part after each step; the supervisor writes `committed` after each group commit:
how many of the sampled tokens are in results or partial results on disk. The rows are those of the step that
the worker is in, or was in last. Each part has one writer. Values are little-endian, 64 bits, aligned, and so
are never seen half-written.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchgen.job.files import storage

MAGIC = int.from_bytes(b"BGCOUNT1", "little")
FILE_BYTES = 128
_COMMITTED_AT = 64
_ROWS_AT = FILE_BYTES
_WORKER = struct.Struct("<QQQQ")
_VALUE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Counters:
    """What one worker process has done, in tokens.

    Args:
        pid: of the worker; 0 if it never wrote.
        sampled: output tokens sampled since it started.
        computed: positions computed, prompts included.
        committed: of the sampled ones, those that the last group commit made safe.
    """

    pid: int
    sampled: int
    computed: int
    committed: int

    @property
    def at_risk(self) -> int:
        """Tokens sampled since the last group commit: what a kill now costs at most."""
        return max(0, self.sampled - self.committed)


def create_counters(path: Path) -> None:
    """An empty file for a worker that is about to start. Raises StorageError."""
    with storage(path, FILE_BYTES):
        path.write_bytes(_WORKER.pack(MAGIC, 0, 0, 0).ljust(FILE_BYTES, b"\0"))


class CounterWriter:
    """The worker's half.

    Args:
        path: `counters` of the start message; the supervisor has created the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._map = _map(path)
        self._pid = os.getpid()
        self.update(sampled=0, computed=0)

    def update(self, *, sampled: int, computed: int) -> None:
        """Set the totals since this process started, in tokens. Costs a memory write."""
        _WORKER.pack_into(self._map, 0, MAGIC, self._pid, sampled, computed)

    def begin_step(self, rows: Iterable[int]) -> None:
        """Say which rows are computed now. Costs a memory write."""
        data = array("q", rows)
        start = _ROWS_AT + _VALUE.size
        if len(self._map) < start + 8 * len(data):
            self._map.resize(start + 16 * len(data))
        # A death in between must not show rows of two steps.
        _VALUE.pack_into(self._map, _ROWS_AT, 0)
        self._map[start : start + 8 * len(data)] = data.tobytes()
        _VALUE.pack_into(self._map, _ROWS_AT, len(data))

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


class CommitMark:
    """The supervisor's half: how many sampled tokens of a worker are safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._map = _map(path)

    @property
    def sampled(self) -> int:
        """What the worker has counted so far."""
        return int(_WORKER.unpack_from(self._map)[2])

    def update(self, committed: int) -> None:
        """Set after the fsync that made them safe."""
        _VALUE.pack_into(self._map, _COMMITTED_AT, committed)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def read_counters(path: Path) -> Counters | None:
    """What the file says; None if it is missing or not one of ours."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < FILE_BYTES:
        return None
    magic, pid, sampled, computed = _WORKER.unpack_from(data)
    if magic != MAGIC:
        return None
    return Counters(pid, sampled, computed, _VALUE.unpack_from(data, _COMMITTED_AT)[0])


def rows_in_step(path: Path) -> list[int]:
    """The rows that a worker was computing when it last said so; empty where that is not known."""
    try:
        data = path.read_bytes()[_ROWS_AT:]
    except OSError:
        return []
    if len(data) < _VALUE.size:
        return []
    (count,) = _VALUE.unpack_from(data)
    rows = array("q", data[_VALUE.size : _VALUE.size + 8 * count])
    return rows.tolist() if len(rows) == count else []


def _map(path: str | os.PathLike[str]) -> mmap.mmap:
    with storage(str(path)):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, 0)
        finally:
            os.close(fd)
