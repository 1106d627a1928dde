"""Committed parts: writing one so that it is there entirely or not at all, and knowing it again.

A part is written under a temporary name and forced to disk; then what it is (rows, size, checksum) is
recorded; then it is renamed. A file in `data/` that no record describes is torn or foreign.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batchgen.data.results import OutputPlan
from batchgen.data.row import DIGEST_BYTES, Row
from batchgen.data.row_result import RowResult
from batchgen.data.sink import Record, write_part
from batchgen.job.files import OS_FILES, FileOps, open_existing, rename_owned, storage, storage_error
from batchgen.job.folder import PART_NAME, TEMPORARY, JobFolder
from batchgen.job.linelog import LineLog, log_name, read_folder
from batchgen.job.packed_table import PackedTable
from batchgen.job.part_summary import PartSummary, add_results
from batchgen.job.run_stats import PARTS
from batchgen.types import StorageError

_CHUNK = 1024 * 1024


@dataclass(slots=True)
class Counts:
    """What became of rows, and tokens of those the engine saw; reasoning is part of the completions."""

    ok: int = 0
    error: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def rows(self) -> int:
        return self.ok + self.error + self.skipped

    def count(self, status: str, usage: Sequence[int] | None) -> None:
        """Add one row."""
        setattr(self, status, getattr(self, status) + 1)
        if usage is not None:
            self.prompt_tokens += usage[0]
            self.completion_tokens += usage[1]
            self.reasoning_tokens += sum(usage[3:])

    def count_all(
        self,
        status: Sequence[str],
        prompt_tokens: Sequence[int],
        completion_tokens: Sequence[int],
        reasoning_tokens: Sequence[int],
    ) -> None:
        """Add many rows; tokens are 0 for those that the engine never saw."""
        self.ok += status.count("ok")
        self.error += status.count("error")
        self.skipped += status.count("skipped")
        self.prompt_tokens += sum(prompt_tokens)
        self.completion_tokens += sum(completion_tokens)
        self.reasoning_tokens += sum(reasoning_tokens)

    def add(self, other: Counts) -> None:
        """Add the rows of another count."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, slots=True)
class PartCommit:
    """What a committed part is.

    Args:
        part: its number.
        file: base name.
        rows: in it.
        bytes, digest: size and blake2b-16 of the file.
        mtime_ns: as written; a file that still has it is not read again to be recognised.
        counts: of its rows.
        change: number of the last retry that it has taken in.
        settings: which rows were computed under which change of the job, see `changes.Runs`.
        span: ordinals for which it was decided which rows are selected: first, and the one after the last.
        duplicate_ids: under which `input.duplicate_ids` it was written.
    """

    part: int
    file: str
    rows: int
    bytes: int
    digest: str
    mtime_ns: int
    counts: Counts = field(default_factory=Counts)
    change: int = 0
    settings: Sequence[Sequence[int]] = ()
    span: tuple[int, int] | None = None
    duplicate_ids: str = "error"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PartCommit:
        settings = tuple(map(tuple, data.get("settings", ())))
        span = tuple(data["span"]) if data.get("span") else None
        return cls(**{**data, "counts": Counts(**data["counts"]), "settings": settings, "span": span})

    @property
    def empty(self) -> bool:
        """Whether no row of it is selected, so that there is no file."""
        return not self.file

    def span_in(self, part_rows: int) -> tuple[int, int]:
        """`span`, also of a part that was written before there was one: then all rows were selected."""
        first = self.part * part_rows
        return (first, first + self.rows) if self.span is None else self.span

    def matches(self, path: Path) -> bool:
        """Whether this is the file at `path`; reads it only when its time stamp differs."""
        if self.empty:
            return True
        with storage(path, action="read"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                return False
            if path.name != self.file or stat.st_size != self.bytes:
                return False
            return stat.st_mtime_ns == self.mtime_ns or file_digest(path) == self.digest


class PartStore:
    """The parts of one job.

    Args:
        folder: the output folder.
        suffix: of part files.
        epoch: the claim under which this process writes.
        files: how to reach the disk.

    Attributes:
        committed: by part number.
    """

    def __init__(self, folder: JobFolder, suffix: str, epoch: int, files: FileOps = OS_FILES) -> None:
        self._folder = folder
        self._suffix = suffix
        self._epoch = epoch
        self._files = files
        self._log = LineLog(folder.commits / log_name(epoch), files)
        self._summaries = LineLog(folder.stats / log_name(epoch, PARTS), files)
        self.committed = _table()

    def recognise(self, say: Callable[[str], None], still_owner: Callable[[], None]) -> None:
        """Find the committed parts; move what is torn or foreign to quarantine and say so.

        Args:
            say: told of each file that was moved.
            still_owner: raises when another process has taken over; asked right before each move.
        """
        # Listed before the records are read: a part that appears in between is not looked at.
        with storage(self._folder.data, action="read"):
            names = sorted(self._files.listdir(self._folder.data))
        for commit in _found_again(self._folder):
            self.committed[commit.part] = commit
        for name in names:
            path = self._folder.data / name
            match = PART_NAME.fullmatch(name)
            if match is not None and not self._is_committed(int(match[1]), name) and path.is_file():
                still_owner()
                kept = self._folder.quarantined(path)
                say(
                    f"{path} is not a part that this job committed, or it is damaged; moved to {kept}, "
                    "its rows are computed again"
                )

    def _is_committed(self, part: int, name: str) -> bool:
        return part in self.committed and self._folder.part(part, self._suffix).name == name

    def commit(
        self,
        part: int,
        records: Iterable[Record],
        plan: OutputPlan,
        compression: str,
        still_owner: Callable[[], None],
        size: int = 0,
        change: int = 0,
        settings: Sequence[Sequence[int]] = (),
        span: tuple[int, int] | None = None,
        duplicate_ids: str = "error",
    ) -> PartCommit:
        """Write a part and put it in place; a part that exists under the name is replaced.

        Args:
            part: its number.
            records: its rows in input order.
            plan: the columns.
            compression: one of the format's.
            still_owner: raises when another process has taken over; asked right before the rename.
            size: bytes that it will take, roughly; what a full disk asks for.
            change, settings, span, duplicate_ids: as in `PartCommit`; looked at when all records have passed.

        Raises:
            StorageError: nothing has changed in `data/`.
            Whatever `records` and `still_owner` raise.
        """
        final = self._folder.part(part, self._suffix)
        temporary = final.with_name(f"{TEMPORARY}{final.name}-{uuid.uuid4().hex[:12]}")
        summary = PartSummary()

        def count(rows: Sequence[Row], results: Sequence[RowResult]) -> None:
            add_results(summary, [(row.ordinal, row.id) for row in rows], results)

        try:
            written = write_part(
                temporary, records, plan, compression=compression, on_group=count, disk=self._files
            )
        except StorageError as error:
            if isinstance(error.__cause__, OSError):
                raise storage_error(final, error.__cause__, size) from error.__cause__
            raise
        try:
            with storage(final, written.bytes):
                mtime = temporary.stat().st_mtime_ns
                commit = PartCommit(
                    part,
                    final.name,
                    written.rows,
                    written.bytes,
                    written.digest,
                    mtime,
                    _counts(summary),
                    change,
                    tuple(settings),
                    span,
                    duplicate_ids,
                )
                described = {"part": part, "digest": written.digest, "summary": summary.to_json()}
                self._summaries.append([described])
                still_owner()
                self._log.append([commit.to_json()])
                self._log.sync()
                rename_owned(self._files, temporary, final, still_owner)
                self._files.fsync_folder(self._folder.data)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.committed[part] = commit
        return commit

    def stop(self, part_rows: int) -> int:
        """The ordinal up to which the parts have been decided."""
        return max((commit.span_in(part_rows)[1] for commit in self.committed.values()), default=0)

    def commit_empty(self, part: int, span: tuple[int, int]) -> PartCommit:
        """Record a part of which no row is selected; there is no file.

        Not forced to disk: were the record lost, the part would be read again. Raises StorageError.
        """
        commit = PartCommit(part, "", 0, 0, "", 0, span=span)
        self._log.append([commit.to_json()])
        self.committed[part] = commit
        return commit

    def sync(self) -> None:
        """Force the records of empty parts to disk. Raises StorageError."""
        self._log.sync()

    def close(self) -> None:
        """Close the logs."""
        self._log.close()
        self._summaries.close()


def recognise_parts(
    folder: JobFolder, damaged: list[str] | None = None, *, empty: bool = False
) -> Mapping[int, PartCommit]:
    """The committed parts, from the commit records and the files that are there.

    Args:
        folder: the output folder.
        damaged: gets a sentence for each record that is left out.
        empty: those too of which no row is selected, and that have no file.

    Returns:
        By number, in that order; a few bytes of memory for each.
    """
    found = _table()
    for commit in _found_again(folder, damaged):
        found[commit.part] = commit
    if not empty:
        for part in [commit.part for commit in found.values() if commit.empty]:
            del found[part]
    return found


def _table() -> PackedTable[PartCommit]:
    return PackedTable(PartCommit.to_json, PartCommit.from_json)


def _found_again(folder: JobFolder, damaged: list[str] | None = None) -> Iterator[PartCommit]:
    """Commits whose file is there, as they were recorded; of one part the last is right."""
    for record in read_folder(folder.commits, damaged):
        commit = PartCommit.from_json(record)
        if commit.matches(folder.data / commit.file):
            yield commit


def read_summaries(
    folder: JobFolder, parts: Mapping[int, PartCommit], damaged: list[str]
) -> Mapping[int, PartSummary]:
    """What parts hold, by number, in little memory each; those of which nothing is known are missing.

    Args:
        folder: the output folder.
        parts: that are committed.
        damaged: gets a sentence for each record that is left out.
    """
    found: PackedTable[PartSummary] = PackedTable(PartSummary.to_json, PartSummary.from_json)
    for record in read_folder(folder.stats, damaged, PARTS):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            commit = parts.get(record["part"])
            if commit is not None and commit.digest == record["digest"]:
                found[commit.part] = PartSummary.from_json(record["summary"])
    return found


def file_digest(path: Path) -> str:
    """blake2b-16 of a file, in hexadecimal, as the sink computes it while writing."""
    total = blake2b(digest_size=DIGEST_BYTES)
    with os.fdopen(open_existing(OS_FILES, path), "rb") as file:
        while chunk := file.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()


def _counts(summary: PartSummary) -> Counts:
    ok, error, skipped = (summary.status[status] for status in ("ok", "error", "skipped"))
    prompt, completion = summary.prompt_tokens.total, summary.output_tokens.total
    return Counts(ok, error, skipped, int(prompt), int(completion), summary.reasoning_tokens)
