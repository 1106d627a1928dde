"""File operations of the output folder: durable writes, and every failure as one `StorageError`.

Everything under `batchgen/job/` that writes goes through here. `FileOps` is the seam at which tests make a
disk fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from batchgen.types import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
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


def disk_full() -> OSError:
    """What a short write means on a regular file."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
        remedy = f"free at least {needed:,} bytes there" if needed else "free some space there"
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


def atomic_write(path: Path, data: bytes, files: FileOps = OS_FILES) -> None:
    """Replace `path` by `data`, all or nothing, on disk when this returns.

    Raises:
        StorageError: the old content, if any, is still there.
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
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        files.fsync_folder(path.parent)
