"""Where each part begins in the input, how many rows it has and what they contained when first read.

Written while the rows pass by the first time, checked on every later reading, so that a changed input is
found however it was changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.data.row import PartIndexEntry, Position
from batchgen.job.files import OS_FILES, FileOps
from batchgen.job.folder import JobFolder
from batchgen.job.linelog import LineLog, log_name, read_folder
from batchgen.job.packed_table import PackedTable
from batchgen.types import InputError


class InputIndex:
    """The index of one job.

    Args:
        folder: the output folder.
        epoch: the claim under which this process writes; None to read only.
        files: how to reach the disk.

    Attributes:
        end: rows of the whole input, once a reader has reached its end.
        rows_seen: rows of the input that have been read at least.
        damaged: sentences about lines that were left out.
    """

    def __init__(self, folder: JobFolder, epoch: int | None = None, files: FileOps = OS_FILES) -> None:
        self.end: int | None = None
        self.rows_seen = 0
        self.damaged: list[str] = []
        self._parts: PackedTable[_Known] = PackedTable(_Known.to_json, _Known.from_json)
        self._log = None if epoch is None else LineLog(folder.index / log_name(epoch), files)
        for record in read_folder(folder.index, self.damaged):
            self._apply(record)

    def __iter__(self) -> Iterator[PartIndexEntry]:
        return (known.entry for known in self._parts.values())

    def get(self, part: int) -> PartIndexEntry | None:
        """The entry of a part; None while it has not been read to its end."""
        known = self._parts.get(part)
        return None if known is None else known.entry

    def nearest_start(self, part: int) -> Position:
        """A place at or before the part from which to read on to it; the place itself where it is known."""
        nearest = self._parts.nearest(part)
        if nearest is None:
            return Position()
        known = self._parts[nearest]
        return known.entry.start if nearest == part else known.following

    def check(self, entry: PartIndexEntry, inputs_name: str) -> None:
        """Compare a new reading of a part with the first one.

        Raises:
            InputError: its content is not the same.
        """
        known = self.get(entry.part)
        if known is not None and known.rows == entry.rows and known.digest != entry.digest:
            raise changed_input(entry.start.ordinal, entry.rows, inputs_name)

    def record(self, entry: PartIndexEntry, following: Position) -> None:
        """Keep the entry of a part that has been read; a longer reading of a part replaces a shorter one.

        Args:
            entry: of the part.
            following: where the row after its last one begins.
        """
        known = self.get(entry.part)
        if known is None or known.rows < entry.rows:
            self._append(_Known(entry, following).to_json())

    def record_end(self, rows: int) -> None:
        """Keep that the input ends after `rows` rows."""
        if self.end is None:
            self._append({"end": rows})

    def forget_end(self) -> None:
        """The input goes on behind what was its end."""
        self._append({"grown": True})
        self.sync()

    def reset(self, entries: Iterable[tuple[PartIndexEntry, Position]]) -> None:
        """Forget everything but these entries, each with where the row after its part begins.

        For an input that was changed behind the parts that stay.
        """
        entries = list(entries)
        self._append({"reset": True})
        for entry, following in entries:
            self.record(entry, following)
        self.sync()

    def sync(self) -> None:
        """Force what was recorded to disk."""
        if self._log is not None:
            self._log.sync()

    def close(self) -> None:
        """Close the log; what was read stays known."""
        if self._log is not None:
            self._log.close()

    def _append(self, record: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.append([record])
        self._apply(record)

    def _apply(self, record: dict[str, Any]) -> None:
        if "reset" in record:
            self.end, self.rows_seen = None, 0
            self._parts.clear()
            return
        if "grown" in record:
            self.end = None
            return
        if "end" in record:
            self.end = record["end"]
            self.rows_seen = max(self.rows_seen, record["end"])
            return
        read = _Known.from_json(record)
        known = self.get(read.entry.part)
        if known is None or known.rows < read.entry.rows:
            self._parts[read.entry.part] = read
            self.rows_seen = max(self.rows_seen, read.following.ordinal)


@dataclass(frozen=True, slots=True)
class _Known:
    """An entry, and where the row after its part begins."""

    entry: PartIndexEntry
    following: Position

    def to_json(self) -> dict[str, Any]:
        return {"entry": self.entry.to_json(), "next": self.following.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> _Known:
        return cls(PartIndexEntry.from_json(data["entry"]), Position.from_json(data["next"]))


def changed_input(first: int, rows: int, name: str) -> InputError:
    """The error for rows that are not what they were."""
    return InputError(
        f"{name}: rows {first} to {first + rows - 1} are not what they were when this job first read them; "
        "restore the input, or start over with --overwrite"
    )
