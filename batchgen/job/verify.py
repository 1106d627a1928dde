"""`verify_folder`: proves that an output folder holds every row of its job once, in order and undamaged.

Trusts nothing but the files: every part is hashed and read from its first to its last row.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchgen.data.id_decisions import recorded_decisions
from batchgen.data.source import InputSet
from batchgen.data.task_columns import ALL_TASK_COLUMNS
from batchgen.grammar import agreeing, counted, how_many
from batchgen.job.changes import rows_by_number, told
from batchgen.job.drift import check_drift
from batchgen.job.files import storage
from batchgen.job.fingerprints import Fingerprints, digest
from batchgen.job.folder import PART_NAME, TEMPORARY, JobFolder
from batchgen.job.index import InputIndex
from batchgen.job.linelog import read_folder
from batchgen.job.manifest import Manifest, require_manifest
from batchgen.job.part_reader import PartRow, read_part
from batchgen.job.parts import Counts, PartCommit, file_digest, recognise_parts
from batchgen.job.selection import Selection
from batchgen.job.success import read_success
from batchgen.job.verify_input import PartsOfInput, compare_with_input
from batchgen.types import DriftError, Status, StorageError

MOST_FAULTS = 100


@dataclass(slots=True)
class VerifyReport:
    """What was found.

    Args:
        rows: in the parts that were read.
        faults: what is wrong, one sentence each; none if the folder is what it should be.
        notes: what is worth knowing and no fault.
    """

    folder: str
    rows: int = 0
    parts: int = 0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def fault(self, sentence: str) -> None:
        """Add a fault, up to a number that a person can read."""
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(sentence)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "ok": self.ok}


def verify_folder(
    root: Path, inputs: InputSet | None = None, fingerprints: Fingerprints | None = None
) -> VerifyReport:
    """Check a whole output folder.

    Args:
        root: the folder.
        inputs: the job's input, to compare contents and ids too; None to leave that out.
        fingerprints: of the job as it is now, to compare; None to leave that out.

    Raises:
        UsageError: it is not an output folder.
        StorageError: it cannot be read at all.
    """
    folder = JobFolder(root)
    manifest = require_manifest(folder)
    report = VerifyReport(str(root))
    _check_fingerprints(folder, manifest, fingerprints, report)
    _check_changes(folder, manifest, report)
    recorded = _recorded_parts(folder, report)
    present = _present_parts(folder, report)
    for part in sorted(present):
        _check_part(present[part], part, recorded.get(part, []), manifest, report)
    index = InputIndex(folder)
    report.notes += index.damaged
    commits = recognise_parts(folder, empty=True)
    paths: dict[int, Path | None] = {
        **{part: None for part, commit in commits.items() if commit.empty},
        **present,
    }
    _check_completeness(folder, manifest, paths, index, report)
    if inputs is not None:
        size = manifest.part_rows
        parts = PartsOfInput(
            index=index,
            files=paths,
            spans={
                part: commits[part].span_in(size) if part in commits else (part * size, (part + 1) * size)
                for part in paths
            },
            part_rows=size,
            plan=manifest.output_plan,
            decisions=recorded_decisions(folder.index),
        )
        compare_with_input(inputs, parts, report.fault)
    return report


def _check_fingerprints(
    folder: JobFolder, manifest: Manifest, now: Fingerprints | None, report: VerifyReport
) -> None:
    for name, value in manifest.fingerprints.items():
        if digest(value) != manifest.digests.get(name):
            report.fault(f"{folder.manifest}: the {name} fingerprint does not match its own checksum")
    if now is not None:
        try:
            check_drift(manifest.fingerprints, now, manifest.pinned, folder.root)
        except DriftError as error:
            report.fault(str(error))


def _check_changes(folder: JobFolder, manifest: Manifest, report: VerifyReport) -> None:
    """Say which rows were computed under other settings than the job's first ones."""
    if manifest.open_retry is not None:
        retry = manifest.open_retry[1].describe()
        report.fault(f"{folder.root}: a {retry}, was begun and has not ended; run `batchgen retry` again")
    parts = recognise_parts(folder).values()
    rows = rows_by_number(commit.settings for commit in parts)
    report.notes += told(manifest.changes, rows)
    for number, count in rows.items():
        if number > len(manifest.changes):
            report.fault(
                f"{folder.manifest}: {counted(count, 'row')} {agreeing(count, 'was', 'were')} computed "
                f"under change {number}, which it lacks"
            )


def _recorded_parts(folder: JobFolder, report: VerifyReport) -> dict[int, list[PartCommit]]:
    recorded: dict[int, list[PartCommit]] = {}
    for record in read_folder(folder.commits, report.notes):
        commit = PartCommit.from_json(record)
        recorded.setdefault(commit.part, []).append(commit)
    return recorded


def _present_parts(folder: JobFolder, report: VerifyReport) -> dict[int, Path]:
    present: dict[int, Path] = {}
    with storage(folder.data, action="read"):
        paths = sorted(folder.data.iterdir())
    for path in paths:
        match = PART_NAME.fullmatch(path.name)
        if match is None:
            kind = "a temporary file of a killed run" if path.name.startswith(TEMPORARY) else "not a part"
            report.notes.append(f"{path}: {kind}")
        elif int(match[1]) in present:
            report.fault(f"{path}: part {int(match[1])} is there twice, see {present[int(match[1])].name}")
        else:
            present[int(match[1])] = path
    return present


def _check_part(
    path: Path, part: int, recorded: list[PartCommit], manifest: Manifest, report: VerifyReport
) -> None:
    report.parts += 1
    try:
        found = file_digest(path)
    except OSError as error:
        report.fault(f"{path}: cannot be read: {error.strerror}; check the disk, then verify again")
        return
    commit = next((c for c in recorded if c.digest == found), None)
    if commit is None:
        known = "its checksum is not the recorded one" if recorded else "no commit of it is recorded"
        report.fault(f"{path}: {known}; run the job again to make it anew")
    counts = Counts()
    try:
        least, stop = part * manifest.part_rows, (part + 1) * manifest.part_rows
        for row in read_part(path, manifest.output_plan):
            if not least <= row.row < stop:
                report.fault(
                    f"{path}: row {row.row} stands where rows {least} to {stop - 1} belong, in order"
                )
            least = row.row + 1
            _check_row(path, row, manifest.output_plan["names"], report)
            if row.result.status in set(Status):
                counts.count(row.result.status, row.result.usage)
            report.rows += 1
    except (OSError, ValueError, KeyError, TypeError, StorageError) as error:
        report.fault(f"{path}: cannot be read as a part: {error}")
        return
    if commit is not None and (counts.rows, counts.ok) != (commit.rows, commit.counts.ok):
        recorded_as = f"{commit.rows} ({commit.counts.ok} ok) are recorded"
        report.fault(f"{path}: has {counted(counts.rows, 'row')} ({counts.ok} ok), and {recorded_as}")


def _check_row(path: Path, row: PartRow, names: Container[str], report: VerifyReport) -> None:
    status, result = row.result.status, row.result
    wanted = [key for key in ALL_TASK_COLUMNS if key in names]
    known = result.included or {}
    if status not in set(Status):
        report.fault(f"{path}: row {row.row} has the status {status!r}")
    elif status == Status.OK and ((result.generated_text is None and not wanted) or result.error is not None):
        report.fault(f"{path}: row {row.row} is ok and has no text, or an error")
    elif status == Status.OK and wanted and not any(key in known for key in wanted):
        report.fault(f"{path}: row {row.row} is ok and has nothing in {', '.join(wanted)}")
    elif status == Status.ERROR and result.error is None:
        report.fault(f"{path}: row {row.row} is an error row without an error")
    if not isinstance(row.id, str):
        report.fault(f"{path}: row {row.row} has no id")


def _check_completeness(
    folder: JobFolder,
    manifest: Manifest,
    parts: Mapping[int, Path | None],
    index: InputIndex,
    report: VerifyReport,
) -> None:
    selection = Selection.of(manifest.rows, manifest.limit)
    begin = selection.first // manifest.part_rows
    # A part without rows before that is left from a run that began earlier.
    numbers = sorted(part for part, path in parts.items() if part >= begin or path is not None)
    for expected, part in enumerate(numbers, begin):
        if part != expected:
            report.fault(f"{folder.data}: part {expected} is missing, part {part} is there")
            break
    if not folder.success.exists():
        total = None if manifest.has_where else selection.most_rows(index.end)
        of = f" of {total:,}" if total is not None else ""
        report.fault(
            f"{folder.root}: not complete: {how_many(report.rows, 'row')}{of} "
            f"{agreeing(report.rows, 'is', 'are')} in parts; run the job again"
        )
        return
    success = read_success(folder)
    if success is None:
        report.fault(f"{folder.success}: cannot be read; run the job again")
    elif success["rows"] != report.rows:
        report.fault(
            f"{folder.root}: _SUCCESS promises {counted(success['rows'], 'row')} and the parts hold "
            f"{report.rows:,}"
        )
