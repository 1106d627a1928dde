"""Which segments of the journal are still needed, and for what. `OpenJob` owns one.

A segment is needed for results of parts that are not committed, and for output tokens of rows that have no
result yet. A row of very many tokens would keep every segment that is written while it runs; so the tokens of
such rows are written again, in one record, where a segment holds nothing else that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from batchgen.job.files import storage
from batchgen.job.journal import Committed, JournalReader, JournalWriter, Kind, Location
from batchgen.job.replay import Replay, put_together


class LiveSegments:
    """What is in the journal and would be needed if the job were recovered now.

    Args:
        folder: `.batchgen/journal`.
        job_id: of the manifest.
        journal: that goes on being written.
        found: what was in it when that began.
        part_rows: rows in one part.
    """

    def __init__(
        self, folder: Path, job_id: str, journal: JournalWriter, found: Replay, part_rows: int
    ) -> None:
        self._folder = folder
        self._job_id = job_id
        self._journal = journal
        self._part_rows = part_rows
        # Of each segment the parts that its results belong to.
        self._parts_of = found.parts_of
        # Of each row without a result the records that hold its tokens, in order of writing.
        self._tokens_at = {row: partial.records for row, partial in found.partials.items()}
        self._moving: set[int] = set()

    def note(self, committed: Sequence[Committed]) -> None:
        """Take what is on disk now, in the order in which it was written."""
        for kind, row, location in committed:
            if location.segment not in self._parts_of:
                self._parts_of[location.segment] = set()
            if kind == Kind.RESULT:
                self._parts_of[location.segment].add(row // self._part_rows)
                self._tokens_at.pop(row, None)
            elif row in self._moving:
                # Moved tokens come first in their commit, and are all that were on disk before it.
                self._moving.discard(row)
                self._tokens_at[row] = [location]
            else:
                self._tokens_at.setdefault(row, []).append(location)

    def drop(self, final: Container[int], still_owner: Callable[[], None]) -> None:
        """Remove segments that nothing is needed of; tokens that alone keep one go into the next commit.

        Args:
            final: parts that are committed.
            still_owner: raises OwnershipError when another process has taken over.

        Raises:
            StorageError: a segment cannot be read or removed.
        """
        done = self._without_results(final)
        if not done:
            return
        self._forget_rows(final)
        needless = sorted(done - {at.segment for records in self._tokens_at.values() for at in records})
        if needless:
            # What was moved out of them is on disk by now. So whoever takes over after this accepts it where
            # it lies, and whoever has taken over before still finds it here.
            still_owner()
        for name in needless:
            with storage(self._folder / name, action="removed"):
                (self._folder / name).unlink(missing_ok=True)
            del self._parts_of[name]
        self._move(list(self._kept_by_tokens(done)))

    def clear(self) -> None:
        """Every segment is gone."""
        self._parts_of.clear()
        self._tokens_at.clear()

    def _without_results(self, final: Container[int]) -> set[str]:
        current = self._journal.current_segment
        return {
            segment
            for segment, parts in self._parts_of.items()
            if segment != current and all(part in final for part in parts)
        }

    def _forget_rows(self, final: Container[int]) -> None:
        """Rows that a part has though the journal holds no result of them, because they changed or stayed."""
        for row in [row for row in self._tokens_at if row // self._part_rows in final]:
            del self._tokens_at[row]

    def _kept_by_tokens(self, done: Container[str]) -> Iterator[tuple[int, list[Location]]]:
        for row, records in self._tokens_at.items():
            if row not in self._moving and any(record.segment in done for record in records):
                yield row, records

    def _move(self, rows: Sequence[tuple[int, list[Location]]]) -> None:
        """Put all tokens of these rows that are on disk into the next commit.

        Ahead of everything that waits for it, which goes on where they end. In one record for each sample:
        where one is torn the old ones still hold.
        """
        with closing(JournalReader(self._folder, self._job_id)) as reader:
            for row, records in rows:
                payloads = reader.payloads(Kind.PARTIAL, [(row, record) for record in records])
                known = put_together(zip(payloads, records, strict=True))
                if known is not None:
                    whole = [(Kind.PARTIAL, row, record.pack()) for record in known.whole()]
                    self._journal.put_first(whole)
                    self._moving.add(row)
