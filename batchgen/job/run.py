"""`run_job`: one attempt at a job, from the first look at the folder to the exit code.

The `run` verb and `bg.map` call it. Running it again always continues.
"""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from batchgen.data.source import InputSet
from batchgen.grammar import agreeing, counted, each_of
from batchgen.job.attempts import Attempt
from batchgen.job.claims import Claims
from batchgen.job.collector import rare_collections
from batchgen.job.drift import find_drift
from batchgen.job.events import StopAsked
from batchgen.job.files import is_of_storage, storage_error
from batchgen.job.folder import JobFolder
from batchgen.job.gates import faults
from batchgen.job.ids import Interrupted, has_ids
from batchgen.job.lease import Lease, Owner, acquire_lease
from batchgen.job.manifest import Manifest, load_manifest
from batchgen.job.parts import Counts, recognise_parts
from batchgen.job.recovery import OpenJob, open_job
from batchgen.job.report.write import report_attempt
from batchgen.job.retry import NothingToRetry, finish_retry
from batchgen.job.run_options import JobSetup, RunHooks, RunOptions, RunResult
from batchgen.job.stop_signals import stop_signals
from batchgen.job.success import read_success, write_success
from batchgen.job.supervisor import Supervisor
from batchgen.job.unique_ids import UniqueIds
from batchgen.types import BatchgenError, OwnershipError, StorageError

COMPLETE, BAD_ROWS, TOO_MANY_ERRORS, GATE_FAILED, RESUMABLE = 0, 3, 8, 8, 75
MOST_MESSAGES = 200
REPORT_SECONDS = 5.0
"""What the report may take where a scheduler may be about to kill the process."""


def run_job(setup: JobSetup, options: RunOptions, hooks: RunHooks) -> RunResult:
    """Run or continue a job.

    Args:
        setup: the job.
        options: how to drive it.
        hooks: what it calls.

    Returns:
        How it ended: complete, or stopped and resumable.

    Raises:
        BatchgenError: what ended it; `exit_code` says which kind. What was finished is on disk.
    """
    folder = JobFolder(setup.output)
    if not options.overwrite and setup.retry is None:
        done = _already_complete(setup, options, folder)
        if done is not None:
            return done
    folder.refuse_foreign()
    folder.create()
    _check_space(folder, options.min_free_disk)
    lease = acquire_lease(folder, options.lease_seconds, hooks.say)
    try:
        result = _run_owned(setup, options, folder, lease, hooks)
    except OwnershipError:
        lease.release()
        raise
    except StorageError as error:
        # A new owner removes what this process had half-written.
        taken = not lease.held
        lease.release()
        if taken:
            raise _lost(folder) from error
        report_attempt(folder, hooks.say, REPORT_SECONDS)
        raise
    except BaseException:
        lease.release()
        report_attempt(folder, hooks.say, REPORT_SECONDS)
        raise
    lease.release()
    report_attempt(folder, hooks.say, REPORT_SECONDS if result.exit_code == RESUMABLE else None)
    return result


def _already_complete(setup: JobSetup, options: RunOptions, folder: JobFolder) -> RunResult | None:
    """The result of a folder that has every row already. Raises DriftError if it is another job's."""
    manifest = load_manifest(folder)
    if manifest is None:
        return None
    drift = find_drift(manifest.fingerprints, setup.fingerprints, manifest.pinned)
    if drift.growth and setup.grow == "append":
        return None
    if drift.differences and not options.accept_drift:
        raise drift.refusal(folder.root)
    if drift.differences or drift.doubtful or drift.moved:
        return None
    manifest.require_duplicate_ids(setup.duplicate_ids, folder)
    success = read_success(folder)
    if success is None or not setup.selection.is_complete(success):
        return None
    counts = Counts()
    for commit in recognise_parts(folder).values():
        counts.add(commit.counts)
    rows = success["rows"]
    if counts.rows != rows:
        return None
    reason = f"{folder.root} is already complete: {each_of(rows, 'row')} a result"
    return _gated(folder, manifest, options, _complete(counts, options, reason))


def _check_space(folder: JobFolder, least: int) -> None:
    free = shutil.disk_usage(folder.root).free
    if free < least:
        raise StorageError(
            f"{folder.root}: {counted(free, 'byte')} {agreeing(free, 'is', 'are')} free and "
            f"run.min_free_disk asks for {least:,}; free some space or lower run.min_free_disk, then run the "
            "same command again"
        )


def _lost(folder: JobFolder) -> OwnershipError:
    return OwnershipError(f"{folder.root}: another process has taken over this run; let it finish")


def _run_owned(
    setup: JobSetup, options: RunOptions, folder: JobFolder, lease: Lease, hooks: RunHooks
) -> RunResult:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lost = _lost(folder)
    # Before anything that takes time, such as clearing a large folder.
    lease.start(lambda: events.put(StopAsked(str(lost), lost)))
    claims = Claims(folder)
    owner = Owner.myself(locked=False)
    claim = claims.take({"host": owner.host, "pid": owner.pid})
    claims.forget_before(claim.epoch)
    if options.overwrite:
        folder.clear(lambda: claims.check(claim.epoch))
    attempt = Attempt(
        claim.epoch,
        devices=options.workers,
        gpu_hour=options.gpu_hour,
        gates={gate.measure: gate.condition for gate in options.gates},
    )
    attempt.save(folder)
    hooks = replace(hooks, say=partial(_tell, attempt, hooks.say))
    running: list[Supervisor] = []
    try:
        with (
            stop_signals(lambda name: events.put(StopAsked(name)), partial(_abandon, running)),
            hooks.beside(lambda error: events.put(StopAsked(str(error), error))),
        ):
            stops = _Stops(events, options)
            job = open_job(setup, folder, claim, hooks.say, stops, accept_drift=options.accept_drift)
            try:
                job.ids = _unique_ids(job, setup, events)
                attempt.change = job.manifest.current_change()
                supervisor = Supervisor(
                    job,
                    options,
                    events,
                    hooks,
                    worker_config=setup.worker_config,
                    columns=setup.columns,
                    attempt=attempt,
                )
                running.append(supervisor)
                with rare_collections():
                    stopped = supervisor.run()
                if stopped is None and job.ids is not None and not job.ids.finish(stops):
                    stopped = stops.reason()
                result = _finish(job, options, stopped)
            finally:
                job.close()
    except Interrupted as stop:
        attempt.finish(folder, f"stopped ({stop})", RESUMABLE)
        return RunResult(RESUMABLE, f"stopped ({stop}); run the same command to continue", Counts())
    except NothingToRetry as nothing:
        attempt.finish(folder, str(nothing), COMPLETE)
        return RunResult(COMPLETE, str(nothing), Counts())
    except BatchgenError as error:
        _record_end(attempt, folder, type(error).__name__, error.exit_code, str(error))
        raise
    except OSError as error:
        if not is_of_storage(error):
            _record_bug(attempt, folder, error)
            raise
        place = error.filename or f"a file that the run in {folder.root} needs"
        fault = storage_error(place, error, action="read or written")
        _record_end(attempt, folder, type(fault).__name__, fault.exit_code, str(fault))
        raise fault from error
    except BaseException as error:
        _record_bug(attempt, folder, error)
        raise
    attempt.counters = {name: getattr(result.counts, name) for name in ("ok", "error", "skipped")}
    attempt.finish(folder, result.reason, result.exit_code)
    return result


class _Stops:
    """Whether a run has to stop, for work beside the supervisor's loop.

    Args:
        events: the queue of that loop, which is not running.
        options: of the run, whose time may be over.
    """

    def __init__(self, events: queue.SimpleQueue[Any], options: RunOptions) -> None:
        self._events = events
        self._options = options
        self._asked: StopAsked | None = None

    def __call__(self) -> bool:
        while self._asked is None and not self._events.empty():
            event = self._events.get()
            if isinstance(event, StopAsked):
                self._asked = event
        if self._asked is None and (overdue := self._options.overdue(time.monotonic())) is not None:
            self._asked = StopAsked(overdue)
        return self._asked is not None

    def reason(self) -> str:
        """Why; raises the error that it was."""
        if self._asked is not None and self._asked.error is not None:
            raise self._asked.error
        return "" if self._asked is None else self._asked.reason


def _unique_ids(job: OpenJob, setup: JobSetup, events: queue.SimpleQueue[Any]) -> UniqueIds | None:
    """What looks for ids that occur twice, beside the run."""
    if setup.duplicate_ids != "error" or has_ids(job.inputs) is False:
        return None
    inputs = InputSet(job.inputs.files, job.inputs.options)
    ids = UniqueIds(
        inputs,
        job.folder.index,
        job.selection,
        lambda: job.index.end,
        lambda error: events.put(StopAsked(str(error), error)),
    )
    ids.start_if_needed()
    return ids


def _abandon(running: list[Supervisor]) -> None:
    for supervisor in running:
        supervisor.abandon()


def _finish(job: OpenJob, options: RunOptions, stopped: str | None) -> RunResult:
    if stopped is not None:
        return RunResult(RESUMABLE, f"stopped ({stopped}); run the same command to continue", job.counts)
    rows = job.counts.rows
    job.claims.check(job.epoch)
    job.parts.sync()
    job.drop_journal()
    # A part without rows may lie beyond it.
    first, stop = job.selection.first, job.parts.stop(job.manifest.part_rows)
    if job.selection.stop is not None:
        stop = min(stop, job.selection.stop)
    write_success(
        job.folder,
        rows=rows,
        files=sum(not commit.empty for commit in job.parts.committed.values()),
        first=first,
        stop=max(first, stop),
        whole=job.index.end is not None and stop >= job.index.end,
        still_owner=job.still_owner,
    )
    # Last, so that a retry killed before this is continued, and finds nothing left to do.
    if finish_retry(job.manifest):
        job.manifest.save(job.folder, job.still_owner)
    result = _complete(job.counts, options, f"complete: {each_of(rows, 'row')} a result")
    return _gated(job.folder, job.manifest, options, result)


def _gated(folder: JobFolder, manifest: Manifest, options: RunOptions, result: RunResult) -> RunResult:
    """The result of a complete job, or exit code 8 with the figures where a gate is not passed."""
    if not options.gates or result.exit_code != COMPLETE:
        return result
    # Loads numpy, which nothing before needs.
    from batchgen.job.report.rows import summarise_rows

    summary = summarise_rows(folder, manifest, recognise_parts(folder), [], lambda: None)
    failed = faults(options.gates, summary)
    if summary.rows != result.counts.rows:
        failed.append(
            f"{summary.rows:,} of them can be read again, so run.gates cannot be checked; "
            f"`batchgen verify {folder.root}` says what is wrong"
        )
    return RunResult(GATE_FAILED, "; ".join([result.reason, *failed]), result.counts) if failed else result


def _complete(counts: Counts, options: RunOptions, reason: str) -> RunResult:
    """Complete, with the exit code that the share of error rows asks for."""
    if counts.error and not counts.ok:
        skipped = f" or skipped ({counts.skipped:,})" if counts.skipped else ""
        return RunResult(TOO_MANY_ERRORS, f"{reason}, and every one is an error{skipped}", counts)
    if options.fail_fast and counts.error:
        return RunResult(
            BAD_ROWS, f"{reason}, {counts.error:,} of them an error, and run.fail_fast is set", counts
        )
    most = options.max_errors
    allowed = most * counts.rows if isinstance(most, float) else most
    if allowed is not None and counts.error > allowed:
        return RunResult(
            TOO_MANY_ERRORS,
            f"{reason}, {counts.error:,} of them an error, more than run.max_errors ({most}) allows",
            counts,
        )
    failed = f", {counts.error:,} of them an error" if counts.error else ""
    return RunResult(COMPLETE, reason + failed, counts)


def _tell(attempt: Attempt, say: Callable[[str], None], sentence: str) -> None:
    if len(attempt.messages) < MOST_MESSAGES:
        attempt.messages.append(sentence)
    say(sentence)


def _record_bug(attempt: Attempt, folder: JobFolder, error: BaseException) -> None:
    _record_end(attempt, folder, "bug", 1, f"{type(error).__name__}: {error}")


def _record_end(attempt: Attempt, folder: JobFolder, reason: str, exit_code: int, error: str) -> None:
    """Where the disk is full the record stays as it was; the error itself is what matters."""
    with suppress(StorageError):
        attempt.finish(folder, reason, exit_code, error)
