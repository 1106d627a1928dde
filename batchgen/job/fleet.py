"""The worker processes of one attempt: starting them, watching them, and what they have done in all.

The supervisor owns it and decides what each worker gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from batchgen.job.attempts import Attempt, attempt_file
from batchgen.job.counters import create_counters
from batchgen.job.folder import JobFolder
from batchgen.job.progress import TOKEN_COUNTERS
from batchgen.job.run_options import Launcher
from batchgen.job.workers import WorkerState, describe_exit
from batchgen.types import EngineError

HANG_STEPS = 20
LONGEST_TICK = 1.0


class Fleet:
    """Workers that live.

    Args:
        folder: the output folder.
        attempt: gets an entry for each process.
        launch: starts a worker process.
        config: for the start message, without what belongs to one worker.
        on_message: called from other threads with a worker's number and each message, at last None.
        hang_seconds: a worker that says nothing for so long while rows are with it hangs; more where its
            steps have been seen to take long.
    """

    def __init__(
        self,
        folder: JobFolder,
        attempt: Attempt,
        launch: Launcher,
        config: Mapping[str, Any],
        on_message: Callable[[int, Mapping[str, Any] | None], None],
        hang_seconds: float,
    ) -> None:
        self._folder = folder
        self._attempt = attempt
        self._launch = launch
        self._config = config
        self._on_message = on_message
        self._hang_seconds = hang_seconds
        self._workers: dict[int, WorkerState] = {}
        self._past_tokens = dict.fromkeys(TOKEN_COUNTERS, 0)

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, number: int) -> WorkerState | None:
        """The worker of that number; None when it has ended."""
        return self._workers.get(number)

    def start(self, pinned: Mapping[str, Any] | None) -> None:
        """Start one more.

        Raises:
            StorageError: its files cannot be made.
            EngineError: the process cannot be started.
        """
        number = len(self._attempt.workers)
        counters = attempt_file(self._folder, self._attempt.number, f"worker-{number}.counters")
        log = attempt_file(self._folder, self._attempt.number, f"worker-{number}.log")
        create_counters(counters)
        try:
            handle = self._launch(log, lambda content: self._on_message(number, content))
        except OSError as error:
            raise EngineError(
                f"a worker process cannot be started: {error.strerror or error}; check the memory of this "
                "machine and its limits of processes (ulimit -u) and open files (ulimit -n), then run the "
                "same command again"
            ) from error
        self._workers[number] = WorkerState(number, handle, counters)
        self._attempt.workers.append({"number": number, "pid": handle.pid, "end": None})
        self._attempt.save(self._folder)
        config = {**self._config, "pinned": pinned, "counters": str(counters)}
        handle.send({"type": "start", "config": config})

    def end(self, worker: WorkerState, code: int | None) -> None:
        """Let go of a worker that has ended; one that has not is killed. Its totals are kept."""
        if code is None:
            worker.handle.kill()
        for name, value in worker.tokens().items():
            self._past_tokens[name] += value
        self._attempt.workers[worker.number]["end"] = describe_exit(code)
        worker.release()
        del self._workers[worker.number]

    def kill(self) -> None:
        """End every process at once; nothing else changes."""
        for worker in self:
            if worker.handle.poll() is None:
                worker.handle.kill()

    def hanging(self, seconds: float) -> Iterator[WorkerState]:
        """Workers that have said nothing for too long.

        Args:
            seconds: since the last call. A longer time than a supervisor's loop takes is not counted: it was
                stopped itself, and has not read what its workers said.
        """
        for worker in self:
            if not (worker.ready and worker.busy):
                worker.silent_seconds = 0.0
                continue
            worker.silent_seconds += min(seconds, LONGEST_TICK)
            if worker.silent_seconds > max(self._hang_seconds, HANG_STEPS * worker.slowest_seconds):
                worker.silent_seconds = 0.0
                yield worker

    def totals(self) -> dict[str, float]:
        """Of the workers that live, their state now; token counters of all that ever lived too."""
        names = ("running", "waiting", "pool_used", "pool_total", "pool_waste", *TOKEN_COUNTERS)
        counted = (self._past_tokens, *(worker.progress for worker in self))
        return {name: sum(counters.get(name, 0) for counters in counted) for name in names}
