"""One worker process as the supervisor sees it: what it was sent, what it has reported, whether it works."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batchgen.job.counters import CommitMark, rows_in_step
from batchgen.job.progress import TOKEN_COUNTERS
from batchgen.job.replay import extend_partial
from batchgen.job.result_batch import ResultBatch
from batchgen.job.run_options import Worker
from batchgen.job.window import Pending


class WorkerState:
    """A worker and the rows that are with it.

    Args:
        number: of this process within the attempt.
        handle: to the process.
        counters: file of its counters.

    Attributes:
        ready: it has loaded the model and takes rows.
        want_rows: how many rows it likes to have.
        in_flight: rows sent and not answered, oldest first.
        stop_sent: it was asked to end.
        progress: its latest progress message.
        fatal: its last words, if it had any.
        proven: it has answered a row, or its canary.
        silent_seconds: for how long it has said nothing while rows were with it.
        slowest_seconds: the longest such time that ended well.
    """

    def __init__(self, number: int, handle: Worker, counters: Path) -> None:
        self.number = number
        self.handle = handle
        self.ready = False
        self.want_rows = 0
        self.in_flight: dict[int, Pending] = {}
        self.in_flight_bytes = 0
        self.stop_sent = False
        self.progress: Mapping[str, Any] = {}
        self.fatal: Mapping[str, Any] | None = None
        self.proven = False
        self.silent_seconds = 0.0
        self.slowest_seconds = 0.0
        self._counters = counters
        self._canary = False
        self._mark = CommitMark(counters)
        self._reported = 0
        self._barrier: int | None = None
        self._idle = False

    @property
    def drained(self) -> bool:
        """Whether it has said, after it was asked to drain, that nothing runs any more."""
        return self._idle or not self.in_flight

    def send_rows(self, rows: Iterable[Pending]) -> None:
        """Hand over rows."""
        message = []
        for pending in rows:
            self.in_flight[pending.row] = pending
            self.in_flight_bytes += pending.size
            partial = [ids.tolist() for ids in pending.partial] if pending.partial else []
            message.append((pending.row, pending.values, partial, pending.priority))
        if message:
            self.handle.send({"type": "rows", "rows": message})

    @property
    def busy(self) -> bool:
        """Whether it was given something that it has not answered."""
        return self._canary or bool(self.in_flight)

    def send_canary(self, pending: Pending) -> None:
        """Have it compute one token of a row that finished before."""
        self._canary = True
        self.handle.send({"type": "canary", "row": pending.row, "values": pending.values})

    def canary_answered(self) -> None:
        """It has."""
        self._canary = False
        self.proven = True

    def in_step(self) -> set[int]:
        """Of the rows that are with it, those that it was computing when it last began a step."""
        return self.in_flight.keys() & set(rows_in_step(self._counters))

    def heard(self) -> None:
        """A message has come."""
        self.slowest_seconds = max(self.slowest_seconds, self.silent_seconds)
        self.silent_seconds = 0.0

    def answered(self, batch: ResultBatch) -> tuple[list[Pending], ResultBatch]:
        """Results have come; gives the rows, and the results of those that this worker has."""
        found = [self.in_flight.pop(row, None) for row in batch.rows]
        answered = [pending for pending in found if pending is not None]
        self.in_flight_bytes -= sum([pending.size for pending in answered])
        if len(answered) < len(batch):
            batch = batch.without({place for place, pending in enumerate(found) if pending is None})
        return answered, batch

    def extend(self, row: int, sample: int, start: int, ids: list[int]) -> Pending | None:
        """Partial output has come; None for a row that this worker does not have, or after a gap."""
        pending = self.in_flight.get(row)
        if pending is None or not extend_partial(pending.partial, sample, start, ids):
            return None
        return pending

    def take_back(self) -> list[Pending]:
        """Rows that must be sent again, oldest first."""
        rows = list(self.in_flight.values())
        self.in_flight = {}
        self.in_flight_bytes = 0
        return rows

    def sampled(self, total: int) -> None:
        """Every token up to this many is in what was reported so far."""
        self._reported = total

    def committed(self) -> None:
        """What was reported so far is on disk; all of it, once every row is answered."""
        self._mark.update(self._reported if self.in_flight else self._mark.sampled)

    def drain(self, barrier: int) -> None:
        """Ask to finish what runs and drop the rest; the answer to checkpoint `barrier` follows that."""
        self._barrier = barrier
        self.handle.send({"type": "drain"})
        self.handle.send({"type": "checkpoint", "id": barrier})

    def passed(self, checkpoint: int | None) -> None:
        """A checkpoint was answered."""
        if self._barrier is not None and checkpoint == self._barrier:
            self._barrier = None

    def progressed(self, message: Mapping[str, Any], *, draining: bool) -> None:
        """A progress message; while draining, one from before the barrier says nothing about idleness."""
        self.progress = message
        if draining and self._barrier is None and not message["running"] and not message["waiting"]:
            self._idle = True

    def stop(self) -> None:
        """Ask to report its partial output and end."""
        if not self.stop_sent:
            self.stop_sent = True
            self.handle.send({"type": "stop"})

    def release(self) -> None:
        """Let go of the files of a worker that has ended."""
        self._mark.close()
        self.handle.close()

    def tokens(self) -> dict[str, int]:
        """Its token counters, by the names of `Progress`."""
        return {name: int(self.progress.get(name, 0)) for name in TOKEN_COUNTERS}


def describe_exit(code: int | None) -> str:
    """`was killed by SIGKILL`, `ended with exit code 1`."""
    if code is None:
        return "was ended by the supervisor"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
