"""`retry`: rows of a complete job that are computed anew, and the parts that hold them replaced.

What is retried is written to the manifest before anything else happens, so that a retry that was killed is
continued by the same command. The parts themselves stay until their successors are renamed over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchgen.grammar import agreeing, how_many
from batchgen.job.changes import RETRY, Change, stretches
from batchgen.job.condition import DEFAULT, Condition
from batchgen.job.drift import diff
from batchgen.job.part_reader import read_part
from batchgen.job.parts import PartCommit
from batchgen.types import DriftError, StorageError, UsageError

if TYPE_CHECKING:
    from batchgen.job.folder import JobFolder
    from batchgen.job.manifest import Manifest
    from batchgen.job.recovery import OpenJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What was asked for.

    Args:
        where: the condition; None for the rows that failed with a class that can change, or, where a retry
            goes on already, for whatever that one was begun with.
        sets: `--set` as written, without those that only say where files lie.
        result: the result fingerprint with them.
    """

    where: str | None = None
    sets: Sequence[str] = ()
    result: Mapping[str, Any] = field(default_factory=dict)


class NothingToRetry(Exception):
    """No row meets the condition; the folder is as it was."""


def begin_retry(job: OpenJob, retry: Retry) -> None:
    """Add the retry to the manifest, which the caller saves; one that goes on already is continued.

    Raises:
        UsageError: the job is not complete, the condition asks for what the output lacks, or another retry
            goes on.
        NothingToRetry: no row is meant.
        StorageError: a part cannot be read.
    """
    manifest = job.manifest
    if manifest.open_retry is not None:
        _check_same(job.folder, manifest.open_retry[1], retry)
        return
    committed = sum(commit.rows for commit in job.parts.committed.values())
    total = job.rows_total()
    if total is None or committed < total:
        raise UsageError(
            f"{job.folder.root}: {how_many(committed, 'row')}{f' of {total:,}' if total is not None else ''} "
            f"{agreeing(committed, 'is', 'are')} in "
            "parts; only a complete job is retried, so let `batchgen run` finish it first"
        )
    condition = Condition.parse(retry.where or DEFAULT)
    condition.require(job.plan.names)
    found = dict(_rows_meant(job, condition))
    if not found:
        raise NothingToRetry(f"{job.folder.root}: no row meets {condition.text}; nothing to retry")
    before = manifest.fingerprints["result"]
    manifest.changes.append(
        Change(
            kind=RETRY,
            epoch=job.epoch,
            differences=diff(before, retry.result) if retry.result else (),
            result=retry.result or before,
            before=before,
            where=condition.text,
            sets=tuple(retry.sets),
            parts=stretches(sorted(found)),
            rows=sum(found.values()),
            open=True,
        )
    )


def finish_retry(manifest: Manifest) -> bool:
    """Close the retry that goes on, in the manifest that the caller saves; False where there is none."""
    if manifest.open_retry is None:
        return False
    manifest.open_retry[1].open = False
    return True


def refuse_open_retry(folder: JobFolder, manifest: Manifest) -> None:
    """Raises DriftError while a retry goes on: an ordinary run would go by other settings."""
    if manifest.open_retry is not None:
        retry = manifest.open_retry[1]
        raise DriftError(
            f"{folder.root}: a {retry.describe()}, was begun and has not ended; finish it with "
            f"`batchgen retry {folder.root}`, then run this again"
        )


def _check_same(folder: JobFolder, open_retry: Change, asked: Retry) -> None:
    same_rows = asked.where in (None, open_retry.where)
    if not same_rows or list(asked.sets) != list(open_retry.sets):
        raise UsageError(
            f"{folder.root}: a {open_retry.describe()}, was begun and has not ended; finish it first with "
            f"`batchgen retry {folder.root}`, without --where and --set"
        )


def _rows_meant(job: OpenJob, condition: Condition) -> Iterator[tuple[int, int]]:
    """Parts with the number of their rows that meet the condition."""
    for part, commit in job.parts.committed.items():
        if commit.empty or (condition.errors_only and not commit.counts.error):
            continue
        rows = _count(job, commit, condition)
        if rows:
            yield part, rows


def _count(job: OpenJob, commit: PartCommit, condition: Condition) -> int:
    path = job.folder.data / commit.file
    try:
        return sum(condition(row) for row in read_part(path, job.plan.to_json()))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path}: cannot be read ({error}); `batchgen verify {job.folder.root}` says what is wrong, and "
            "`batchgen run` makes damaged parts anew"
        ) from error
