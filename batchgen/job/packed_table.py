"""Records by number in a few bytes of memory each: what the supervisor knows of every part, of any number of
parts. The records themselves lie packed in one buffer, and in a temporary file once that is large.
"""

from __future__ import annotations

import json
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from batchgen.job.files import storage

T = TypeVar("T")

BUFFER_BYTES = 4 * 1024 * 1024
_NONE = -1
_LENGTH_BYTES = 4


class PackedTable(MutableMapping[int, T], Generic[T]):
    """A map from small numbers to records, in order of the numbers. May be used from several threads.

    Args:
        pack: from a record to plain values.
        unpack: back.

    Every operation raises StorageError where the temporary file cannot be written or read.
    """

    def __init__(
        self, pack: Callable[[T], Mapping[str, Any]], unpack: Callable[[Mapping[str, Any]], T]
    ) -> None:
        self._pack = pack
        self._unpack = unpack
        # Closed with this object; a context would end before it.
        self._file = tempfile.SpooledTemporaryFile(max_size=BUFFER_BYTES, prefix="batchgen-")  # noqa: SIM115
        self._end = 0
        self._offsets = array("q")
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for number in range(len(self._offsets)):
            if self._offsets[number] != _NONE:
                yield number

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self._offset(number) != _NONE

    def __getitem__(self, number: int) -> T:
        offset = self._offset(number)
        if offset == _NONE:
            raise KeyError(number)
        with self._lock, storage(tempfile.gettempdir(), action="read"):
            self._file.seek(offset)
            length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
            data = self._file.read(length)
        return self._unpack(json.loads(data))

    def __setitem__(self, number: int, record: T) -> None:
        data = json.dumps(self._pack(record), separators=(",", ":")).encode(errors="surrogatepass")
        with self._lock, storage(tempfile.gettempdir(), len(data)):
            self._file.seek(self._end)
            self._file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            missing = number + 1 - len(self._offsets)
            if missing > 0:
                self._offsets.extend([_NONE] * missing)
            self._count += self._offsets[number] == _NONE
            self._offsets[number] = self._end
            self._end += _LENGTH_BYTES + len(data)

    def __delitem__(self, number: int) -> None:
        if self._offset(number) == _NONE:
            raise KeyError(number)
        with self._lock:
            self._offsets[number] = _NONE
            self._count -= 1

    def nearest(self, number: int) -> int | None:
        """The largest number with a record that is not above `number`."""
        start = min(number, len(self._offsets) - 1)
        return next((n for n in range(start, -1, -1) if self._offsets[n] != _NONE), None)

    def clear(self) -> None:
        """Forget every record."""
        with self._lock, storage(tempfile.gettempdir()):
            self._file.seek(0)
            self._file.truncate()
            self._end, self._offsets, self._count = 0, array("q"), 0

    def close(self) -> None:
        """Let go of the buffer and the file."""
        self._file.close()

    def __del__(self) -> None:
        # It warns of a file that is collected open.
        self._file.close()

    def _offset(self, number: int) -> int:
        return self._offsets[number] if 0 <= number < len(self._offsets) else _NONE
