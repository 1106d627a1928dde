"""`verify --deep N`: computes N random rows again, with a worker like that of a run, and compares."""

from __future__ import annotations

import queue
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from batchgen.data.prompt_values import pack_prompt_values
from batchgen.data.record_lines import shown
from batchgen.data.row_result import RowResult
from batchgen.data.task_columns import ALL_TASK_COLUMNS
from batchgen.grammar import counted, how_many
from batchgen.job.attempts import read_attempts, versions
from batchgen.job.changes import latest_drift, number_of
from batchgen.job.counters import create_counters
from batchgen.job.drift import diff
from batchgen.job.folder import JobFolder
from batchgen.job.index import InputIndex, changed_input
from batchgen.job.manifest import Manifest, require_manifest
from batchgen.job.part_reader import read_part
from batchgen.job.parts import PartCommit, recognise_parts
from batchgen.job.result_batch import ResultBatch
from batchgen.job.run_options import JobSetup, Launcher
from batchgen.job.verify import VerifyReport
from batchgen.job.window import Pending
from batchgen.job.workers import WorkerState, describe_exit
from batchgen.types import EngineError, Status

GOODBYE_SECONDS = 5.0
_REMEDY = "verify where the job can run, or without --deep"
SHOWN = 40
_COMPARED = ("status", "generated_text", "finish_reason", "stop_reason", "usage")
# Of the memory that happened to be free, which changes no result.
_NO_MATTER = frozenset({"num_blocks"})


@dataclass(frozen=True, slots=True)
class _Stored:
    """A row as the folder holds it, and under which change of the job it was computed."""

    row: int
    part: int
    number: int
    result: RowResult


def recompute(
    root: Path,
    count: int,
    configure: Callable[[Sequence[str]], JobSetup],
    launch: Launcher,
    report: VerifyReport,
    seed: int | None = None,
) -> None:
    """Compute rows of a verified folder again; what differs is a fault.

    Args:
        root: the output folder.
        count: how many of the rows that are ok.
        configure: from the settings of a retry, none for other rows, to the job.
        launch: starts a worker process.
        report: gets faults, and as notes what was compared and what differs in the machine.
        seed: chooses the rows; None for others each time.

    Raises:
        BatchgenError: the input cannot be read, or the engine does not run.
    """
    folder = JobFolder(root)
    manifest = require_manifest(folder)
    stored = _sample(folder, manifest, count, seed)
    report.notes += _other_versions(folder)
    for number in sorted({one.number for one in stored}):
        rows = [one for one in stored if one.number == number]
        sets = _sets(manifest, number)
        if sets is None:
            report.notes.append(
                f"{counted(len(rows), 'row')} not computed again: they are from before the job's settings "
                "were changed"
            )
            continue
        _compare(rows, configure(sets), folder, manifest, launch, report)


def _sets(manifest: Manifest, number: int) -> Sequence[str] | None:
    """Settings besides those of job.resolved.yaml; None where that file is no longer what it was."""
    if number < latest_drift(manifest.changes):
        return None
    return manifest.changes[number - 1].sets if number else ()


def _sample(folder: JobFolder, manifest: Manifest, count: int, seed: int | None) -> list[_Stored]:
    """Rows that are ok, each with equal chance, in order."""
    commits = list(recognise_parts(folder).values())
    ends = list(accumulate(commit.counts.ok for commit in commits))
    total = ends[-1] if ends else 0
    chosen = random.Random(seed).sample(range(total), min(count, total))
    places: dict[int, set[int]] = {}
    for place in chosen:
        part = bisect_right(ends, place)
        places.setdefault(part, set()).add(place - (ends[part - 1] if part else 0))
    return [
        one for part, these in sorted(places.items()) for one in _rows(folder, manifest, commits[part], these)
    ]


def _rows(folder: JobFolder, manifest: Manifest, commit: PartCommit, places: set[int]) -> Iterable[_Stored]:
    """Of the rows of a part that are ok, those at `places`."""
    ok = (
        row
        for row in read_part(folder.data / commit.file, manifest.output_plan)
        if row.result.status == Status.OK
    )
    for place, row in enumerate(ok):
        if place in places:
            yield _Stored(row.row, commit.part, number_of(commit.settings, row.row), row.result)


def _other_versions(folder: JobFolder) -> list[str]:
    attempts = list(read_attempts(folder))
    changed = diff(attempts[-1].versions, versions()) if attempts else []
    return ["versions differ from those of the last attempt:", *changed] if changed else []


def _compare(
    stored: Sequence[_Stored],
    setup: JobSetup,
    folder: JobFolder,
    manifest: Manifest,
    launch: Launcher,
    report: VerifyReport,
) -> None:
    pending = list(_pending(stored, setup, InputIndex(folder)))
    config = {**setup.worker_config, "pinned": dict(manifest.pinned) or None}
    results, facts = _compute(pending, config, launch)
    before, after = (
        {k: v for k, v in side.items() if k not in _NO_MATTER} for side in (manifest.facts, facts)
    )
    changed = diff(before, after)
    if changed:
        report.notes += ["what runs the model differs from the first attempt:", *changed]
    known = set(manifest.output_plan["names"]) | {"status"}
    differing = 0
    for one in stored:
        differences = list(_differences(one.result, results[one.row], known))
        differing += bool(differences)
        for difference in differences:
            report.fault(f"row {one.row}: computed again, {difference}")
    same = f", {len(stored) - differing:,} of them the same" if stored else ""
    report.notes.append(f"{how_many(len(stored), 'row')} computed again{same}")


def _differences(old: RowResult, new: RowResult, known: Iterable[str]) -> Iterable[str]:
    for name in (*_COMPARED, *ALL_TASK_COLUMNS):
        before, after = _value(old, name), _value(new, name)
        if name == "usage" and before is not None and after is not None:
            # Folders of earlier versions do not count reasoning.
            after = after[: len(before)]
        if name not in known or before == after or (name == "usage" and before is None):
            continue
        if name == "generated_text" and isinstance(before, str) and isinstance(after, str):
            start = next(
                (i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0
            )
            before, after = before[start : start + SHOWN], after[start : start + SHOWN]
            yield f"the text differs from character {start} on: {before!r} is stored, {after!r} was computed"
        else:
            yield f"{name} differs: {before!r} is stored, {after!r} was computed"


def _value(result: RowResult, name: str) -> Any:
    known = result.included or {}
    return shown(name, known.get(name)) if name in ALL_TASK_COLUMNS else getattr(result, name)


def _pending(stored: Sequence[_Stored], setup: JobSetup, index: InputIndex) -> Iterable[Pending]:
    """The rows of the input again."""
    wanted = {one.row for one in stored}
    for part in sorted({one.part for one in stored}):
        last = max(one.row for one in stored if one.part == part)
        rows = setup.inputs.rows(index.nearest_start(part))
        for row in rows:
            if row.ordinal in wanted:
                wanted.discard(row.ordinal)
                yield Pending(row.ordinal, pack_prompt_values(row, setup.columns), row.digest)
            if row.ordinal >= last:
                break
    if wanted:
        raise changed_input(min(wanted), len(wanted), setup.inputs.files[0].path)


def _compute(
    rows: Sequence[Pending], config: Mapping[str, Any], launch: Launcher
) -> tuple[dict[int, RowResult], Mapping[str, Any]]:
    """Results of rows, and the facts of the worker that computed them. Raises EngineError."""
    events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    results: dict[int, RowResult] = {}
    facts: Mapping[str, Any] = {}
    with TemporaryDirectory(prefix="batchgen-verify-") as scratch:
        counters = Path(scratch, "counters")
        create_counters(counters)
        handle = launch(Path(scratch, "log"), events.put)
        worker = WorkerState(0, handle, counters)
        handle.send({"type": "start", "config": {**config, "counters": str(counters)}})
        try:
            while len(results) < len(rows):
                match events.get():
                    case {"type": "ready", "facts": dict(found)}:
                        facts = found
                        worker.send_rows(rows)
                    case dict() as message if message["type"] == "results":
                        batch = ResultBatch.of(message)
                        results |= {row: batch.result(place) for place, row in enumerate(batch.rows)}
                    case {"type": "fatal", "message": message}:
                        raise EngineError(f"the engine does not start: {message}; {_REMEDY}")
                    case None:
                        last = "\n  ".join(["its last words:", *handle.last_lines()])
                        end = describe_exit(handle.wait(GOODBYE_SECONDS))
                        raise EngineError(f"the worker process {end}; {_REMEDY}; {last}")
            worker.stop()
            handle.wait(GOODBYE_SECONDS)
        finally:
            handle.kill()
            worker.release()
    return results, facts
