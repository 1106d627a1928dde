"""Where each part begins in the input, how many rows it has and what they contained when first read.

Written while the rows pass by the first time, checked on every later reading, so that a changed input is
found however it was changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from batchgen.data.row import PartIndexEntry, Position
from batchgen.job.files import OS_FILES, FileOps
from batchgen.job.folder import JobFolder
from batchgen.job.linelog import LineLog, log_name, read_folder
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
        self._entries: dict[int, PartIndexEntry] = {}
        self._starts: dict[int, Position] = {0: Position()}
        self._log = None if epoch is None else LineLog(folder.index / log_name(epoch), files)
        for record in read_folder(folder.index, self.damaged):
            self._apply(record)

    def __iter__(self) -> Iterator[PartIndexEntry]:
        return iter([self._entries[part] for part in sorted(self._entries)])

    def get(self, part: int) -> PartIndexEntry | None:
        """The entry of a part; None while it has not been read to its end."""
        return self._entries.get(part)

    def nearest_start(self, part: int) -> Position:
        """A place at or before the part from which to read on to it; the place itself where it is known."""
        known = self._starts.get(part)
        if known is not None:
            return known
        return self._starts[max(number for number in self._starts if number < part)]

    def check(self, entry: PartIndexEntry, inputs_name: str) -> None:
        """Compare a new reading of a part with the first one.

        Raises:
            InputError: its content is not the same.
        """
        known = self._entries.get(entry.part)
        if known is not None and known.rows == entry.rows and known.digest != entry.digest:
            raise changed_input(entry.start.ordinal, entry.rows, inputs_name)

    def record(self, entry: PartIndexEntry, following: Position) -> None:
        """Keep the entry of a part that has been read; a longer reading of a part replaces a shorter one.

        Args:
            entry: of the part.
            following: where the row after its last one begins.
        """
        known = self._entries.get(entry.part)
        if known is None or known.rows < entry.rows:
            self._append({"entry": entry.to_json(), "next": following.to_json()})

    def record_end(self, rows: int) -> None:
        """Keep that the input ends after `rows` rows."""
        if self.end is None:
            self._append({"end": rows})

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
        """Close the log."""
        if self._log is not None:
            self._log.close()

    def _append(self, record: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.append([record])
        self._apply(record)

    def _apply(self, record: dict[str, Any]) -> None:
        if "reset" in record:
            self.end, self._entries, self._starts = None, {}, {0: Position()}
            return
        if "end" in record:
            self.end = record["end"]
            self.rows_seen = max(self.rows_seen, record["end"])
            return
        entry = PartIndexEntry.from_json(record["entry"])
        known = self._entries.get(entry.part)
        if known is None or known.rows < entry.rows:
            self._entries[entry.part] = entry
            self._starts[entry.part] = entry.start
            following = Position.from_json(record["next"])
            self._starts[entry.part + 1] = following
            self.rows_seen = max(self.rows_seen, following.ordinal)


def changed_input(first: int, rows: int, name: str) -> InputError:
    """The error for rows that are not what they were."""
    return InputError(
        f"{name}: rows {first} to {first + rows - 1} are not what they were when this job first read them; "
        "restore the input, or start over with --overwrite"
    )
