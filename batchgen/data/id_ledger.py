"""Which ids the rows of the input have, on disk, and which of them occur twice: in bounded memory.

`job/ids.py` fills the ledger while it reads the input ahead of, or beside, the run, and keeps it in the
output folder, so that a later run goes on where this one stopped. Each file holds the hashes of the ids of a
range of ordinals, sorted; neighbouring files are merged now and then, eight at a time, which is when ids
that are in both are found. So an id that occurs twice is found early, and at the latest by `merge_all`.

    ids-<first ordinal>-<ordinal after the last>     128 bits of hash, ordinal
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.data.id_hash import BYTES, hash_id, looks_suffixed
from batchgen.data.row import Position
from batchgen.data.sorted_runs import WIDTH, Records, Run, merge, read_run, sorted_records, write_run

HELD_ROWS = 1 << 17
_FANOUT = 8
_NAME = re.compile(r"ids-(\d+)-(\d+)")


@dataclass(slots=True)
class ReadIds:
    """The ids of the selected rows in a stretch of the input that somebody has read.

    Args:
        first: ordinal of the first row of the stretch.
        end: where the row after its last begins.
        ordinals, hashes: of the selected rows.
        looks_suffixed: as in `IdLedger`.
    """

    first: int
    end: Position = field(default_factory=Position)
    ordinals: array[int] = field(default_factory=lambda: array("Q"))
    hashes: bytearray = field(default_factory=bytearray)
    looks_suffixed: bool = False

    def add(self, row_id: str, ordinal: int) -> None:
        """Take the id of the next selected row."""
        self.hashes += hash_id(row_id)
        self.ordinals.append(ordinal)
        if "#" in row_id:
            self.looks_suffixed = self.looks_suffixed or looks_suffixed(row_id)

    def behind(self, ordinal: int) -> ReadIds:
        """Those of the rows from `ordinal` on."""
        if ordinal <= self.first:
            return self
        i = bisect_left(self.ordinals, ordinal)
        return replace(self, first=ordinal, ordinals=self.ordinals[i:], hashes=self.hashes[BYTES * i :])


class IdLedger:
    """The ids of the selected rows with ordinals from `start` on.

    Args:
        folder: for its files; exists.
        start: ordinal of the first row.
        find_twice: whether ids that occur twice are looked for while rows are added.

    Attributes:
        end: rows before this ordinal are on disk.
        position: where the row of that ordinal begins; None for the beginning.
        rows: selected rows on disk.
        twice: ordinals of two rows with one id, once such a pair was found.
        looks_suffixed: whether any id is spelled like one that `duplicate_ids: suffix` makes.
    """

    def __init__(self, folder: Path, start: int, *, find_twice: bool) -> None:
        self._folder = folder
        self._find_twice = find_twice
        self._held = ReadIds(start)
        self.start = start
        self.end = start
        self.position: Position | None = None
        self.rows = 0
        self.looks_suffixed = False
        self.twice: tuple[int, int] | None = None
        self._runs: list[Run] = []
        self._places: list[Position] = []
        self._load()

    @property
    def held(self) -> int:
        """Rows that are not on disk yet."""
        return len(self._held.ordinals)

    def add(self, row_id: str, ordinal: int) -> None:
        """Take the id of the next selected row."""
        self._held.add(row_id, ordinal)

    def add_read(self, ids: ReadIds) -> None:
        """Take the ids of the rows that come next."""
        self._held.hashes += ids.hashes
        self._held.ordinals += ids.ordinals
        self._held.looks_suffixed = self._held.looks_suffixed or ids.looks_suffixed

    def flush(self, position: Position) -> None:
        """Put what was added on disk; `position` is where the first row begins that was not looked at.

        Raises:
            StorageError: it cannot be written.
        """
        if position.ordinal <= self.end:
            return
        records = _records(self._held.hashes, self._held.ordinals)
        self.looks_suffixed = self.looks_suffixed or self._held.looks_suffixed
        self._held = ReadIds(position.ordinal)
        self.position = position
        self._places.append(position)
        self.rows += len(records)
        self._write(self.end, position, [sorted_records(records)])
        self.end = position.ordinal
        while self.twice is None and self._has_alike():
            self._merge(self._runs[-_FANOUT:])

    def rows_from(self, ordinal: int) -> int:
        """Selected rows on disk that are not before a row. Raises StorageError."""
        if ordinal <= self.start:
            return self.rows
        return sum(int(np.count_nonzero(c[:, 2] >= ordinal)) for run in self._runs for c in run.chunks())

    def clear(self) -> None:
        """Forget every row, on disk too."""
        for run in self._runs:
            run.path.unlink(missing_ok=True)
        self._runs, self._places = [], []
        self._held = ReadIds(self.start)
        self.end, self.position, self.rows = self.start, None, 0
        self.looks_suffixed, self.twice = False, None

    def nearest(self, ordinal: int) -> Position | None:
        """A place at or before a row, from which to read on to it; None for the beginning."""
        before = [place for place in self._places if place.ordinal <= ordinal]
        return max(before, key=lambda place: place.ordinal, default=None)

    def merge_all(self) -> None:
        """Make one file of all; from then on `twice` says whether an id occurs twice. Raises StorageError."""
        if len(self._runs) > 1 and self.twice is None:
            self._merge(self._runs)

    def chunks(self) -> Iterator[Records]:
        """All records on disk, in order of their hashes, a bounded number at a time. Raises StorageError."""
        return merge(self._runs)

    def _has_alike(self) -> bool:
        """Whether the last files are enough, and near enough in size, to be merged."""
        last = self._runs[-_FANOUT:]
        return len(last) == _FANOUT and last[0].count < _FANOUT * max(1, last[-1].count)

    def _merge(self, runs: list[Run]) -> None:
        position = Position.from_json(runs[-1].facts["position"])
        count = len(runs)
        self._write(_range(runs[0].path)[0], position, merge(runs))
        if self.twice is not None:
            return
        merged = self._runs.pop()
        for run in self._runs[-count:]:
            run.path.unlink(missing_ok=True)
        del self._runs[-count:]
        self._runs.append(merged)

    def _write(self, first: int, position: Position, chunks: Iterable[Records]) -> None:
        """A run of the rows from `first` to `position`; nothing where an id is found to occur twice."""
        path = self._folder / f"ids-{first}-{position.ordinal}"
        facts = {"position": position.to_json(), "looks_suffixed": self.looks_suffixed}
        checked = self._checked(iter(chunks)) if self._find_twice else chunks
        try:
            self._runs.append(write_run(path, checked, facts))
        except _Twice as found:
            self.twice = found.ordinals

    def _checked(self, chunks: Iterator[Records]) -> Iterator[Records]:
        for chunk, repeated in with_repeats(chunks):
            if len(repeated):
                earliest = repeated[np.argmin(repeated[:, 2])]
                raise _Twice((int(earliest[0]), int(earliest[2])))
            yield chunk

    def _load(self) -> None:
        """Take up the files that cover the ordinals from `start` on without a gap; remove all others."""
        ranges: dict[int, list[tuple[int, Path]]] = {}
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name):
                first, end = _range(path)
                ranges.setdefault(first, []).append((end, path))
        while found := sorted(ranges.pop(self.end, [])):
            run = read_run(found[-1][1])
            if run is None:
                break
            self._runs.append(run)
            self.end, self.rows = found[-1][0], self.rows + run.count
            self.position = Position.from_json(run.facts["position"])
            self._places.append(self.position)
            self.looks_suffixed = self.looks_suffixed or run.facts["looks_suffixed"]
        kept = {run.path for run in self._runs}
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name) and path not in kept:
                path.unlink()


class _Twice(Exception):
    def __init__(self, ordinals: tuple[int, int]) -> None:
        super().__init__(ordinals)
        self.ordinals = ordinals


def with_repeats(chunks: Iterator[Records]) -> Iterator[tuple[Records, Records]]:
    """With each chunk, those of its records whose hash a record before them has.

    Args:
        chunks: records of hash, hash, ordinal, in order.

    Yields:
        A chunk; and for each repeated record, shape (m, 3): ordinal of the first of its hash, its place
        among those of its hash (from 2), its own ordinal.
    """
    last: Records | None = None
    first_ordinal, place = 0, 0
    for chunk in chunks:
        if not len(chunk):
            continue
        new = np.ones(len(chunk), bool)
        new[1:] = (chunk[1:, :2] != chunk[:-1, :2]).any(axis=1)
        if last is not None and (chunk[0, :2] == last[:2]).all():
            new[0] = False
        starts = np.maximum.accumulate(np.where(new, np.arange(len(chunk)), -1))
        carried = starts < 0
        places = np.arange(len(chunk)) - starts + 1
        places[carried] = np.arange(1, np.count_nonzero(carried) + 1) + place
        firsts = chunk[np.maximum(starts, 0), 2]
        firsts[carried] = first_ordinal
        repeated = np.stack([firsts, places.astype(np.uint64), chunk[:, 2]], axis=1)[~new]
        last, first_ordinal, place = chunk[-1], int(firsts[-1]), int(places[-1])
        yield chunk, repeated


def _records(hashes: bytearray, ordinals: array[int]) -> Records:
    records = np.empty((len(ordinals), WIDTH), np.uint64)
    records[:, :2] = np.frombuffer(bytes(hashes), ">u8").reshape(-1, 2)
    records[:, 2] = _column(ordinals)
    return records


def _column(ordinals: array[int]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(ordinals, np.uint64) if len(ordinals) else np.empty(0, np.uint64)


def _range(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])
