"""Files of sorted fixed-size records, and merging them as streams: sorting what memory cannot hold.

A record is a row of three unsigned 64-bit integers; records are ordered by the first, then the second, then
the third. `id_ledger` and `id_decisions` keep theirs in such files.

    records, little-endian | footer as JSON | length of the footer, 4 bytes | magic, 8 bytes

A file is written under a temporary name, forced to disk and renamed, so it is there entirely or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.types import StorageError

Records = npt.NDArray[np.uint64]
"""Shape (n, 3)."""

WIDTH = 3
RECORD_BYTES = 8 * WIDTH
CHUNK_RECORDS = 8192
_MAGIC = b"BGRUNS01"
_TAIL = struct.Struct("<I8s")


def sorted_records(records: Records) -> Records:
    """The records in order."""
    in_order: Records = records[np.lexsort((records[:, 2], records[:, 1], records[:, 0]))]
    return in_order


@dataclass(frozen=True, slots=True)
class Run:
    """One file.

    Args:
        path: of the file.
        count: records in it.
        facts: what its writer wanted to know again.
    """

    path: Path
    count: int
    facts: Mapping[str, Any]

    def chunks(self, first: int = 0) -> Iterator[Records]:
        """Its records from number `first` on, in order, a bounded number at a time. Raises StorageError."""
        with _storage(self.path, "read"), self.path.open("rb") as file:
            file.seek(first * RECORD_BYTES)
            left = self.count - first
            while left > 0:
                data = file.read(min(left, CHUNK_RECORDS) * RECORD_BYTES)
                chunk: Records = np.frombuffer(data, "<u8").reshape(-1, WIDTH)
                left -= len(chunk)
                yield chunk

    def find(self, key: int) -> int:
        """Number of the first record whose first integer is `key` or more. Raises StorageError."""
        with _storage(self.path, "read"), self.path.open("rb") as file:
            low, high = 0, self.count
            while low < high:
                middle = (low + high) // 2
                value = int.from_bytes(os.pread(file.fileno(), 8, middle * RECORD_BYTES), "little")
                low, high = (middle + 1, high) if value < key else (low, middle)
            return low


def write_run(path: Path, chunks: Iterable[Records], facts: Mapping[str, Any]) -> Run:
    """A new file of records that come in order; replaces `path` all at once.

    Raises:
        StorageError: `path` is as it was.
        Whatever `chunks` raises.
    """
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:12]}")
    count = 0
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(np.ascontiguousarray(chunk, "<u8").tobytes())
                count += len(chunk)
            footer = json.dumps({**facts, "count": count}).encode()
            file.write(footer + _TAIL.pack(len(footer), _MAGIC))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _storage_error(path, "written", error) from error
        raise
    return Run(path, count, dict(facts))


def read_run(path: Path) -> Run | None:
    """A file that `write_run` made; None where it is missing or something else. Raises StorageError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL.size))
            tail = file.read()
            length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
            start = size - _TAIL.size - length
            if magic != _MAGIC or start < 0:
                return None
            file.seek(start)
            facts = json.loads(file.read(length))
    except FileNotFoundError:
        return None
    except ValueError:
        return None
    except OSError as error:
        raise _storage_error(path, "read", error) from error
    count = facts.pop("count")
    return Run(path, count, facts) if count * RECORD_BYTES == start else None


class RunSorter:
    """Sorts any number of records, in files of a folder.

    Args:
        folder: for files named `prefix-N`; `close` removes them.
        prefix: of their names.
        most: records that are kept in memory.

    Attributes:
        added: whether anything was added.
    """

    def __init__(self, folder: Path, prefix: str, most: int) -> None:
        self._folder = folder
        self._prefix = prefix
        self._most = most
        self._held: list[Records] = []
        self._num_held = 0
        self._runs: list[Run] = []
        self.added = False

    def add(self, records: Records) -> None:
        """Take records in any order. Raises StorageError."""
        if len(records):
            self.added = True
            self._held.append(records)
            self._num_held += len(records)
            if self._num_held >= self._most:
                self._spill()

    def merged(self, *others: Run) -> Iterator[Records]:
        """Everything added, and the records of `others`, in order. Raises StorageError."""
        if self._held:
            self._spill()
        return merge([*self._runs, *others])

    def close(self) -> None:
        """Remove the files."""
        for run in self._runs:
            run.path.unlink(missing_ok=True)
        self._runs = []

    def _spill(self) -> None:
        records = sorted_records(np.concatenate(self._held))
        path = self._folder / f"{self._prefix}-{len(self._runs)}"
        self._runs.append(write_run(path, [records], {}))
        self._held, self._num_held = [], 0


class _Source:
    """One run that is being merged: what was read of it and not yet given."""

    def __init__(self, run: Run) -> None:
        self._chunks = run.chunks()
        self.left = run.count
        self.held: Records = np.empty((0, WIDTH), np.uint64)
        self.refill()

    @property
    def more(self) -> bool:
        """Whether records follow those that are held."""
        return self.left > len(self.held)

    def refill(self) -> None:
        if not len(self.held):
            self.held = next(self._chunks, self.held)

    def take(self, bound: tuple[int, int, int] | None) -> Records:
        """Those held that are not above `bound`; all for None."""
        count = len(self.held) if bound is None else _num_up_to(self.held, bound)
        taken, self.held = self.held[:count], self.held[count:]
        self.left -= count
        self.refill()
        return taken


def merge(runs: Sequence[Run]) -> Iterator[Records]:
    """The records of several runs in order, a bounded number at a time. Raises StorageError."""
    sources = [source for source in map(_Source, runs) if source.left]
    while sources:
        # Nothing that is still to be read can be below the last record held of its own source.
        bounds = [_last(source.held) for source in sources if source.more]
        bound = min(bounds, default=None)
        yield sorted_records(np.concatenate([source.take(bound) for source in sources]))
        sources = [source for source in sources if source.left]


def _last(records: Records) -> tuple[int, int, int]:
    a, b, c = records[-1].tolist()
    return a, b, c


def _num_up_to(records: Records, bound: tuple[int, int, int]) -> int:
    a, b, c = records[:, 0], records[:, 1], records[:, 2]
    x, y, z = (np.uint64(value) for value in bound)
    return int(np.count_nonzero((a < x) | ((a == x) & ((b < y) | ((b == y) & (c <= z))))))


@contextlib.contextmanager
def _storage(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _storage_error(path, action, error) from error


def _storage_error(path: Path, action: str, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: cannot be {action}: {error.strerror}; free some space or check the disk, then run the same "
        "command again (finished rows are kept)"
    )
