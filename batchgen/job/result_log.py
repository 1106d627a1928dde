"""What workers have reported, kept until a commit makes it final. The supervisor owns one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchgen.job.journal import Kind, PartialRecord, result_payload
from batchgen.job.parts import Counts
from batchgen.job.result_batch import ResultBatch
from batchgen.job.run_stats import RowStats
from batchgen.job.window import Pending, Window

if TYPE_CHECKING:
    from batchgen.job.recovery import OpenJob


class ResultLog:
    """Puts results into the journal, and tells window, counts and statistics once they are on disk.

    Args:
        job: whose journal it is.
        window: that the rows are from.

    Attributes:
        rows: results of this attempt that are on disk.
    """

    def __init__(self, job: OpenJob, window: Window) -> None:
        self._job = job
        self._window = window
        self._counts = Counts()
        self._stats = RowStats()
        self.rows = 0

    @property
    def bytes(self) -> int:
        """That the next commit will write."""
        return self._job.journal.pending_bytes

    @property
    def has_results(self) -> bool:
        """Whether there is a result that is not on disk."""
        return self._counts.rows > 0

    def add(self, answered: Sequence[Pending], batch: ResultBatch, worker: int | None) -> None:
        """Keep results for the next commit.

        Args:
            answered: the rows.
            batch: their results, in the same order.
            worker: number of the process that computed them; None if none did.
        """
        append = self._job.journal.append
        for pending, packed in zip(answered, batch.packed, strict=True):
            append(Kind.RESULT, pending.row, result_payload(pending.digest, packed))
        self._window.answered(batch.rows)
        self._counts.count_all(
            batch.status, batch.prompt_tokens, batch.completion_tokens, batch.reasoning_tokens
        )
        if worker is not None:
            self._stats.add(worker, batch)

    def add_partial(self, pending: Pending, sample: int, start: int, ids: Sequence[int]) -> None:
        """Keep further output of a sample of an unfinished row, from index `start` of its output on."""
        record = PartialRecord(pending.digest, start, ids, sample)
        self._job.journal.append(Kind.PARTIAL, pending.row, record.pack())

    def commit(self) -> None:
        """Make everything received so far final, with one fsync. Raises StorageError."""
        job, counts, stats = self._job, self._counts, self._stats
        committed = job.journal.commit()
        job.live.note(committed)
        self._window.finish([(row, location) for kind, row, location in committed if kind == Kind.RESULT])
        self._counts, self._stats = Counts(), RowStats()
        job.counts.add(counts)
        self.rows += counts.rows
        job.index.sync()
        job.stats.add_rows(stats)
