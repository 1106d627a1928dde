"""The stored bytes of an input file, wherever it lies. Byte streams, Parquet and Arrow readers use it."""

from __future__ import annotations

import io
import os
from typing import Protocol

from batchgen.data.input_file import InputFile
from batchgen.types import InputError

BLOCK_BYTES = 256 * 1024


class RawFile(Protocol):
    """Random access by ranges; `block_bytes` is a good size of one."""

    block_bytes: int

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes from `offset`, fewer than `size` only at the end of the file. Raises InputError."""

    def close(self) -> None: ...


def open_raw(file: InputFile) -> RawFile:
    """Opens the file. Raises InputError naming it."""
    if file.url is None:
        return _LocalFile(file.path)
    from batchgen.data.remote import RangeReader

    return RangeReader(file.url)


class _LocalFile:
    block_bytes = BLOCK_BYTES

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise InputError(f"{path}: cannot be read: {e.strerror}; check the file and its disk") from e

    def read_at(self, offset: int, size: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size, offset)
            while len(data) < size and (
                more := os.pread(self._descriptor, size - len(data), offset + len(data))
            ):
                data += more
        except OSError as e:
            raise InputError(
                f"{self._path}: cannot be read at byte {offset}: {e.strerror}; check its disk"
            ) from e
        return data

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class SeekableFile(io.RawIOBase):
    """A raw file as the file object that pyarrow reads from.

    Args:
        raw: closed with this one.
        size: of the file in bytes; what was appended since is not read.
    """

    def __init__(self, raw: RawFile, size: int) -> None:
        super().__init__()
        self._raw = raw
        self._size = size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """Bytes of the file; pyarrow asks for it."""
        return self._size

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._place)
        data = self._raw.read_at(self._place, left if size is None or size < 0 else min(size, left))
        self._place += len(data)
        return data

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
