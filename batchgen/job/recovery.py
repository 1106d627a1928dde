"""From an output folder, in whatever state it was left, to one that a run can go on with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.data.results import OutputPlan, RowResult
from batchgen.data.source import InputSet
from batchgen.job.claims import Claim, Claims
from batchgen.job.files import atomic_write, storage
from batchgen.job.fingerprints import check_drift, diff
from batchgen.job.folder import JobFolder
from batchgen.job.index import InputIndex
from batchgen.job.journal import JournalWriter, Kind, ResultRecord, SegmentName
from batchgen.job.manifest import Manifest, load_manifest
from batchgen.job.part_reader import PartRow, read_part
from batchgen.job.parts import Counts, PartStore
from batchgen.job.replay import FoundResult, Replay, replay
from batchgen.job.run_options import JobSetup
from batchgen.job.run_stats import RunStats
from batchgen.types import DriftError, StorageError


@dataclass(slots=True)
class OpenJob:
    """Everything on disk that a run reads and writes.

    Args:
        counts: of all rows that have a result, as far as they were met.
        found: what the journal holds beyond the committed parts.
    """

    folder: JobFolder
    manifest: Manifest
    claims: Claims
    epoch: int
    inputs: InputSet
    plan: OutputPlan
    index: InputIndex
    parts: PartStore
    journal: JournalWriter
    stats: RunStats
    found: Replay
    counts: Counts
    limit: int | None
    input_rows: int | None

    def rows_total(self) -> int | None:
        """Rows of the selection; None while the end of the input is unknown."""
        known = [n for n in (self.limit, self.index.end, self.input_rows) if n is not None]
        return min(known, default=None)

    def note_segment(self, segment: str, row: int) -> None:
        """Remember which part a journal record belongs to."""
        self.found.parts_of.setdefault(segment, set()).add(row // self.manifest.part_rows)

    def drop_segments(self) -> None:
        """Remove journal segments of which every row is in a committed part. Raises StorageError."""
        for name, parts in list(self.found.parts_of.items()):
            if name != self.journal.current_segment and parts <= self.parts.committed.keys():
                path = self.folder.journal / name
                with storage(path, action="removed"):
                    path.unlink(missing_ok=True)
                del self.found.parts_of[name]

    def drop_journal(self) -> None:
        """Remove what is left of the journal, once every row is in a committed part. Raises StorageError."""
        self.journal.close()
        with storage(self.folder.journal, action="removed"):
            for path in self.folder.journal.glob("*.seg"):
                name = SegmentName.parse(path.name)
                if name is None or name.epoch <= self.epoch:
                    path.unlink(missing_ok=True)
        self.found.parts_of.clear()

    def pin(self, pinned: Mapping[str, Any], facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Keep the numeric choices of the first worker; every later one must report the same.

        Raises:
            DriftError: it reports others.
        """
        manifest = self.manifest
        if not manifest.pinned:
            manifest.pinned, manifest.facts = dict(pinned), dict(facts)
            self.claims.check(self.epoch)
            manifest.save(self.folder)
            return
        differences = diff(manifest.pinned, pinned)
        if differences:
            raise DriftError(
                f"{self.folder.root}: numeric choices are not those of the first attempt:\n"
                + "\n".join(differences)
                + "\nRun where they can be repeated, or start over with --overwrite."
            )
        changed = diff(manifest.facts, facts)
        if changed:
            say(
                "what runs the model differs from the first attempt, so new rows may differ in their bits "
                "from rows computed then:\n" + "\n".join(changed)
            )

    def close(self) -> None:
        """Close every file."""
        self.journal.close()
        for log in (self.index, self.parts, self.stats):
            log.close()


def open_job(setup: JobSetup, folder: JobFolder, claim: Claim, say: Callable[[str], None]) -> OpenJob:
    """Recover a folder that this process owns, or begin a new job in it.

    Args:
        setup: the job.
        folder: created, owned.
        claim: this process's.
        say: gets a sentence for each thing that was found damaged.

    Raises:
        DriftError: the folder belongs to another job, or has more rows than are asked for now.
        StorageError, InputError: it cannot be read or written.
    """
    claims = Claims(folder)

    def still_owner() -> None:
        claims.check(claim.epoch)

    # Whoever slept through a takeover must not touch what the new owner has made since.
    still_owner()
    folder.remove_temporaries()
    for path in claims.void_segments(claim):
        still_owner()
        kept = folder.quarantined(path)
        say(f"{path} belongs to no claim (a run that had lost this folder wrote it); moved to {kept}")
    if load_manifest(folder) is None:
        still_owner()
        folder.forget_job()
    manifest, plan = _manifest(setup, folder, say)
    parts = PartStore(folder, setup.suffix, claim.epoch)
    parts.recognise(say, still_owner)
    index = InputIndex(folder, claim.epoch)
    found = replay(folder.journal, manifest.job_id, claim.accepted, manifest.part_rows, parts.committed)
    for sentence in (*index.damaged, *map(str, found.dropped)):
        say(sentence)
    job = OpenJob(
        folder=folder,
        manifest=manifest,
        claims=claims,
        epoch=claim.epoch,
        inputs=setup.inputs,
        plan=plan,
        index=index,
        parts=parts,
        journal=JournalWriter(folder.journal, manifest.job_id, claim.epoch),
        stats=RunStats(folder, claim.epoch),
        found=found,
        counts=Counts(),
        limit=setup.limit,
        input_rows=_input_rows(setup.inputs),
    )
    _check_selection(job)
    still_owner()
    manifest.save(folder)
    atomic_write(folder.resolved_job, setup.resolved_job.encode(errors="surrogatepass"))
    with storage(folder.success, action="removed"):
        folder.success.unlink(missing_ok=True)
    _reopen_short_parts(job)
    for commit in parts.committed.values():
        job.counts.add(commit.counts)
    job.drop_segments()
    return job


def _manifest(setup: JobSetup, folder: JobFolder, say: Callable[[str], None]) -> tuple[Manifest, OutputPlan]:
    manifest = load_manifest(folder)
    if manifest is None:
        plan = setup.new_plan()
        manifest = Manifest(
            job_id=Manifest.new_id(),
            fingerprints=setup.fingerprints.to_dict(),
            digests=setup.fingerprints.digests(),
            output_plan=plan.to_json(),
            part_rows=setup.part_rows,
            compression=setup.compression,
            limit=setup.limit,
        )
    else:
        notes = check_drift(manifest.fingerprints, setup.fingerprints, manifest.pinned, folder.root)
        if notes:
            say("settings that change no result differ from the first attempt:\n" + "\n".join(notes))
        plan = OutputPlan.from_json(manifest.output_plan, setup.inputs)
        manifest.limit = setup.limit
    return manifest, plan


def _check_selection(job: OpenJob) -> None:
    last = max(job.parts.committed.values(), key=lambda commit: commit.part, default=None)
    if last is None or job.limit is None:
        return
    rows = last.part * job.manifest.part_rows + last.rows
    if rows > job.limit:
        raise DriftError(
            f"{job.folder.root}: holds the results of {rows:,} rows, and input.limit asks for {job.limit:,}; "
            f"set input.limit to {rows:,} or more, choose another output.path, or start over with --overwrite"
        )


def _reopen_short_parts(job: OpenJob) -> None:
    """A part that ended where an earlier, smaller selection did is assembled again with the rows after it.

    Its results go back to the journal; the file stays in place until the longer one replaces it.
    """
    size = job.manifest.part_rows
    ends = [end for end in (job.limit, job.index.end) if end is not None]
    for commit in list(job.parts.committed.values()):
        first = commit.part * size
        if commit.rows < min([size, *(end - first for end in ends)]):
            _reopen(job, commit.part, job.folder.data / commit.file)
            del job.parts.committed[commit.part]


def _reopen(job: OpenJob, part: int, path: Any) -> None:
    digests = _row_digests(job, part)
    try:
        kept = [row for row in read_part(path, job.plan.names) if row.row in digests]
    except ValueError as error:
        raise StorageError(f"{error}; move it away, then run the same command again") from error
    for row in kept:
        message = _message(row)
        job.journal.append(Kind.RESULT, row.row, ResultRecord(digests[row.row], message).pack())
    for record, row in zip(job.journal.commit(), kept, strict=True):
        job.note_segment(record.location.segment, row.row)
        result = row.result
        job.found.results[row.row] = FoundResult(
            job.epoch, record.location, digests[row.row], result.status, result.usage
        )


def _row_digests(job: OpenJob, part: int) -> dict[int, bytes]:
    """Content hashes of the readable rows of a part."""
    first, size = part * job.manifest.part_rows, job.manifest.part_rows
    digests = {}
    for row in job.inputs.rows(job.index.nearest_start(part)):
        if row.ordinal >= first + size:
            break
        if row.ordinal >= first and row.error is None:
            digests[row.ordinal] = row.digest
    return digests


def _message(row: PartRow) -> dict[str, Any]:
    """A row of a part as the worker once reported it."""
    result: RowResult = row.result
    return {
        "status": result.status,
        "text": result.generated_text,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "error": result.error and [result.error.error_class.value, result.error.message],
        "usage": result.usage and list(result.usage),
    }


def _input_rows(inputs: InputSet) -> int | None:
    """Rows of the input where its files say so."""
    if inputs.format != "parquet":
        return None
    import pyarrow.parquet as pq

    return sum(int(pq.read_metadata(file.path).num_rows) for file in inputs.files)
