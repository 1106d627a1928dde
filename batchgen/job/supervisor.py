"""The loop of a running job: rows to the workers, results to the journal, whole parts to `data/`.

Torch-free. One thread runs the loop and owns all state; other threads (readers of worker channels, the
heartbeat, the assembly of parts, signal handlers) only put events into its queue.
"""

from __future__ import annotations

import queue
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from batchgen.data.row import Row
from batchgen.data.sink import warm_up
from batchgen.job.assembly import Assembler
from batchgen.job.attempts import Attempt, attempt_file
from batchgen.job.counters import create_counters
from batchgen.job.events import Assembled, Message, StopAsked, Stopping
from batchgen.job.journal import Kind, PartialRecord, ResultRecord
from batchgen.job.parts import PartCommit
from batchgen.job.progress import TOKEN_COUNTERS, Progress, save_progress
from batchgen.job.recovery import OpenJob
from batchgen.job.run_options import Launcher, RunOptions
from batchgen.job.run_stats import RowStats
from batchgen.job.window import OpenPart, Pending, Window
from batchgen.job.workers import WorkerState, describe_exit
from batchgen.types import BatchgenError, EngineError, InputError, OwnershipError, StorageError, UsageError

MAX_BARREN_DEATHS = 3
COMMIT_BYTES = 4 * 1024 * 1024
PROGRESS_SECONDS = 0.5
FEWEST_PARTS = 4
COMMIT_SECONDS = 2.0
GOODBYE_SECONDS = 1.0
REFILL_SHARE = 8
_ERRORS = {2: UsageError, 3: InputError, 5: StorageError, 7: EngineError}


@dataclass(slots=True)
class _Uncommitted:
    """What the next commit makes final: rows with their counts and stats."""

    counts: list[tuple[str, Any]] = field(default_factory=list)
    stats: RowStats = field(default_factory=RowStats)


class Supervisor:
    """Drives one attempt from recovery to its last commit.

    Args:
        job: the recovered state of the folder.
        options: how to drive it.
        events: what happens outside the loop, in order; a `StopAsked` may be put there from any thread and
            from signal handlers.
        launch: starts a worker process.
        worker_config: for the start message.
        columns: that the prompt needs.
        report: called with a snapshot now and then, and at the end.
        say: called with sentences for the user.
    """

    def __init__(
        self,
        job: OpenJob,
        options: RunOptions,
        events: queue.SimpleQueue[Any],
        *,
        launch: Launcher,
        worker_config: Mapping[str, Any],
        columns: tuple[str, ...],
        attempt: Attempt,
        report: Callable[[Progress], None],
        say: Callable[[str], None],
    ) -> None:
        self._job = job
        self._options = options
        self._launch = launch
        self._worker_config = worker_config
        self._attempt = attempt
        self._report = report
        self._say = say
        self._events: queue.SimpleQueue[Message | Assembled | StopAsked] = events
        self._window = Window(
            job.inputs,
            job.index,
            part_rows=job.manifest.part_rows,
            selection=job.selection,
            columns=columns,
            committed=job.parts.committed,
            replaced=job.replaced,
            found=job.found,
            parts=options.window_parts or FEWEST_PARTS,
            counts=job.counts,
            on_bad_row=self._bad_row,
            on_notes=job.stats.add_notes,
        )
        self._rows_run = 0
        self._ready_at: float | None = None
        self._workers: list[WorkerState] = []
        self._again: deque[Pending] = deque()
        self._uncommitted = _Uncommitted()
        self._assembler = Assembler(job)
        self._assembling: set[int] = set()
        self._threads = ThreadPoolExecutor(1, "assembly")
        # While the workers load; else the first part would make memory grow by half while rows run.
        self._threads.submit(warm_up)
        self._stopping: Stopping | None = None
        self._barren_deaths = 0
        self._checkpoints = 0
        self._started = time.monotonic()
        self._next_checkpoint = self._started + options.checkpoint_seconds
        self._next_report = self._started
        self._past_tokens = dict.fromkeys(TOKEN_COUNTERS, 0)

    def abandon(self) -> None:
        """Kill the workers, because the process ends at once."""
        for worker in self._workers:
            if worker.handle.poll() is None:
                worker.handle.kill()

    def run(self) -> str | None:
        """Work until every row is final or the run must stop.

        Returns:
            None when complete, else why it stopped; it can be resumed.

        Raises:
            BatchgenError: what ended the run; what was finished before is committed.
        """
        try:
            self._loop()
        except BatchgenError as error:
            if not isinstance(error, StorageError | OwnershipError):
                self._salvage()
            raise
        finally:
            self._close()
        if self._stopping is not None:
            if self._stopping.error is not None:
                raise self._stopping.error
            return self._stopping.reason
        return None

    def _loop(self) -> None:
        while not self._finished():
            self._handle(self._next_event())
            self._tick(time.monotonic())
            if self._stopping is None:
                self._admit()
            self._assemble()
        self._commit()

    def _finished(self) -> bool:
        if self._stopping is not None:
            return not self._workers
        idle = not self._again and not any(w.in_flight for w in self._workers)
        return idle and self._window.exhausted and self._window.num_open == 0

    # Rows out.

    def _admit(self) -> None:
        """Give ready workers rows, and start workers when there are rows to give."""
        try:
            self._fill_workers()
        except InputError as error:
            self._begin_stop(str(error), error, drain=False)

    def _fill_workers(self) -> None:
        for worker in self._workers:
            if worker.ready and not worker.stop_sent:
                self._fill(worker)
        while len(self._workers) < self._options.workers:
            # Also where nothing has to run: reading is what finds that out.
            pending = self._next_row()
            if pending is None:
                return
            self._again.appendleft(pending)
            self._start_worker()

    def _fill(self, worker: WorkerState) -> None:
        room = worker.want_rows - len(worker.in_flight)
        if worker.in_flight and room < worker.want_rows // REFILL_SHARE:
            return
        batch: list[Pending] = []
        free = self._options.in_flight_bytes - worker.in_flight_bytes
        while len(batch) < room and (free > 0 or not (batch or worker.in_flight)):
            pending = self._next_row()
            if pending is None:
                break
            batch.append(pending)
            free -= pending.size
        worker.send_rows(batch)

    def _next_row(self) -> Pending | None:
        return self._again.popleft() if self._again else self._window.take()

    def _bad_row(self, row: Row) -> None:
        error = row.error
        if error is not None and (self._options.stop_on_bad_row or self._options.fail_fast):
            setting = "input.on_bad_row: stop" if self._options.stop_on_bad_row else "run.fail_fast"
            raise InputError(
                f"row {row.ordinal} is bad ({error.error_class}: {error.message}) and {setting} is set; "
                "let bad rows be recorded, or correct the row and continue with --accept-drift"
            )

    # Workers.

    def _start_worker(self) -> None:
        number = len(self._attempt.workers)
        counters = attempt_file(self._job.folder, self._attempt.number, f"worker-{number}.counters")
        log = attempt_file(self._job.folder, self._attempt.number, f"worker-{number}.log")
        create_counters(counters)
        try:
            handle = self._launch(log, lambda content: self._events.put(Message(number, content)))
        except OSError as error:
            raise EngineError(f"a worker process cannot be started: {error.strerror}") from error
        self._workers.append(WorkerState(number, handle, counters))
        self._attempt.workers.append({"number": number, "pid": handle.pid, "end": None})
        self._attempt.save(self._job.folder)
        config = {
            **self._worker_config,
            "pinned": dict(self._job.manifest.pinned) or None,
            "counters": str(counters),
        }
        handle.send({"type": "start", "config": config})

    def _handle(self, event: Message | Assembled | StopAsked | None) -> None:
        match event:
            case Message():
                worker = next((w for w in self._workers if w.number == event.worker), None)
                if worker is not None and event.content is None:
                    self._closed(worker)
                elif worker is not None and event.content is not None:
                    self._receive(worker, event.content)
            case Assembled():
                self._assembled(event)
            case StopAsked():
                self._begin_stop(event.reason, event.error, drain=event.error is None)

    def _receive(self, worker: WorkerState, message: Mapping[str, Any]) -> None:
        match message["type"]:
            case "ready":
                self._ready(worker, message)
            case "results":
                for row, result, stats in message["rows"]:
                    self._result(worker, row, result, stats)
                if self._job.journal.pending_bytes > COMMIT_BYTES:
                    self._commit()
            case "partials":
                self._partials(worker, message)
            case "progress":
                worker.progressed(message, draining=self._stopping is not None)
            case "fatal":
                worker.fatal = message
            case unknown:
                raise EngineError(f"the worker sent a message of unknown type {unknown!r}")

    def _ready(self, worker: WorkerState, message: Mapping[str, Any]) -> None:
        self._job.pin(message["pinned"], message["facts"], self._say)
        self._attempt.facts = message["facts"]
        self._attempt.save(self._job.folder)
        for note in message["notes"]:
            self._say(note)
        worker.ready = True
        if self._ready_at is None:
            self._ready_at = time.monotonic()
        worker.want_rows = max(1, message["want_rows"])
        if self._options.window_parts is None:
            rows = 2 * worker.want_rows * self._options.workers
            self._window.parts = max(FEWEST_PARTS, 1 + -(-rows // self._job.manifest.part_rows))

    def _result(
        self, worker: WorkerState, row: int, result: Mapping[str, Any], stats: Mapping[str, Any]
    ) -> None:
        pending = worker.answered(row)
        if pending is None:
            return
        self._barren_deaths = 0
        self._job.journal.append(Kind.RESULT, row, ResultRecord(pending.digest, result).pack())
        self._uncommitted.counts.append((result["status"], result["usage"]))
        self._uncommitted.stats.add(row, worker.number, stats)
        if self._options.fail_fast and result["status"] == "error" and self._stopping is None:
            error_class, text = result["error"]
            error = InputError(f"row {row} failed ({error_class}: {text}) and run.fail_fast is set")
            self._begin_stop(str(error), error, drain=False)

    def _partials(self, worker: WorkerState, message: Mapping[str, Any]) -> None:
        for row, start, ids in message["rows"]:
            pending = worker.extend(row, start, ids)
            if pending is not None and ids:
                self._barren_deaths = 0
                record = PartialRecord(pending.digest, start, ids)
                self._job.journal.append(Kind.PARTIAL, row, record.pack())
        worker.sampled(message["sampled"])
        worker.passed(message["id"])
        self._commit()

    def _closed(self, worker: WorkerState) -> None:
        """A worker has ended, as asked or not."""
        code = worker.handle.wait(COMMIT_SECONDS)
        lines = worker.handle.last_lines()
        self._workers.remove(worker)
        self._end(worker, code)
        if worker.fatal is not None:
            error = _ERRORS.get(worker.fatal["exit_code"], EngineError)(worker.fatal["message"])
            # An engine that failed may do better when started anew; nothing else will.
            if not isinstance(error, EngineError):
                raise error
            lines = [str(error)]
        if self._stopping is None:
            self._again.extendleft(reversed(worker.take_back()))
            self._died(worker, code, lines)

    def _end(self, worker: WorkerState, code: int | None) -> None:
        """Keep the totals of a worker; one that has not ended by itself is killed."""
        if code is None:
            worker.handle.kill()
        for name, value in worker.tokens().items():
            self._past_tokens[name] += value
        self._attempt.workers[worker.number]["end"] = describe_exit(code)
        worker.release()

    def _died(self, worker: WorkerState, code: int | None, lines: list[str]) -> None:
        self._barren_deaths += 1
        what = f"worker {worker.number} (process {worker.handle.pid}) {describe_exit(code)}"
        if self._barren_deaths >= MAX_BARREN_DEATHS:
            tail = "\n  ".join(["its last words:", *lines]) if lines else "it said nothing"
            raise EngineError(
                f"{what}, {self._barren_deaths} times in a row without a single new result; try less "
                f"memory (engine.max_num_seqs, engine.kv_cache_memory) or another node; {tail}"
            )
        self._say(f"{what}; starting another, which gets its {len(self._again)} rows again")

    # Results in.

    def _commit(self) -> None:
        """Make everything received so far final, with one fsync."""
        job, batch = self._job, self._uncommitted
        for record in job.journal.commit():
            job.note_segment(record.location.segment, record.row)
            if record.kind == Kind.RESULT:
                self._window.finish(record.row, record.location)
        for status, usage in batch.counts:
            job.counts.count(status, usage)
        self._rows_run += len(batch.counts)
        self._uncommitted = _Uncommitted()
        for worker in self._workers:
            worker.committed()
        job.index.sync()
        job.stats.add_rows(batch.stats)

    def _assemble(self) -> None:
        """Hand whole parts to the thread that writes them."""
        if self._stopping is not None and self._stopping.error is not None:
            return
        for part in self._window.whole_parts():
            if part.part not in self._assembling:
                self._assembling.add(part.part)
                self._threads.submit(self._write_part, part)

    def _write_part(self, part: OpenPart) -> None:
        try:
            outcome: PartCommit | BaseException = self._assembler.write(part)
        except BaseException as error:
            outcome = error
        self._events.put(Assembled(part.part, outcome))

    def _assembled(self, event: Assembled) -> None:
        self._assembling.discard(event.part)
        if isinstance(event.outcome, BaseException):
            raise event.outcome
        self._window.close_part(event.part)
        self._job.drop_segments()

    # Time.

    def _next_event(self) -> Message | Assembled | StopAsked | None:
        now = time.monotonic()
        wake = [now if self._window.busy else self._next_checkpoint, self._next_report]
        if self._stopping is not None:
            wake += [at for at in (self._stopping.stop_at, self._stopping.kill_at) if at > now]
        try:
            return self._events.get(timeout=max(0.0, min(wake) - now))
        except queue.Empty:
            return None

    def _tick(self, now: float) -> None:
        if now >= self._next_checkpoint:
            self._next_checkpoint = now + self._options.checkpoint_seconds
            self._checkpoint()
        if now >= self._next_report:
            self._next_report = now + PROGRESS_SECONDS
            progress = self._progress()
            self._job.stats.sample(progress.seconds, asdict(progress))
            self._report(progress)
        if self._stopping is not None:
            self._press(self._stopping, now)
        elif self._options.max_time is not None and now - self._started >= self._options.max_time:
            self._begin_stop(f"run.max_time ({self._options.max_time:g} s) is over", None, drain=True)

    def _checkpoint(self) -> None:
        self._job.claims.check(self._attempt.number)
        self._checkpoints += 1
        for worker in self._workers:
            if worker.ready:
                worker.handle.send({"type": "checkpoint", "id": self._checkpoints})
        self._commit()
        save_progress(self._job.folder, self._attempt.number, self._progress())
        free = shutil.disk_usage(self._job.folder.root).free
        if free < self._options.min_free_disk:
            error = StorageError(
                f"{self._job.folder.root}: {free:,} bytes are free, less than run.min_free_disk "
                f"({self._options.min_free_disk:,}); free some space, then run the same command again "
                "(finished rows are kept)"
            )
            self._begin_stop(str(error), error, drain=False)

    # The end.

    def _begin_stop(self, reason: str, error: BatchgenError | None, *, drain: bool) -> None:
        if self._stopping is not None:
            return
        grace = self._options.grace
        now = time.monotonic()
        stop_at = now + max(grace - 2 * COMMIT_SECONDS, grace / 2) if drain else now
        kill_at = now + max(grace - COMMIT_SECONDS, grace * 3 / 4)
        self._stopping = Stopping(reason, error, stop_at, kill_at)
        if error is None:
            self._say(f"stopping ({reason}): finishing what runs, at most {grace:g} s")
        self._checkpoints += 1
        for worker in self._workers:
            if not worker.ready:
                worker.handle.kill()
            elif drain:
                worker.drain(self._checkpoints)

    def _press(self, stopping: Stopping, now: float) -> None:
        """Bring workers to their end: those that have drained, then all, then by force."""
        for worker in self._workers:
            if worker.drained or now >= stopping.stop_at:
                worker.stop()
            if now >= stopping.kill_at and worker.handle.poll() is None:
                worker.handle.kill()

    def _salvage(self) -> None:
        """Commit what had been received when an error ended the loop."""
        try:
            self._job.claims.check(self._attempt.number)
            self._commit()
        except BatchgenError as error:
            self._say(f"the last results could not be committed: {error}")

    def _close(self) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            self._end(worker, worker.handle.wait(GOODBYE_SECONDS if self._window.exhausted else 0.0))
        self._workers = []
        self._threads.shutdown(cancel_futures=True)
        self._drain_assembled()
        self._assembler.close()
        self._window.close()
        final = self._progress()
        final.state = "done" if self._stopping is None else "stopped"
        save_progress(self._job.folder, self._attempt.number, final)
        with suppress(StorageError):
            self._job.stats.sample_now(final.seconds, asdict(final))
        self._report(final)

    def _drain_assembled(self) -> None:
        """Take note of parts that were committed while the loop ended."""
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, Assembled) and isinstance(event.outcome, PartCommit):
                self._window.close_part(event.part)
            elif isinstance(event, Assembled):
                self._say(f"part {event.part} could not be committed: {event.outcome}")

    def _progress(self) -> Progress:
        counts, now = self._job.counts, time.monotonic()
        progress = Progress(
            state=self._state(),
            rows_total=self._window.selected if self._window.exhausted else self._job.rows_total(),
            rows_done=counts.rows,
            rows_before=counts.rows - self._rows_run,
            ok=counts.ok,
            error=counts.error,
            skipped=counts.skipped,
            parts_done=len(self._job.parts.committed),
            seconds=now - self._started,
            working_seconds=0.0 if self._ready_at is None else now - self._ready_at,
            workers=len(self._workers),
        )
        for counters in (self._past_tokens, *(worker.progress for worker in self._workers)):
            for name in ("running", "waiting", "pool_used", "pool_total", "pool_waste", *TOKEN_COUNTERS):
                setattr(progress, name, getattr(progress, name) + counters.get(name, 0))
        return progress

    def _state(self) -> str:
        if self._stopping is not None:
            return "draining"
        if not self._workers:
            return "starting"
        return "running" if any(w.ready for w in self._workers) else "loading"
