"""Where everything lies in an output folder. Every module of the job asks here for its paths.

manifest.json  job.resolved.yaml  report.html  report.json  _SUCCESS
data/part-NNNNNN.*           committed parts
.batchgen/attempts/NNNN.*    one attempt each: record, worker logs and counters
.batchgen/claims/NNNNNN/     epochs of ownership
.batchgen/commits/           which parts were committed, with checksums
.batchgen/index/             where each part begins in the input, with content hashes
.batchgen/journal/           results and partial results that are in no part yet
.batchgen/stats/             what depends on scheduling, see `run_stats.py`
.batchgen/quarantine/        torn or foreign files
.batchgen/lease.json  .batchgen/lock
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchgen.job.files import OS_FILES, FileOps, rename_over, storage
from batchgen.types import UsageError

PART_NAME = re.compile(r"part-(\d{6,})(\.parquet|\.jsonl(?:\.(?:zst|gz))?)")
TEMPORARY = ".tmp-"
REPORTS = ("report.html", "report.json", "compare.html", "compare.json")
_WRITTEN_BY_RUN = ("attempts", "claims", "commits", "index", "journal", "stats", "quarantine")


@dataclass(frozen=True, slots=True)
class JobFolder:
    """An output folder; nothing is created until `create`."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def internal(self) -> Path:
        return self.root / ".batchgen"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def resolved_job(self) -> Path:
        return self.root / "job.resolved.yaml"

    @property
    def success(self) -> Path:
        return self.root / "_SUCCESS"

    @property
    def attempts(self) -> Path:
        return self.internal / "attempts"

    @property
    def claims(self) -> Path:
        return self.internal / "claims"

    @property
    def commits(self) -> Path:
        return self.internal / "commits"

    @property
    def index(self) -> Path:
        return self.internal / "index"

    @property
    def journal(self) -> Path:
        return self.internal / "journal"

    @property
    def stats(self) -> Path:
        return self.internal / "stats"

    @property
    def quarantine(self) -> Path:
        return self.internal / "quarantine"

    @property
    def lease(self) -> Path:
        return self.internal / "lease.json"

    @property
    def suspects(self) -> Path:
        return self.internal / "suspects.json"

    @property
    def lock(self) -> Path:
        return self.internal / "lock"

    def part(self, number: int, suffix: str) -> Path:
        """The file of a part."""
        return self.data / f"part-{number:06d}{suffix}"

    def wrote(self, path: str) -> bool:
        """Whether a file lies where a job writes, and so cannot be its input."""
        own = {"manifest.json", "job.resolved.yaml", "_SUCCESS", *REPORTS}
        *folders, name = Path(path).parts
        is_part = PART_NAME.fullmatch(name) is not None
        if not (is_part or name in own or self.internal.name in folders):
            return False
        where = os.path.relpath(os.path.realpath(path), os.path.realpath(self.root)).split(os.sep)
        return (is_part and where == ["data", name]) or where[0] in {self.internal.name, *own}

    def create(self, files: FileOps = OS_FILES) -> None:
        """Make the folders and prove that each can be written, before anything costly starts.

        Raises:
            StorageError: names the first that cannot.
        """
        for folder in (self.root, self.data, *(self.internal / name for name in _WRITTEN_BY_RUN)):
            with storage(folder):
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / f"{TEMPORARY}probe-{uuid.uuid4().hex}"
                os.close(files.create(probe))
                probe.unlink(missing_ok=True)
        for folder in (self.root.parent, self.root, self.internal):
            with storage(folder):
                files.fsync_folder(folder)

    def quarantined(self, path: Path, files: FileOps = OS_FILES) -> Path:
        """Move a file that is not ours or is damaged out of the way; returns where it went."""
        with storage(path):
            target, number = self.quarantine / path.name, 1
            while target.exists():
                target = self.quarantine / f"{path.name}.{number}"
                number += 1
            rename_over(files, path, target)
        return target

    def refuse_foreign(self) -> None:
        """Leave a folder alone that no job has made, and one that reaches out of itself.

        Raises:
            UsageError: it holds files that a job would replace, or part of it is a symbolic link.
        """
        for folder in (self.data, self.internal, *(self.internal / name for name in _WRITTEN_BY_RUN)):
            if folder.is_symlink():
                raise UsageError(
                    f"{folder}: is a symbolic link, and results stay in their folder; make it a real folder, "
                    "or let output.path itself be the link"
                )
        if self.internal.is_dir():
            return
        ours = [path for path in (self.manifest, self.success, self.resolved_job) if path.exists()]
        if self.data.is_dir():
            ours += [path for path in self.data.iterdir() if PART_NAME.fullmatch(path.name)]
        if ours:
            raise UsageError(
                f"{self.root}: is not the output folder of a job (it has no .batchgen folder), and {ours[0]} "
                "would be in the way; choose another output.path, or move that away"
            )

    def clear(self, still_owner: Callable[[], None]) -> None:
        """Remove everything that a job wrote, for `--overwrite`; claims stay, so that epochs go on.

        The manifest goes first: without it nothing that is left counts, see `forget_job`.

        Args:
            still_owner: raises when another process has taken over; asked before each step.
        """
        with storage(self.root):
            reports = (self.root / name for name in REPORTS)
            for path in (self.manifest, self.success, self.resolved_job, self.suspects, *reports):
                still_owner()
                path.unlink(missing_ok=True)
            for path in list(self.data.iterdir()):
                if PART_NAME.fullmatch(path.name) or path.name.startswith(TEMPORARY):
                    still_owner()
                    path.unlink()
            for name in _WRITTEN_BY_RUN:
                if name != "claims":
                    still_owner()
                    shutil.rmtree(self.internal / name, ignore_errors=True)
                    (self.internal / name).mkdir(exist_ok=True)

    def begun(self) -> bool:
        """Whether a job has left results or records of parts."""
        with storage(self.internal, action="read"):
            return any(OS_FILES.listdir(folder) for folder in (self.commits, self.journal))

    def forget_job(self) -> None:
        """Drop the records of a job whose manifest is gone: its parts and rows must not count for another.

        Its part files stay, and are moved to quarantine when nobody knows them.
        """
        with storage(self.internal, action="removed"):
            for name in ("commits", "index", "journal", "stats"):
                for path in (self.internal / name).iterdir():
                    path.unlink()
            self.suspects.unlink(missing_ok=True)

    def remove_temporaries(self) -> int:
        """Remove what killed attempts left half-written; returns how many files."""
        removed = 0
        with storage(self.root):
            for folder in (self.root, self.data, self.internal, *self.internal.iterdir()):
                if folder.is_dir():
                    for path in folder.glob(f"{TEMPORARY}*"):
                        path.unlink(missing_ok=True)
                        removed += 1
        return removed
