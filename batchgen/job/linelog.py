"""An append-only log of small JSON records, each with its checksum, for the index, commits and stats.

One writer per file. A torn or damaged line is left out by the reader and counted; it never hides another.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from batchgen.job.files import OS_FILES, FileOps, is_full, open_existing, storage, write_all

_CHECKSUM_CHARS = 8
# A log of which more than this is not forced to disk has no second chance: the rest is made anew.
MOST_WRITTEN_AGAIN = 1024 * 1024


class LineLog:
    """Appends records to a file of its own, created with the first one.

    Args:
        path: must not exist yet.
        files: how to reach the disk.
    """

    def __init__(self, path: Path, files: FileOps = OS_FILES) -> None:
        self._path = path
        self._files = files
        self._fd = -1
        self._unsynced = False
        self._recent = bytearray()
        self._failures = 0

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records; on disk only after `sync`.

        Raises:
            StorageError: failed twice; the last line may be torn.
        """
        data = b"".join(map(encode_line, records))
        if not data:
            return
        if len(self._recent) <= MOST_WRITTEN_AGAIN:
            self._recent += data
        self._unsynced = True
        self._attempt(lambda: self._write(data))

    def sync(self) -> None:
        """Force what was appended to disk. Raises StorageError."""
        if self._unsynced:
            self._attempt(lambda: self._files.fsync(self._fd))
            self._unsynced = False
            self._recent.clear()

    def _attempt(self, operation: Callable[[], None]) -> None:
        """Do it; after a failure write what is not on disk for certain to another file, once."""
        with storage(self._path, len(self._recent)):
            try:
                operation()
            except OSError as error:
                if self._failures or is_full(error) or len(self._recent) > MOST_WRITTEN_AGAIN:
                    raise
                self._failures += 1
                self.close()
                # Sorts right behind the file that failed.
                self._path = self._path.with_stem(f"{self._path.stem}_again")
                self._write(bytes(self._recent))
                self._files.fsync(self._fd)

    def _write(self, data: bytes) -> None:
        if self._fd < 0:
            self._fd = self._files.create(self._path)
            self._files.fsync_folder(self._path.parent)
        write_all(self._files, self._fd, data)

    def close(self) -> None:
        """Close the file; appending again is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One line: CRC-32 of the JSON in hexadecimal, a space, the JSON. A blank line goes ahead of it, so that
    a line break that is damaged joins no two records.
    """
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    return b"\n%08x %s\n" % (zlib.crc32(text), text)


def read_lines(path: Path, damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The intact records of one log.

    Args:
        path: the file.
        damaged: gets a sentence for each line that is left out.
    """
    with storage(path, action="read"), os.fdopen(open_existing(OS_FILES, path), "rb") as file:
        for number, line in enumerate(file, 1):
            if line == b"\n":
                continue
            record = decode_line(line)
            if record is not None:
                yield record
            elif damaged is not None:
                damaged.append(f"{path} line {number}: torn or damaged, left out")


def read_folder(folder: Path, damaged: list[str] | None = None, kind: str = "e") -> Iterator[dict[str, Any]]:
    """The intact records of all logs of one kind in a folder, oldest epoch first."""
    with storage(folder, action="read"):
        names = sorted(OS_FILES.listdir(folder))
    for name in names:
        if re.fullmatch(rf"{kind}\d+(_again)?\.jsonl", name):
            yield from read_lines(folder / name, damaged)


def log_name(epoch: int, kind: str = "e") -> str:
    """File name of the log that the owner of `epoch` writes; names sort by epoch.

    Args:
        epoch: the claim.
        kind: a letter, where a folder holds logs of several kinds.
    """
    return f"{kind}{epoch:06d}.jsonl"


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The record of one line; None for one that is torn or damaged."""
    checksum, text = line[:_CHECKSUM_CHARS], line[_CHECKSUM_CHARS + 1 : -1]
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    record = json.loads(text.decode(errors="surrogatepass"))
    return record if isinstance(record, dict) else None
