"""Which worker gets which rows, and how many workers there are. The supervisor calls it in each turn.

A worker is given as many rows as keep it busy. Rows that may kill the engine run apart: in a worker that has
nothing else.
"""

from __future__ import annotations

from batchgen.job.fleet import Fleet
from batchgen.job.manifest import Manifest
from batchgen.job.poison import Suspects
from batchgen.job.pool import RowPool
from batchgen.job.run_options import RunOptions
from batchgen.job.window import Pending
from batchgen.job.workers import WorkerState

REFILL_SHARE = 8
"""A worker gets more rows once one in so many of those that it wants is missing."""


class Dispatcher:
    """Hands rows of the pool, and suspects, to the workers.

    Args:
        manifest: of the job; the first worker settles what is pinned there.
        options: how many workers, and how many bytes of rows may be with them.
        pool: rows that wait.
        suspects: rows that run apart.
        fleet: the workers; more are started here.

    Attributes:
        apart: the worker that runs suspects.
        most_workers: that there may be.
    """

    def __init__(
        self, manifest: Manifest, options: RunOptions, pool: RowPool, suspects: Suspects, fleet: Fleet
    ) -> None:
        self._manifest = manifest
        self._options = options
        self._pool = pool
        self._suspects = suspects
        self._fleet = fleet
        self.apart: WorkerState | None = None
        self.most_workers = options.workers

    def run(self) -> None:
        """Give ready workers rows, and start workers when there are rows to give.

        Raises:
            StorageError, EngineError: as starting a worker does.
        """
        for worker in self._fleet:
            if worker.ready and not worker.stop_sent:
                self._give(worker)
        self._start_workers()

    def _start_workers(self) -> None:
        """As many as there are rows for; the first of a job alone, because the others repeat its choices."""
        pinned = dict(self._manifest.pinned) or None
        most = self.most_workers if pinned else 1
        starting = sum(not worker.ready for worker in self._fleet)
        while len(self._fleet) < most and len(self._pool) + len(self._suspects) > starting:
            self._fleet.start(pinned)
            starting += 1

    def _give(self, worker: WorkerState) -> None:
        if self.apart is None and self._suspects and not worker.busy:
            self.apart = worker
        if worker is not self.apart:
            self._fill(worker)
        elif not worker.busy:
            self._run_apart(worker)

    def _run_apart(self, worker: WorkerState) -> None:
        """Give the next group of suspects to a worker that runs nothing else."""
        self._suspects.passed()
        canary = self._suspects.canary
        if not self._suspects:
            self.apart = None
            self._fill(worker)
        elif canary is not None and not worker.proven:
            worker.send_canary(canary)
        else:
            worker.send_rows(self._suspects.next_group())

    def _fill(self, worker: WorkerState) -> None:
        room = self._share(worker) - len(worker.in_flight)
        if room <= 0 or (worker.in_flight and room < worker.want_rows // REFILL_SHARE):
            return
        batch: list[Pending] = []
        free = self._options.in_flight_bytes // self._options.workers - worker.in_flight_bytes
        while len(batch) < room and (free > 0 or not (batch or worker.in_flight)):
            pending = self._pool.take()
            if pending is None:
                break
            batch.append(pending)
            free -= pending.size
        worker.send_rows(batch)

    def _share(self, worker: WorkerState) -> int:
        """Rows that a worker may have; near the end no more than its part of what is left."""
        if not self._pool.exhausted or self.most_workers == 1:
            return worker.want_rows
        left = len(self._pool) + sum(len(w.in_flight) for w in self._fleet if w is not self.apart)
        return min(worker.want_rows, -(-left // self.most_workers))
