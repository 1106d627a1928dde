"""File operations of the output folder: durable writes, and every failure as one `StorageError`.

Everything under `batchgen/job/` that writes goes through here. `FileOps` is the seam at which tests make a
disk fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from batchgen.grammar import counted
from batchgen.types import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# A network file system answers this once for a file that was replaced under a cached name.
_STALE = errno.ESTALE
_STALE_PAUSES = (0.05, 0.2, 1.0)
_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class FileOps:
    """The operations that can fail half-way; each is one system call."""

    def create(self, path: Path) -> int:
        """A new file for appending. Raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: bytes) -> int:
        """Bytes written, which may be fewer than given."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Force the file to disk."""
        os.fsync(fd)

    def open(self, path: Path) -> int:
        """An existing file for reading. Raises FileNotFoundError."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def listdir(self, path: Path) -> list[str]:
        """Names in a folder, in any order. Raises FileNotFoundError."""
        return os.listdir(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file over another."""
        os.replace(source, target)

    def fsync_folder(self, path: Path) -> None:
        """Force a folder's entries to disk, where the file system knows how to."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)


OS_FILES = FileOps()


def write_all(files: FileOps, fd: int, data: bytes) -> None:
    """Write every byte. Raises OSError; a write that makes no progress counts as a full disk."""
    while data:
        written = files.write(fd, data)
        if written <= 0:
            raise disk_full()
        data = data[written:]


def open_existing(files: FileOps, path: Path) -> int:
    """A file for reading, tried again where a network file system's cache was out of date. Raises OSError."""
    for pause in _STALE_PAUSES:
        try:
            return files.open(path)
        except OSError as error:
            if error.errno != _STALE:
                raise
        time.sleep(pause)
    return files.open(path)


def read_file(files: FileOps, path: Path, most: int | None = None) -> bytes:
    """A whole file, or its first `most` bytes. Raises OSError."""
    with os.fdopen(open_existing(files, path), "rb") as file:
        return file.read(most)


def rename_over(files: FileOps, source: Path, target: Path) -> None:
    """Put `source` in the place of `target`, in one step.

    A network file system may send a rename twice when the first answer was lost, and then report that the
    source is gone; whether it was done shows in what now bears the name.

    Raises:
        OSError: it was not done.
    """
    before = os.stat(source)
    try:
        files.replace(source, target)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(target)
            if (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino):
                return
        raise


def disk_full() -> OSError:
    """What a short write means on a regular file."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_of_storage(error: OSError) -> bool:
    """Whether it speaks of a disk or a limit, not of a file that should be there: no bug, but exit code 5."""
    return error.errno in (*_FULL, *_FORBIDDEN, *_TOO_MANY_OPEN, _STALE, errno.EFBIG, errno.EIO)


def is_full(error: OSError) -> bool:
    """Whether there is no room, so that trying elsewhere on the same disk is of no use."""
    return error.errno in _FULL


def storage_error(path: Path | str, error: OSError, needed: int = 0, action: str = "written") -> StorageError:
    """One sentence: the path, what the system says, what to do.

    Args:
        path: what could not be written or read.
        error: the system's answer.
        needed: bytes that were to be written, for a full disk.
        action: what could not be done.
    """
    reason = error.strerror or type(error).__name__
    if error.errno in _FULL:
        remedy = f"free at least {counted(needed, 'byte')} there" if needed else "free some space there"
        if error.errno == errno.EDQUOT:
            remedy = f"{remedy}, or have the quota raised"
    elif error.errno in _TOO_MANY_OPEN:
        remedy = "raise the limit of open files (ulimit -n)"
    elif error.errno == errno.EROFS:
        remedy = "mount it for writing or choose another output.path"
    elif error.errno in _FORBIDDEN:
        remedy = "allow writing there or choose another output.path"
    else:
        remedy = "check the disk"
    return StorageError(
        f"{path}: cannot be {action}: {reason}; {remedy}, then run the same command again "
        "(finished rows are kept)"
    )


@contextlib.contextmanager
def storage(path: Path | str, needed: int = 0, action: str = "written") -> Iterator[None]:
    """Turn an OSError of the body into the StorageError of `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, needed, action) from error


def anyone() -> None:
    """Allow the rename whoever owns the folder: for files that only their writer reads or replaces."""


def atomic_write(
    path: Path, data: bytes, files: FileOps = OS_FILES, still_owner: Callable[[], None] = anyone
) -> None:
    """Replace `path` by `data`, all or nothing, on disk when this returns.

    Args:
        path: the file.
        data: its new content.
        files: how to reach the disk.
        still_owner: raises when another process has taken over the folder. Asked when the new content lies
            under a temporary name already: a new owner removes those before it reads anything, so that the
            rename of a process that was stopped in between fails.

    Raises:
        StorageError: the old content, if any, is still there.
        Whatever `still_owner` raises.
    """
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:12]}")
    with storage(path, len(data)):
        try:
            fd = files.create(temporary)
            try:
                write_all(files, fd, data)
                files.fsync(fd)
            finally:
                os.close(fd)
            rename_owned(files, temporary, path, still_owner)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        files.fsync_folder(path.parent)


def rename_owned(files: FileOps, source: Path, target: Path, still_owner: Callable[[], None]) -> None:
    """As `rename_over`, for a temporary file that a new owner of the folder would have removed.

    Raises:
        OSError: it was not done, by an owner.
        Whatever `still_owner` raises.
    """
    still_owner()
    try:
        rename_over(files, source, target)
    except FileNotFoundError:
        still_owner()
        raise
