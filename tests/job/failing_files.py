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


class LayeredFiles(FailingFiles):
    """Fails by what a file is for: `decide(operation, layer)`, with the layers of `layer_of`."""

    def __init__(self, decide: Callable[[str, str], int | None]) -> None:
        super().__init__(lambda operation, number: self._by_layer(operation))
        self._choose = decide
        self._layer = ""

    def create(self, path: Path) -> int:
        self._layer = layer_of(path)
        return super().create(path)

    def write(self, fd: int, data: bytes) -> int:
        self._layer = layer_of(path_of(fd))
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._layer = layer_of(path_of(fd))
        super().fsync(fd)

    def fsync_folder(self, path: Path) -> None:
        self._layer = "folder " + path.name
        super().fsync_folder(path)

    def open(self, path: Path) -> int:
        self._layer = layer_of(path)
        self._may_fail("open")
        return super().open(path)

    def listdir(self, path: Path) -> list[str]:
        self._layer = "folder " + path.name
        self._may_fail("listdir")
        return super().listdir(path)

    def replace(self, source: Path, target: Path) -> None:
        self._layer = layer_of(target)
        verdict = self._verdict("replace")
        if verdict is None:
            super().replace(source, target)
            return
        if verdict == errno.ENOENT:
            # Done, then asked for again because the answer was lost.
            super().replace(source, target)
        raise OSError(verdict, os.strerror(verdict))

    def _by_layer(self, operation: str) -> int | None:
        return self._choose(operation, self._layer)


def path_of(fd: int) -> Path:
    """Where an open file lies."""
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


def layer_of(path: Path) -> str:
    """`part`, `manifest`, `success`, or the folder under `.batchgen`."""
    name = path.name.removeprefix(".tmp-")
    for start, layer in (("part-", "part"), ("manifest", "manifest"), ("_SUCCESS", "success")):
        if name.startswith(start):
            return layer
    return path.parent.name if ".batchgen" in path.parts else name
