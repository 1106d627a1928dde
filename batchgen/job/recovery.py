"""From an output folder, in whatever state it was left, to one that a run can go on with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from batchgen.data.id_decisions import IdDecisions
from batchgen.data.results import OutputPlan
from batchgen.data.source import InputSet
from batchgen.grammar import counted
from batchgen.job.accepted import settle_drift
from batchgen.job.changes import of_epoch
from batchgen.job.claims import Claim, Claims
from batchgen.job.condition import DEFAULT, Condition
from batchgen.job.drift import diff
from batchgen.job.files import OS_FILES, atomic_write, storage
from batchgen.job.folder import JobFolder
from batchgen.job.ids import Stops, decide_ids
from batchgen.job.index import InputIndex
from batchgen.job.journal import JournalWriter, SegmentName
from batchgen.job.live_segments import LiveSegments
from batchgen.job.manifest import Manifest, load_manifest
from batchgen.job.parts import Counts, PartCommit, PartStore
from batchgen.job.replacement import Anew, Replaced, no_row
from batchgen.job.replay import Replay, replay
from batchgen.job.retry import begin_retry, refuse_open_retry
from batchgen.job.run_options import JobSetup
from batchgen.job.run_stats import RunStats
from batchgen.job.selection import Selection
from batchgen.job.success import read_success
from batchgen.job.unique_ids import UniqueIds
from batchgen.types import DriftError

_LATE_PAUSES = (0.1, 0.4, 1.0)


@dataclass(slots=True)
class OpenJob:
    """Everything on disk that a run reads and writes.

    Args:
        counts: of all rows that have a result, as far as they were met.
        found: what the journal holds beyond the committed parts.
        live: what is needed of the journal.
        replaced: committed parts that are assembled again, until they have been.
        total: rows of the selection, where an earlier run has counted them.
        decisions: what becomes of rows whose id an earlier one has, where that is not an error.
        ids: what looks for such rows where it is; set while it does.
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
    counts: Counts
    selection: Selection
    input_rows: int | None
    total: int | None = None
    decisions: IdDecisions | None = None
    ids: UniqueIds | None = None
    found: Replay = field(default_factory=Replay.empty)
    live: LiveSegments = field(init=False)
    replaced: dict[int, Replaced] = field(default_factory=dict)

    def rows_total(self) -> int | None:
        """Rows of the selection; None while the end of the input is unknown, or how many `where` selects."""
        if self.total is not None or self.inputs.where is not None:
            return self.total
        return self.selection.most_rows(self.input_rows if self.index.end is None else self.index.end)

    def still_owner(self) -> None:
        """Raises OwnershipError when another process has taken over."""
        self.claims.check(self.epoch)

    def replacing(self, commit: PartCommit, anew: Anew = no_row, since: int = 0, change: int = 0) -> Replaced:
        """A committed part as one that is to be replaced."""
        return Replaced(commit, self.folder.data / commit.file, self.plan.to_json(), anew, since, change)

    def drop_segments(self) -> None:
        """Remove journal segments that nothing is needed of. Raises StorageError, OwnershipError."""
        self.live.drop(self.parts.committed.keys(), self.still_owner)

    def drop_journal(self) -> None:
        """Remove what is left of the journal, once every row is in a committed part. Raises StorageError."""
        self.journal.close()
        with storage(self.folder.journal, action="removed"):
            for path in self.folder.journal.glob("*.seg"):
                name = SegmentName.parse(path.name)
                if name is None or name.epoch <= self.epoch:
                    path.unlink(missing_ok=True)
        self.live.clear()

    def pin(self, pinned: Mapping[str, Any], facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Keep the numeric choices of the first worker; every later one must report the same.

        Raises:
            DriftError: it reports others.
        """
        manifest = self.manifest
        if not manifest.pinned:
            manifest.pinned, manifest.facts = dict(pinned), dict(facts)
            manifest.save(self.folder, self.still_owner)
            return
        differences = diff(manifest.pinned, pinned)
        if differences:
            raise DriftError(
                f"{self.folder.root}: the engine computes otherwise here than where this job began:\n"
                + "\n".join(differences)
                + "\nRun on a machine like that of the first attempt; or start over with --overwrite."
            )
        # How much memory there is for the cache changes no bits.
        changed = diff({**manifest.facts, "num_blocks": None}, {**facts, "num_blocks": None})
        if changed:
            say(
                "what runs the model differs from the first attempt, so new rows may differ in their bits "
                "from rows computed then:\n" + "\n".join(changed)
            )

    def close(self) -> None:
        """Close every file."""
        if self.ids is not None:
            self.ids.close()
        self.journal.close()
        for log in (self.index, self.parts, self.stats):
            log.close()


def open_job(
    setup: JobSetup,
    folder: JobFolder,
    claim: Claim,
    say: Callable[[str], None],
    stops: Stops,
    *,
    accept_drift: bool = False,
) -> OpenJob:
    """Recover a folder that this process owns, or begin a new job in it.

    Args:
        setup: the job.
        folder: created, owned.
        claim: this process's.
        say: gets a sentence for each thing that was found damaged.
        stops: whether to give up while ids are read.
        accept_drift: go on where the job differs from the folder's, and record it.

    Raises:
        DriftError: the folder belongs to another job, or has more rows than are asked for now.
        StorageError, InputError: it cannot be read or written.
        Interrupted: `stops` said so; says why.
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
    if not _find_manifest(folder):
        still_owner()
        folder.forget_job()
    index = InputIndex(folder, claim.epoch)
    manifest, plan = _manifest(setup, folder)
    parts = PartStore(folder, setup.suffix, claim.epoch)
    parts.recognise(say, still_owner)
    still_owner()
    settle_drift(setup, folder, manifest, index, parts.committed, claim.epoch, say, accept=accept_drift)
    selection = setup.selection
    if setup.retry is not None and index.end is not None:
        # What the input has more by now is for an ordinary run.
        selection = selection.up_to(index.end)
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
        counts=Counts(),
        selection=selection,
        input_rows=setup.inputs.num_rows(),
        total=_rows_of_success(folder, selection),
    )
    _check_selection(job)
    if setup.retry is not None:
        begin_retry(job, setup.retry)
    _decide_ids(job, setup, stops, say)
    manifest.enter(claim.epoch)
    _find_replaced(job)
    job.found = _replay(job, claim)
    job.live = LiveSegments(folder.journal, manifest.job_id, job.journal, job.found, manifest.part_rows)
    for sentence in (*index.damaged, *map(str, job.found.dropped)):
        say(sentence)
    manifest.save(folder, still_owner)
    if setup.retry is None:
        resolved = setup.resolved_job.encode(errors="surrogatepass")
        atomic_write(folder.resolved_job, resolved, OS_FILES, still_owner)
    still_owner()
    with storage(folder.success, action="removed"):
        folder.success.unlink(missing_ok=True)
    for commit in parts.committed.values():
        job.counts.add(commit.counts)
    job.drop_segments()
    return job


def _find_manifest(folder: JobFolder) -> bool:
    """Whether there is a manifest. Where other files say so, a network file system may show it late."""
    for pause in (*_LATE_PAUSES, 0.0):
        if load_manifest(folder) is not None:
            return True
        if not folder.begun():
            return False
        time.sleep(pause)
    return False


def _replay(job: OpenJob, claim: Claim) -> Replay:
    manifest = job.manifest
    now = manifest.current_change()
    return replay(
        job.folder.journal,
        manifest.job_id,
        claim.accepted,
        manifest.part_rows,
        job.parts.committed,
        {part: replaced.since for part, replaced in job.replaced.items()},
        lambda epoch: of_epoch(manifest.epochs, epoch) == now,
    )


def _manifest(setup: JobSetup, folder: JobFolder) -> tuple[Manifest, OutputPlan]:
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
            limit=setup.selection.limit,
            rows=setup.selection.rows,
        )
    else:
        if setup.retry is None:
            refuse_open_retry(folder, manifest)
        plan = OutputPlan.from_json(manifest.output_plan, setup.inputs)
        manifest.limit, manifest.rows = setup.selection.limit, setup.selection.rows
    manifest.commits = {**setup.commits, **manifest.commits}
    return manifest, plan


def _check_selection(job: OpenJob) -> None:
    """A selection must hold what the folder holds: every row in `data/` belongs to it.

    Where `where` drops rows, a limit that cuts what is there may be found by the window only.
    """
    spans = [c.span_in(job.manifest.part_rows) for c in job.parts.committed.values() if not c.empty]
    if not spans:
        return
    first, stop = min(span[0] for span in spans), max(span[1] for span in spans)
    selection = job.selection
    if first < selection.first or (selection.stop is not None and stop > selection.stop):
        raise DriftError(
            f"{job.folder.root}: holds results of rows {first:,} to {stop - 1:,}, and input.rows asks for "
            f"{selection.rows}; ask for rows that include them, such as {min(first, selection.first)}:"
            f"{'' if selection.stop is None else max(stop, selection.stop)}, choose another output.path, or "
            "start over with --overwrite"
        )
    in_parts = sum(commit.rows for commit in job.parts.committed.values())
    rows = in_parts if job.inputs.where is not None else stop - selection.first
    if selection.limit is not None and rows > selection.limit:
        raise DriftError(
            f"{job.folder.root}: holds the results of {counted(rows, 'row')}, and input.limit asks for "
            f"{selection.limit:,}; set input.limit to {rows:,} or more, choose another output.path, or start "
            "over with --overwrite"
        )


def _decide_ids(job: OpenJob, setup: JobSetup, stops: Stops, say: Callable[[str], None]) -> None:
    """Find out what becomes of ids before any row runs; parts written before that was asked for follow."""
    now = setup.duplicate_ids
    job.manifest.require_duplicate_ids(now, job.folder)
    if now == "error":
        return
    say(f"reading the ids of the rows first (input.duplicate_ids: {now})")
    job.decisions = decide_ids(job.inputs, job.folder.index, now, job.selection, stops)
    job.manifest.duplicate_ids = now
    if job.decisions is not None:
        for part, _ in groupby(ordinal // job.manifest.part_rows for ordinal in job.decisions.ordinals()):
            commit = job.parts.committed.get(part)
            if commit is None or commit.duplicate_ids == now:
                continue
            if commit.empty:
                del job.parts.committed[part]
            else:
                job.replaced[part] = job.replacing(commit, change=commit.change)


def _grown_parts(job: OpenJob) -> Iterator[PartCommit]:
    """Parts of which more rows are selected now than when they were written."""
    size, selection = job.manifest.part_rows, job.selection
    committed = sum(commit.rows for commit in job.parts.committed.values())
    if job.inputs.where is not None and committed == selection.limit:
        return
    rows = selection.most_rows(job.index.end) if job.inputs.where is None else None
    last = None if rows is None else selection.first + rows
    ends = [end for end in (last, job.index.end) if end is not None]
    for commit in job.parts.committed.values():
        first, stop = selection.span(commit.part, size)
        was_first, was_stop = commit.span_in(size)
        if first < was_first or was_stop < min([stop, *ends]):
            yield commit


def _rows_of_success(folder: JobFolder, selection: Selection) -> int | None:
    """Rows that `_SUCCESS` counts, if it is of this selection."""
    success = read_success(folder)
    return success["rows"] if success is not None and selection.is_complete(success) else None


def _find_replaced(job: OpenJob) -> None:
    """Take committed parts that are assembled again out of those that are final."""
    for commit in list(_grown_parts(job)):
        if commit.empty:
            del job.parts.committed[commit.part]
            continue
        job.replaced[commit.part] = job.replacing(commit, change=commit.change)
    if job.manifest.open_retry is not None:
        number, retry = job.manifest.open_retry
        anew = Condition.parse(retry.where or DEFAULT)
        for commit in job.parts.committed.values():
            if commit.change < number and retry.covers(commit.part):
                job.replaced[commit.part] = job.replacing(commit, anew, retry.epoch, number)
    for part in job.replaced:
        job.parts.committed.pop(part, None)
