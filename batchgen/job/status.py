"""`read_status`: how far a job is and whether anyone works on it, from what lies in its folder.

Works on any host that sees the folder, while the job runs, and long after it died. Reads only.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.job.attempts import Attempt, attempt_file, read_attempt, read_attempts
from batchgen.job.changes import rows_by_number, told
from batchgen.job.claims import Claims
from batchgen.job.counters import read_counters
from batchgen.job.folder import JobFolder
from batchgen.job.index import InputIndex
from batchgen.job.lease import LeaseRecord, read_lease
from batchgen.job.manifest import Manifest, require_manifest
from batchgen.job.parts import Counts, recognise_parts
from batchgen.job.progress import Progress, read_progress
from batchgen.job.replay import Replay, replay
from batchgen.job.selection import Selection
from batchgen.job.success import lost_sentence, read_success, rows_lost

BEATS_TO_WAIT = 2.5
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker process.

    Args:
        attempt, number: which.
        pid: on its host.
        end: how it ended; None while it runs, or if its supervisor could not see it end.
        sampled: output tokens.
        lost_at_most: tokens sampled after its last group commit: what its end can have cost.
    """

    attempt: int
    number: int
    pid: int
    end: str | None
    sampled: int
    lost_at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as its folder shows it.

    Args:
        state: complete, running, stopped (resumable, it said so), dead (it said nothing) or failed; that too
            where a complete job has lost files.
        rows_total: of the selection; None while the end of the input is unknown.
        ok, error, skipped: rows in committed parts and in the journal.
        rows_in_parts: of these, rows in committed parts.
        tokens_sampled: output tokens of all attempts.
        tokens_kept: of these, in results and in partial results that a resumed row goes on from.
        reasoning_tokens: of results, where the job splits reasoning off.
        tokens_lost: sampled, but not kept: computed again. While the job runs, those of this moment count.
        rows_per_second, prompt_tokens_per_second, output_tokens_per_second, prefix_hit_share, eta_seconds: of
            the attempt that runs; the estimate goes by tokens.
        bytes_in_parts, bytes_in_journal, bytes_free: on the folder's disk; None where it cannot be told.
        owner: the lease: host, pid, beat, released, alive.
        last_error: of the last attempt, if it ended with one.
        messages: of the last attempt, and damage that was found now.
    """

    folder: str
    job_id: str
    state: str
    rows_total: int | None
    rows_done: int
    ok: int
    error: int
    skipped: int
    rows_in_parts: int
    parts: int
    attempts: int
    tokens_sampled: int
    tokens_kept: int
    reasoning_tokens: int
    tokens_lost: int
    rows_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    prefix_hit_share: float | None
    eta_seconds: float | None
    bytes_in_parts: int
    bytes_in_journal: int
    bytes_free: int | None
    owner: dict[str, Any] | None
    last_attempt: dict[str, Any] | None
    last_error: str | None
    progress: dict[str, Any] | None
    workers: list[WorkerStatus] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_status(
    root: Path,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Look at an output folder.

    Args:
        root: the folder.
        clock, sleep: to watch the heartbeat of an owner on another host for a few seconds.

    Raises:
        UsageError: it is not an output folder.
        StorageError: it cannot be read.
    """
    folder = JobFolder(root)
    manifest = require_manifest(folder)
    attempts = list(read_attempts(folder))
    last = attempts[-1] if attempts else None
    messages: list[str] = []
    parts = recognise_parts(folder, messages)
    found = replay(folder.journal, manifest.job_id, Claims(folder).accepted_now(), manifest.part_rows, parts)
    in_parts = Counts()
    for commit in parts.values():
        in_parts.add(commit.counts)
    counts = _with_journal(in_parts, found, manifest)
    workers = [worker for attempt in attempts for worker in _workers(folder, attempt)]
    sampled = sum(worker.sampled for worker in workers)
    kept = counts.completion_tokens + sum(partial.num_tokens for partial in found.partials.values())
    lease = read_lease(folder.lease)
    progress = read_progress(folder, last.number) if last is not None else None
    state, error = _state(folder, lease, last, clock, sleep), None
    if state == "complete" and (lost := rows_lost(folder, in_parts.rows)):
        state, error = "failed", lost_sentence(folder, lost)
    return JobStatus(
        folder=str(root),
        job_id=manifest.job_id,
        state=state,
        rows_total=_rows_total(folder, manifest, progress),
        rows_done=counts.rows,
        ok=counts.ok,
        error=counts.error,
        skipped=counts.skipped,
        rows_in_parts=in_parts.rows,
        parts=len(parts),
        attempts=len(attempts),
        tokens_sampled=sampled,
        tokens_kept=kept,
        reasoning_tokens=counts.reasoning_tokens,
        tokens_lost=max(0, sampled - kept),
        **_speeds(progress if state == "running" else None),
        bytes_in_parts=sum(commit.bytes for commit in parts.values()),
        bytes_in_journal=_size(folder.journal),
        bytes_free=_free(root),
        owner=_owner(lease, alive=state == "running"),
        last_attempt=asdict(last) if last is not None else None,
        last_error=error or _last_error(last, state),
        progress=asdict(progress) if progress is not None else None,
        workers=workers,
        messages=[
            *told(manifest.changes, rows_by_number(commit.settings for commit in parts.values())),
            *(last.messages if last is not None else []),
            *messages,
            *map(str, found.dropped),
        ],
    )


def glance(
    before: JobStatus,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Look again at a job that was running: reads what the running attempt last said, not the rows.

    Args:
        before: what was seen last.
        clock, sleep: as in `read_status`.

    Raises:
        StorageError: the folder cannot be read.
    """
    folder = JobFolder(Path(before.folder))
    lease = read_lease(folder.lease)
    moved = lease is not None and before.owner is not None and lease.beat != before.owner["beat"]
    alive = lease is not None and not lease.released and (moved or _lives(folder, lease, clock, sleep))
    number = (before.last_attempt or {}).get("number")
    progress = read_progress(folder, number) if number is not None else None
    attempt = read_attempt(folder, number) if number is not None else None
    if not alive or progress is None or attempt is None or _newest_attempt(folder) != number:
        return read_status(Path(before.folder), clock, sleep)
    workers = [w for w in before.workers if w.attempt != number] + _workers(folder, attempt)
    sampled = sum(worker.sampled for worker in workers)
    return replace(
        before,
        rows_total=progress.rows_total,
        rows_done=progress.rows_done,
        ok=progress.ok,
        error=progress.error,
        skipped=progress.skipped,
        parts=progress.parts_done,
        **_speeds(progress),
        bytes_in_journal=_size(folder.journal),
        bytes_free=_free(folder.root),
        owner=_owner(lease, alive=True),
        tokens_sampled=sampled,
        tokens_kept=max(0, sampled - before.tokens_lost),
        reasoning_tokens=progress.reasoning_tokens,
        workers=workers,
        last_attempt=asdict(attempt),
        progress=asdict(progress),
        messages=list(attempt.messages),
    )


def _newest_attempt(folder: JobFolder) -> int | None:
    numbers = [int(path.stem) for path in folder.attempts.glob("[0-9]*.json") if path.stem.isdecimal()]
    return max(numbers, default=None)


def _speeds(running: Progress | None) -> dict[str, Any]:
    """What `JobStatus` says of the attempt that runs; nothing where none does."""
    now = running or Progress()
    return {
        "rows_per_second": now.per_second(now.rows_done - now.rows_before),
        "prompt_tokens_per_second": now.per_second(now.prompt_tokens),
        "output_tokens_per_second": now.per_second(now.output_tokens),
        "prefix_hit_share": now.cached_tokens / now.prompt_tokens if now.prompt_tokens else None,
        "eta_seconds": now.eta_seconds,
    }


def _size(folder: Path) -> int:
    """Bytes of the files in it; those that vanish meanwhile do not count."""
    total = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                total += entry.stat().st_size
    return total


def _free(root: Path) -> int | None:
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return None


def _with_journal(in_parts: Counts, found: Replay, manifest: Manifest) -> Counts:
    counts = Counts()
    counts.add(in_parts)
    selection = Selection.of(manifest.rows, manifest.limit)
    held = [row for row in sorted(found.results) if selection.may_hold(row, has_where=manifest.has_where)]
    # Which rows `where` selects is known only of those that have run; of them the limit takes the first.
    most = None if selection.limit is None else max(0, selection.limit - counts.rows)
    for row in held[:most]:
        counts.count(found.results[row].status, found.results[row].usage)
    return counts


def _workers(folder: JobFolder, attempt: Attempt) -> list[WorkerStatus]:
    listed = []
    for worker in attempt.workers:
        counters = read_counters(attempt_file(folder, attempt.number, f"worker-{worker['number']}.counters"))
        listed.append(
            WorkerStatus(
                attempt=attempt.number,
                number=worker["number"],
                pid=worker["pid"],
                end=worker["end"],
                sampled=counters.sampled if counters else 0,
                lost_at_most=counters.at_risk if counters else 0,
            )
        )
    return listed


def _rows_total(folder: JobFolder, manifest: Manifest, progress: Progress | None) -> int | None:
    """Rows of the selection, as far as they are known: `where` is only counted while running."""
    selection = Selection.of(manifest.rows, manifest.limit)
    success = read_success(folder)
    if success is not None and selection.is_complete(success):
        rows: int = success["rows"]
        return rows
    counted = progress.rows_total if progress else None
    if manifest.has_where:
        return counted
    known = [selection.most_rows(InputIndex(folder).end), counted]
    return min((n for n in known if n is not None), default=None)


def _state(
    folder: JobFolder,
    lease: LeaseRecord | None,
    last: Attempt | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> str:
    if lease is not None and not lease.released and _lives(folder, lease, clock, sleep):
        return "running"
    if folder.success.exists():
        return "complete"
    if last is None or last.exit_code is None:
        return "dead"
    return "failed" if last.error else "stopped"


def _lives(
    folder: JobFolder, lease: LeaseRecord, clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    """Ask the kernel where it knows; else watch for a heartbeat."""
    if lease.owner.is_dead(have_lock=False):
        return False
    if lease.owner.is_here():
        return True
    deadline = clock() + BEATS_TO_WAIT * lease.beat_seconds
    while clock() < deadline:
        sleep(_POLL_SECONDS)
        now = read_lease(folder.lease)
        if now is not None and now.beat != lease.beat:
            return not now.released
    return False


def _owner(lease: LeaseRecord | None, *, alive: bool) -> dict[str, Any] | None:
    if lease is None:
        return None
    return {
        "host": lease.owner.host,
        "pid": lease.owner.pid,
        "beat": lease.beat,
        "released": lease.released,
        "alive": alive,
    }


def _last_error(last: Attempt | None, state: str) -> str | None:
    if last is None or state in ("running", "complete"):
        return None
    if last.exit_code is None:
        return f"attempt {last.number} on {last.host} ended without a word: killed, or the machine went down"
    return last.error
