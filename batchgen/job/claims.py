"""Epochs of ownership: who may write, and how much of what earlier owners wrote counts.

Each attempt takes the next epoch, with the byte length of every older journal segment that it accepts. What a
frozen earlier owner writes when it wakes lies beyond these lengths, or in segments that no claim names, and
is void. Making a folder is the one step that only a single process can win, on any file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.job.files import OS_FILES, FileOps, atomic_write, open_existing, read_file, storage
from batchgen.job.folder import JobFolder
from batchgen.job.journal import SegmentName
from batchgen.job.linelog import decode_line, encode_line
from batchgen.types import OwnershipError


@dataclass(frozen=True, slots=True)
class Claim:
    """One epoch. `accepted` is segment name to bytes."""

    epoch: int
    accepted: Mapping[str, int]


class Claims:
    """The epochs of a folder."""

    def __init__(self, folder: JobFolder, files: FileOps = OS_FILES) -> None:
        self._folder = folder
        self._files = files

    def current(self) -> int:
        """The highest epoch that anyone took; 0 for none."""
        return max(self._epochs(), default=0)

    def check(self, epoch: int) -> None:
        """Raises OwnershipError when there is a higher epoch than `epoch`."""
        now = self.current()
        if now > epoch:
            raise OwnershipError(
                f"{self._folder.root}: another run took over (claim {now} follows {epoch}) while this "
                "process was stopped or cut off; nothing that it wrote since counts, let the other one finish"
            )

    def latest(self) -> Claim | None:
        """The highest epoch that was taken completely."""
        for epoch in sorted(self._epochs(), reverse=True):
            claim = self._read(epoch)
            if claim is not None:
                return claim
        return None

    def take(self, owner: Mapping[str, Any]) -> Claim:
        """Take the next epoch.

        Args:
            owner: who does, for the record.

        Raises:
            OwnershipError: another process took it at the same moment.
            StorageError: it cannot be written.
        """
        epoch = self.current() + 1
        place = self._folder.claims / f"{epoch:06d}"
        with storage(place):
            try:
                place.mkdir()
            except FileExistsError:
                raise OwnershipError(
                    f"{self._folder.root}: another process takes over this run at this moment; "
                    "wait for it, then run the same command again"
                ) from None
            self._files.fsync_folder(self._folder.claims)
        accepted = self._measure(self.latest())
        record = {"epoch": epoch, "accepted": accepted, "owner": dict(owner)}
        atomic_write(place / "claim.json", encode_line(record), self._files)
        return Claim(epoch, accepted)

    def accepted_now(self) -> dict[str, int]:
        """Segment lengths that count at this moment, for those who only look."""
        return self._measure(self.latest(), sync=False)

    def void_segments(self, claim: Claim) -> list[Path]:
        """Files of the journal that no claim accepts: written by owners that had lost the job."""
        return [
            path
            for path in map(self._folder.journal.joinpath, self._files.listdir(self._folder.journal))
            if (name := SegmentName.parse(path.name)) is None
            or (name.epoch < claim.epoch and path.name not in claim.accepted)
        ]

    def forget_before(self, epoch: int) -> None:
        """Remove claims that no reader needs any more."""
        for old in self._epochs():
            if old < epoch:
                shutil.rmtree(self._folder.claims / f"{old:06d}", ignore_errors=True)

    def _measure(self, base: Claim | None, *, sync: bool = True) -> dict[str, int]:
        """What `base` accepted of older segments, and all of its own."""
        accepted: dict[str, int] = {}
        if base is None:
            return accepted
        for path in map(self._folder.journal.joinpath, sorted(self._files.listdir(self._folder.journal))):
            name = SegmentName.parse(path.name)
            if name is None:
                continue
            if path.name in base.accepted:
                accepted[path.name] = base.accepted[path.name]
            elif name.epoch == base.epoch:
                size = _synced_size(path, self._files) if sync else _size(path)
                if size is not None:
                    accepted[path.name] = size
        return accepted

    def _epochs(self) -> list[int]:
        with storage(self._folder.claims):
            try:
                return [int(name) for name in self._files.listdir(self._folder.claims) if name.isdecimal()]
            except FileNotFoundError:
                return []

    def _read(self, epoch: int) -> Claim | None:
        path = self._folder.claims / f"{epoch:06d}" / "claim.json"
        # Only a claim that was not taken completely is passed over; one that cannot be read now must
        # not void what it accepted.
        with storage(path, action="read"):
            try:
                record = decode_line(read_file(self._files, path).removeprefix(b"\n"))
            except FileNotFoundError:
                return None
        return None if record is None else Claim(record["epoch"], record["accepted"])


def _size(path: Path) -> int | None:
    """Size of a segment; None if its owner has removed it."""
    with storage(path, action="read"), contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _synced_size(path: Path, files: FileOps) -> int | None:
    """Size of a segment, all of it forced to disk: its writer may have died before its own fsync.

    None for one that cannot be found: its rows are computed again.
    """
    with storage(path):
        try:
            fd = open_existing(files, path)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(fd).st_size
            files.fsync(fd)
            return size
        finally:
            os.close(fd)
