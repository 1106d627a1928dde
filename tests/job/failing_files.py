"""A disk that fails when told to, through the seam of `batchgen.job.files`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from batchgen.job.files import FileOps


class FailingFiles(FileOps):
    """Counts operations and asks `decide` whether one fails.

    `decide(operation, number)` returns None to let it pass, an errno to fail with, or for `write` a
    negative number: minus how many bytes are written before the write stops short.
    """

    def __init__(self, decide: Callable[[str, int], int | None]) -> None:
        self.decide = decide
        self.count = 0

    def create(self, path: Path) -> int:
        self._may_fail("create")
        return super().create(path)

    def write(self, fd: int, data: bytes) -> int:
        verdict = self._verdict("write")
        if verdict is not None and verdict < 0:
            return super().write(fd, data[: min(-verdict, len(data) - 1)]) if len(data) > 1 else 0
        if verdict is not None:
            # A failing write may have left anything behind.
            super().write(fd, data[: len(data) // 2])
            raise OSError(verdict, os.strerror(verdict))
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._may_fail("fsync")
        super().fsync(fd)

    def fsync_folder(self, path: Path) -> None:
        self._may_fail("fsync_folder")
        super().fsync_folder(path)

    def _verdict(self, operation: str) -> int | None:
        self.count += 1
        return self.decide(operation, self.count)

    def _may_fail(self, operation: str) -> None:
        verdict = self._verdict(operation)
        if verdict is not None:
            code = verdict if verdict > 0 else errno.EIO
            raise OSError(code, os.strerror(code))
