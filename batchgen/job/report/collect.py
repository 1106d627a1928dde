"""Everything that the report shows, as plain values: `report.json` is exactly this.

Reads the folder only, while the job runs or long after it died. Memory is bounded by the number of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

import batchgen
from batchgen.job.attempts import Attempt, read_attempts
from batchgen.job.changes import now_text
from batchgen.job.folder import JobFolder
from batchgen.job.gates import Gate
from batchgen.job.histogram import Histogram
from batchgen.job.manifest import Manifest, require_manifest
from batchgen.job.part_summary import PartSummary
from batchgen.job.parts import recognise_parts
from batchgen.job.progress import read_progress
from batchgen.job.report.course import Course, rows_run
from batchgen.job.report.rows import RowLog, describe_slowest, read_row_log, summarise_rows
from batchgen.job.run_stats import SAMPLED, read_times
from batchgen.job.status import JobStatus, read_status

FORMAT = 1
BARS_PER_DOUBLING = 2
MOST_ATTEMPTS = 50
_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions")


def collect_report(root: Path, still_time: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The report of an output folder.

    Args:
        root: the folder.
        still_time: called now and then; what it raises ends the work.

    Raises:
        UsageError: it is not an output folder.
        StorageError: it cannot be read.
    """
    folder, damaged = JobFolder(root), list[str]()
    manifest = require_manifest(folder)
    status = read_status(root)
    parts = recognise_parts(folder, damaged)
    summary = summarise_rows(folder, manifest, parts, damaged, still_time)
    log = read_row_log(folder, damaged, still_time)
    describe_slowest(folder, manifest, parts, log.slowest)
    course = Course()
    recorded = list(read_attempts(folder))
    attempts = [_attempt(folder, attempt, course, damaged) for attempt in recorded]
    totals = _totals(attempts)
    return {
        "format": FORMAT,
        "batchgen": batchgen.__version__,
        "written": now_text(),
        "folder": str(root.absolute()),
        "job_id": manifest.job_id,
        "name": _name(folder),
        "verdict": _verdict(status),
        "rows": {
            "total": status.rows_total,
            "done": status.rows_done,
            "ok": status.ok,
            "error": status.error,
            "skipped": status.skipped,
            "in_parts": status.rows_in_parts,
        },
        "gates": _gates(recorded[-1].gates if recorded else {}, summary),
        "work": totals,
        "cost": _cost(attempts, status.rows_done, totals["output_tokens"]),
        "tokens_lost": status.tokens_lost,
        "lengths": {
            "prompt_tokens": _distribution(summary.prompt_tokens),
            "output_tokens": _distribution(summary.output_tokens),
            "reasoning_tokens": summary.reasoning_tokens,
        },
        "times": {
            "queue_seconds": _distribution(log.queue_seconds),
            "prefill_seconds": _distribution(log.prefill_seconds),
            "decode_seconds": _distribution(log.decode_seconds),
        },
        "slowest_rows": [{name: getattr(slow, name) for name in slow.__slots__} for slow in log.slowest],
        "errors": _errors(summary),
        "finish_reasons": dict(summary.finish_reasons.most_common()),
        "input": _input(summary, log),
        "course": {
            "points": course.points(),
            "attempts": [{"number": number, "seconds": at} for number, at in course.boundaries],
        },
        "attempts": attempts[-MOST_ATTEMPTS:],
        "attempts_total": len(attempts),
        "settings": _settings(folder, manifest),
        "messages": [*status.messages, *damaged],
    }


def _name(folder: JobFolder) -> str | None:
    try:
        found = yaml.safe_load(folder.resolved_job.read_text(errors="replace"))
        return str(found["name"]) if found["name"] is not None else None
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def _verdict(status: JobStatus) -> dict[str, Any]:
    last = status.last_attempt or {}
    code = None if status.state in ("running", "dead") else last.get("exit_code")
    sentences = {
        "running": "It is running; figures are those of this moment.",
        "dead": "Its last attempt ended without a word; run the same command again to continue.",
    }
    reason = status.last_error or last.get("reason") or "It never ran."
    return {
        "state": status.state,
        "exit_code": code,
        "reason": sentences.get(status.state, reason),
        "good": status.state == "complete" and code == 0,
    }


def _gates(gates: Mapping[str, str], summary: PartSummary) -> list[dict[str, Any]]:
    """What `run.gates` asked for at the last attempt, and whether it holds now."""
    found = []
    for measure, condition in gates.items():
        try:
            fault = Gate.parse(measure, condition).fault(summary)
        except ValueError:
            continue
        found.append({"measure": measure, "condition": condition, "passed": fault is None, "fault": fault})
    return found


def _attempt(folder: JobFolder, attempt: Attempt, course: Course, damaged: list[str]) -> dict[str, Any]:
    loading: float | None = None

    def watched() -> Any:
        nonlocal loading
        for sample in read_times(folder, attempt.number, damaged):
            if loading is None and sample["state"] == "running":
                loading = sample["seconds"]
            yield sample

    last = _latest(folder, attempt, course.add_attempt(attempt.number, watched()))
    seconds = last.get("seconds", 0.0)
    working = max(0.0, seconds - (loading if loading is not None else seconds))
    return {
        "number": attempt.number,
        "host": attempt.host,
        "pid": attempt.pid,
        "start": attempt.start,
        "end": attempt.end,
        "reason": attempt.reason,
        "exit_code": attempt.exit_code,
        "error": attempt.error,
        "seconds": seconds,
        "loading_seconds": loading,
        "working_seconds": working,
        "rows": rows_run(last),
        **{name: last.get(name, 0) for name in _TOKENS},
        "workers": [{"pid": w.get("pid"), "end": w.get("end")} for w in attempt.workers],
        "versions": dict(attempt.versions),
        "facts": dict(attempt.facts),
        "gpu_hours": _hours(attempt, seconds) * attempt.devices,
        "cost": None
        if attempt.gpu_hour is None
        else _hours(attempt, seconds) * attempt.devices * attempt.gpu_hour,
    }


def _latest(folder: JobFolder, attempt: Attempt, sample: Mapping[str, Any] | None) -> dict[str, Any]:
    """The later of the last sample and the last progress that was saved."""
    latest = dict(sample or {})
    progress = read_progress(folder, attempt.number)
    if progress is not None and progress.seconds > latest.get("seconds", -1.0):
        latest = {"seconds": progress.seconds, **{name: getattr(progress, name) for name in SAMPLED}}
    return latest


def _hours(attempt: Attempt, seconds: float) -> float:
    """Of the whole attempt, start and end included; of one that was killed, as far as it was seen."""
    if attempt.end is not None:
        seconds = (
            datetime.fromisoformat(attempt.end) - datetime.fromisoformat(attempt.start)
        ).total_seconds()
    return max(0.0, seconds) / 3600


def _totals(attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all attempts; speeds are those of the time in which an engine could work."""
    totals: dict[str, Any] = {
        name: sum(attempt[name] for attempt in attempts)
        for name in ("seconds", "working_seconds", "rows", *_TOKENS, "gpu_hours")
    }
    totals["loading_seconds"] = sum(attempt["loading_seconds"] or 0.0 for attempt in attempts)
    working = totals["working_seconds"]
    for name in ("rows", "prompt_tokens", "output_tokens"):
        totals[f"{name}_per_second"] = totals[name] / working if working > 0 else None
    prompt = totals["prompt_tokens"]
    totals["prefix_hit_share"] = totals["cached_tokens"] / prompt if prompt else None
    return totals


def _cost(attempts: list[dict[str, Any]], rows: int, output_tokens: int) -> dict[str, Any] | None:
    priced = [attempt["cost"] for attempt in attempts if attempt["cost"] is not None]
    if not priced:
        return None
    total = sum(priced)
    return {
        "total": total,
        "per_1000_rows": 1000 * total / rows if rows else None,
        "per_million_output_tokens": 1e6 * total / output_tokens if output_tokens else None,
        "attempts_without_price": len(attempts) - len(priced),
    }


def _distribution(histogram: Histogram) -> dict[str, Any]:
    bars = [{"from": low, "to": high, "count": n} for low, high, n in histogram.bars(BARS_PER_DOUBLING)]
    return {**histogram.describe(), "zeros": histogram.zeros, "bars": bars}


def _errors(summary: PartSummary) -> list[dict[str, Any]]:
    groups = sorted(summary.errors.items(), key=lambda item: (-item[1].count, item[0]))
    return [
        {
            "class": name,
            "count": group.count,
            "share": group.count / summary.rows,
            "examples": [{"row": row, "id": id_, "message": text} for row, id_, text in group.examples],
        }
        for name, group in groups
    ]


def _input(summary: PartSummary, log: RowLog) -> dict[str, Any]:
    return {
        "notes": {name: {"rows": n, "first_row": first} for name, (n, first) in sorted(log.notes.items())},
        "truncated": {"rows": summary.truncated_rows, "tokens": summary.truncated_tokens},
        "control_tokens": {"rows": log.control_rows, "tokens": log.control_tokens},
    }


def _settings(folder: JobFolder, manifest: Manifest) -> dict[str, Any]:
    try:
        resolved = folder.resolved_job.read_text(errors="replace")
    except OSError:
        resolved = ""
    return {
        "job": resolved,
        "pinned": dict(manifest.pinned),
        "facts": dict(manifest.facts),
        "part_rows": manifest.part_rows,
        "created": manifest.created,
    }
