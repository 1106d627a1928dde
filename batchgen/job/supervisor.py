"""The loop of a running job: rows to the workers, results to the journal, whole parts to `data/`.

Torch-free. One thread runs the loop and owns all state; other threads (readers of worker channels, the
heartbeat, the assembly of parts, signal handlers) only put events into its queue.
"""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from batchgen.data.row import Row
from batchgen.grammar import agreeing, counted
from batchgen.job.assembly_thread import AssemblyThread
from batchgen.job.attempts import Attempt
from batchgen.job.dispatch import Dispatcher
from batchgen.job.events import Assembled, Message, StopAsked, Stopping
from batchgen.job.fleet import Fleet
from batchgen.job.parts import PartCommit
from batchgen.job.poison import Suspects, guilty_result
from batchgen.job.pool import RowPool
from batchgen.job.progress import Progress, save_progress
from batchgen.job.recovery import OpenJob
from batchgen.job.result_batch import ResultBatch
from batchgen.job.result_log import ResultLog
from batchgen.job.row_order import ORDERS, shuffled
from batchgen.job.run_options import RunHooks, RunOptions
from batchgen.job.window import Pending, Window
from batchgen.job.worker_deaths import WorkerDeaths
from batchgen.job.workers import WorkerState
from batchgen.types import (
    BatchgenError,
    EngineError,
    InputError,
    OwnershipError,
    Status,
    StorageError,
    UsageError,
)

COMMIT_BYTES = 4 * 1024 * 1024
PROGRESS_SECONDS = 0.5
FEWEST_PARTS, MOST_PARTS = 4, 32
COMMIT_SECONDS = 2.0
GOODBYE_SECONDS = 1.0
_ERRORS = {2: UsageError, 3: InputError, 5: StorageError, 7: EngineError}


class Supervisor:
    """Drives one attempt from recovery to its last commit.

    Args:
        job: the recovered state of the folder.
        options: how to drive it.
        events: what happens outside the loop, in order; a `StopAsked` may be put there from any thread and
            from signal handlers.
        hooks: what it calls; but for `beside`.
        worker_config: for the start message.
        columns: that the prompt needs.
    """

    def __init__(
        self,
        job: OpenJob,
        options: RunOptions,
        events: queue.SimpleQueue[Any],
        hooks: RunHooks,
        *,
        worker_config: Mapping[str, Any],
        columns: tuple[str, ...],
        attempt: Attempt,
    ) -> None:
        self._job = job
        self._options = options
        self._attempt = attempt
        self._report = hooks.report
        self._say = hooks.say
        self._events: queue.SimpleQueue[Message | Assembled | StopAsked] = events
        self._suspects = Suspects(job.folder.suspects)
        self._window = Window(
            job.inputs,
            job.index,
            part_rows=job.manifest.part_rows,
            selection=job.selection,
            columns=columns,
            order=ORDERS[options.order] if options.shuffle is None else shuffled(options.shuffle),
            priority=options.priority,
            committed=job.parts.committed,
            replaced=job.replaced,
            found=job.found,
            parts=options.window_parts or FEWEST_PARTS,
            counts=job.counts,
            decisions=None if job.decisions is None else job.decisions.another(),
            ids=job.ids,
            on_done=self._suspects.finished,
            on_bad_row=self._bad_row,
            on_notes=job.stats.add_notes,
        )
        self._results = ResultLog(job, self._window)
        self._ready_at: float | None = None
        self._pool = RowPool(
            self._window,
            part_rows=job.manifest.part_rows,
            most_bytes=options.in_flight_bytes,
            is_expected=self._suspects.expects,
        )
        self._fleet = Fleet(
            job.folder,
            attempt,
            hooks.launch,
            {**worker_config, "workers": options.workers},
            lambda number, content: events.put(Message(number, content)),
            options.hang_seconds,
        )
        self._dispatcher = Dispatcher(job.manifest, options, self._pool, self._suspects, self._fleet)
        self._deaths = WorkerDeaths(
            job,
            columns,
            find_guilty=options.poison,
            pool=self._pool,
            suspects=self._suspects,
            dispatcher=self._dispatcher,
            convict=self._convict,
            say=hooks.say,
        )
        self._assembly = AssemblyThread(job, events)
        self._notes: set[str] = set()
        self._stopping: Stopping | None = None
        self._checkpoints = 0
        self._started = self._ticked = time.monotonic()
        self._next_checkpoint = self._started + options.checkpoint_seconds
        self._next_report = self._started

    def abandon(self) -> None:
        """Kill the workers, because the process ends at once."""
        self._fleet.kill()

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
        self._suspects.forget()
        return None

    def _loop(self) -> None:
        while not self._finished():
            self._handle(self._next_event())
            self._tick(time.monotonic())
            if self._stopping is None:
                self._admit()
                if self._results.has_results and self._nothing_runs():
                    # Else the end of a job would wait for the next checkpoint.
                    self._commit()
            self._assemble()
        self._commit()

    def _finished(self) -> bool:
        if self._stopping is not None:
            return not len(self._fleet)
        return self._nothing_runs() and self._window.num_open == 0

    def _nothing_runs(self) -> bool:
        """Whether every row of the input has been answered."""
        idle = not len(self._pool) and not any(worker.busy for worker in self._fleet)
        return idle and self._window.exhausted

    # Rows out.

    def _admit(self) -> None:
        """Read on, and give workers what there is."""
        try:
            # Also where nothing has to run: reading is what finds that out.
            self._pool.fill()
        except InputError as error:
            self._begin_stop(str(error), error, drain=False)
            return
        self._dispatcher.run()
        if self._pool.starved:
            self._hurry()

    def _hurry(self) -> None:
        """Nothing can be read before parts are committed: see to what holds them up.

        More parts are opened where that is rows that run. Where it is the writing of parts, more would only
        wait in memory.
        """
        if self._window.awaits_commit:
            self._commit()
        elif self._options.window_parts is None and not self._window.whole_parts():
            hungry = any(w.ready and 2 * len(w.in_flight) < w.want_rows for w in self._fleet)
            if hungry:
                self._window.parts = max(self._window.parts, min(self._window.parts + 1, MOST_PARTS))

    def _bad_row(self, row: Row) -> None:
        error = row.error
        if error is not None and (self._options.stop_on_bad_row or self._options.fail_fast):
            setting = "input.on_bad_row: stop" if self._options.stop_on_bad_row else "run.fail_fast"
            raise InputError(
                f"row {row.ordinal} is bad ({error.error_class}: {error.message}) and {setting} is set; "
                "correct the row and continue with --accept-drift, or let bad rows be recorded "
                "(input.on_bad_row: record, run.fail_fast: false)"
            )

    # Workers.

    def _handle(self, event: Message | Assembled | StopAsked | None) -> None:
        match event:
            case Message():
                worker = self._fleet.find(event.worker)
                if worker is not None and event.content is None:
                    self._closed(worker)
                elif worker is not None and event.content is not None:
                    self._receive(worker, event.content)
            case Assembled():
                self._assembled(event)
            case StopAsked():
                self._begin_stop(event.reason, event.error, drain=event.error is None)

    def _receive(self, worker: WorkerState, message: Mapping[str, Any]) -> None:
        worker.heard()
        match message["type"]:
            case "ready":
                self._ready(worker, message)
            case "results":
                self._answered(worker, *worker.answered(ResultBatch.of(message)))
                if self._results.bytes > COMMIT_BYTES:
                    self._commit()
            case "partials":
                self._partials(worker, message)
            case "progress":
                worker.progressed(message, draining=self._stopping is not None)
            case "canary":
                worker.canary_answered()
                self._deaths.engine_worked()
            case "fatal":
                worker.fatal = message
            case unknown:
                raise EngineError(
                    f"worker {worker.number} sent a message of unknown type {unknown!r}; is it of another "
                    "version of batchgen? Install it anew, then run the same command again"
                )

    def _ready(self, worker: WorkerState, message: Mapping[str, Any]) -> None:
        self._job.pin(message["pinned"], message["facts"], self._say)
        self._attempt.facts = message["facts"]
        self._attempt.save(self._job.folder)
        for note in message["notes"]:
            if note not in self._notes:
                self._notes.add(note)
                self._say(note)
        worker.ready = True
        if self._ready_at is None:
            self._ready_at = time.monotonic()
        self._deaths.worker_started()
        worker.want_rows = max(1, message["want_rows"])
        if self._options.window_parts is None:
            rows = 2 * worker.want_rows * self._options.workers
            self._window.parts = max(FEWEST_PARTS, 1 + -(-rows // self._job.manifest.part_rows))

    def _answered(self, worker: WorkerState, answered: Sequence[Pending], batch: ResultBatch) -> None:
        if not answered:
            return
        self._deaths.engine_worked()
        tokens = batch.completion_tokens
        ok = [place for place, status in enumerate(batch.status) if status == Status.OK]
        if ok:
            worker.proven = True
            self._deaths.row_finished()
            shortest = min(ok, key=tokens.__getitem__)
            self._suspects.finished(answered[shortest], tokens[shortest])
        self._results.add(answered, batch, worker.number)
        self._check_fail_fast(batch)

    def _check_fail_fast(self, batch: ResultBatch) -> None:
        if not self._options.fail_fast or Status.ERROR not in batch.status or self._stopping is not None:
            return
        place = batch.status.index(Status.ERROR)
        failure = batch.result(place).error
        assert failure is not None
        error = InputError(
            f"row {batch.rows[place]} failed ({failure.error_class}: {failure.message}) and run.fail_fast is "
            "set; correct the row and continue with --accept-drift, or go on past it with "
            "--set run.fail_fast=false"
        )
        self._begin_stop(str(error), error, drain=False)

    def _partials(self, worker: WorkerState, message: Mapping[str, Any]) -> None:
        for row, sample, start, ids in message["rows"]:
            pending = worker.extend(row, sample, start, ids)
            if pending is not None and ids:
                self._deaths.engine_worked()
                self._results.add_partial(pending, sample, start, ids)
        worker.sampled(message["sampled"])
        worker.passed(message["id"])
        self._commit()

    def _closed(self, worker: WorkerState) -> None:
        """A worker has ended, as asked or not."""
        code = worker.handle.wait(COMMIT_SECONDS)
        lines = worker.handle.last_lines()
        self._fleet.end(worker, code)
        if worker.fatal is not None:
            error = _ERRORS.get(worker.fatal["exit_code"], EngineError)(worker.fatal["message"])
            # An engine that failed may do better when started anew; nothing else will.
            if not isinstance(error, EngineError):
                raise error
            lines = [str(error)]
        if self._stopping is None:
            self._deaths.died(worker, code, lines, len(self._fleet))

    def _convict(self, guilty: Pending) -> None:
        batch = ResultBatch.packed_of([guilty.row], [guilty_result()])
        self._results.add([guilty], batch, None)
        self._commit()
        self._suspects.convicted(guilty.row)
        self._check_fail_fast(batch)

    # Results in.

    def _commit(self) -> None:
        """Make everything received so far final."""
        self._results.commit()
        for worker in self._fleet:
            worker.committed()

    def _assemble(self) -> None:
        """Have whole parts written."""
        if self._stopping is not None and self._stopping.error is not None:
            return
        self._assembly.write(self._window.whole_parts())

    def _assembled(self, event: Assembled) -> None:
        self._assembly.ended(event.part)
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
        self._kill_hanging(now - self._ticked)
        self._ticked = now
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
        elif (overdue := self._options.overdue(now)) is not None:
            self._begin_stop(overdue, None, drain=True)

    def _kill_hanging(self, seconds: float) -> None:
        for worker in self._fleet.hanging(seconds):
            self._say(
                f"worker {worker.number} (process {worker.handle.pid}) hangs: it has said nothing for "
                f"{self._options.hang_seconds:g} s or more although rows are with it; killing it"
            )
            worker.handle.kill()

    def _checkpoint(self) -> None:
        self._job.claims.check(self._attempt.number)
        self._checkpoints += 1
        for worker in self._fleet:
            if worker.ready:
                worker.handle.send({"type": "checkpoint", "id": self._checkpoints})
        self._commit()
        save_progress(self._job.folder, self._attempt.number, self._progress())
        free = shutil.disk_usage(self._job.folder.root).free
        if free < self._options.min_free_disk:
            error = StorageError(
                f"{self._job.folder.root}: {counted(free, 'byte')} {agreeing(free, 'is', 'are')} free, less "
                f"than run.min_free_disk ({self._options.min_free_disk:,}); free some space, then run the "
                "same command again (finished rows are kept)"
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
        for worker in self._fleet:
            if not worker.ready:
                worker.handle.kill()
            elif drain:
                worker.drain(self._checkpoints)

    def _press(self, stopping: Stopping, now: float) -> None:
        """Bring workers to their end: those that have drained, then all, then by force."""
        for worker in self._fleet:
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
        for worker in self._fleet:
            worker.stop()
        for worker in self._fleet:
            self._fleet.end(worker, worker.handle.wait(GOODBYE_SECONDS if self._window.exhausted else 0.0))
        self._assembly.close()
        self._drain_assembled()
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
            rows_before=counts.rows - self._results.rows,
            ok=counts.ok,
            error=counts.error,
            skipped=counts.skipped,
            reasoning_tokens=counts.reasoning_tokens,
            parts_done=len(self._job.parts.committed),
            seconds=now - self._started,
            working_seconds=0.0 if self._ready_at is None else now - self._ready_at,
            workers=len(self._fleet),
        )
        for name, value in self._fleet.totals().items():
            setattr(progress, name, value)
        return progress

    def _state(self) -> str:
        if self._stopping is not None:
            return "draining"
        if not len(self._fleet):
            return "starting"
        return "running" if any(w.ready for w in self._fleet) else "loading"
