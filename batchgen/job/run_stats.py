"""`.batchgen/stats/`: what depends on scheduling, for the report. The supervisor writes, the report reads.

    rNNNNNN.jsonl   one line a commit: row, worker, cached tokens, preemptions, times, control tokens, each a
                    list; and what the reader repaired, one line a part
    sNNNNNN.jsonl   what each part holds, written with it
    tNNNNNN.jsonl   the course of the attempt: a sample every few seconds

NNNNNN is the claim. Nothing here decides anything: a line that is lost costs a number in the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.job.files import OS_FILES, FileOps
from batchgen.job.folder import JobFolder
from batchgen.job.linelog import LineLog, log_name, read_folder, read_lines
from batchgen.job.result_batch import STATS, ResultBatch

ROWS, PARTS, TIMES = "r", "s", "t"
FIRST_INTERVAL = 2.0
SAMPLES_AT_ONE_INTERVAL = 1000
SAMPLED = (
    "state",
    "rows_done",
    "rows_before",
    "error",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "preemptions",
    "running",
    "waiting",
    "pool_used",
    "pool_total",
)


@dataclass(slots=True)
class RowStats:
    """Columns of one line of the row log.

    Args:
        row, worker: which row ran where.
        cached_tokens: of its prompt, from the prefix cache.
        preemptions: times it lost its blocks.
        queue_ms, prefill_ms, decode_ms: from its arrival in the engine to its first step, from there to its
            first token, and from there to its end.
        control_tokens: that its own text spelled.
    """

    row: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    queue_ms: list[int] = field(default_factory=list)
    prefill_ms: list[int] = field(default_factory=list)
    decode_ms: list[int] = field(default_factory=list)
    control_tokens: list[int] = field(default_factory=list)

    def add(self, worker: int, batch: ResultBatch) -> None:
        """Take what a worker reported beside results."""
        self.row += batch.rows
        self.worker += [worker] * len(batch)
        for name in STATS:
            getattr(self, name).extend(batch.stats[name])

    def columns(self) -> dict[str, list[int]]:
        """By name."""
        return {name: getattr(self, name) for name in self.__slots__}


class RunStats:
    """Writes the row log and the course of one attempt.

    Args:
        folder: the output folder.
        epoch: the claim under which this process writes.
        files: how to reach the disk.
    """

    def __init__(self, folder: JobFolder, epoch: int, files: FileOps = OS_FILES) -> None:
        self._rows = LineLog(folder.stats / log_name(epoch, ROWS), files)
        self._times = LineLog(folder.stats / log_name(epoch, TIMES), files)
        self._interval = FIRST_INTERVAL
        self._samples = 0
        self._next_sample = 0.0

    def add_rows(self, rows: RowStats) -> None:
        """Append rows whose results are committed. Raises StorageError."""
        if rows.row:
            self._rows.append([rows.columns()])

    def add_notes(self, part: int, notes: Mapping[str, list[int]]) -> None:
        """Append what the reader repaired in a part: note to its rows' number and the first row.

        Raises:
            StorageError: the last line may be torn.
        """
        if notes:
            self._rows.append([{"part": part, "notes": notes}])

    def sample(self, seconds: float, snapshot: Mapping[str, Any]) -> None:
        """Keep a sample of the attempt's course if it is time for one.

        The interval doubles each thousand samples, so that a run of a month leaves some ten thousand.

        Args:
            seconds: since the attempt began.
            snapshot: the fields of `Progress`.

        Raises:
            StorageError: the last line may be torn.
        """
        if seconds < self._next_sample:
            return
        self._samples += 1
        if self._samples % SAMPLES_AT_ONE_INTERVAL == 0:
            self._interval *= 2
        self._next_sample = seconds + self._interval
        self.sample_now(seconds, snapshot)

    def sample_now(self, seconds: float, snapshot: Mapping[str, Any]) -> None:
        """Keep a sample. Raises StorageError."""
        self._times.append([{"seconds": round(seconds, 3), **{name: snapshot[name] for name in SAMPLED}}])

    def close(self) -> None:
        """Close the files."""
        self._rows.close()
        self._times.close()


def read_rows(folder: JobFolder, damaged: list[str]) -> Iterator[Mapping[str, Any]]:
    """Lines of the row logs of all attempts; a torn one is left out."""
    return read_folder(folder.stats, damaged, ROWS)


def read_times(folder: JobFolder, epoch: int, damaged: list[str]) -> Iterator[Mapping[str, Any]]:
    """Samples of one attempt, oldest first."""
    path = folder.stats / log_name(epoch, TIMES)
    return read_lines(path, damaged) if path.exists() else iter(())
