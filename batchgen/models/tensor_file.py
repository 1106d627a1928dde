"""A file of named tensors that is mapped into memory, and facts beside them.

The cache keeps packed weights in such files. All processes that map one share its pages, and opening it takes
no time; so it is opened only if it is what was written:

    magic, length of the header, SHA-256 of the header | header, JSON | tensors, each at a multiple of 64

The header says how long the file is and what its tensors' SHA-256 is. The latter is computed when a file is
first met; it is remembered together with the file's inode, length and modification time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batchgen.cache import keep, key_of, recall
from batchgen.grammar import counted

MAGIC = b"batchgen tensors"
ALIGNMENT = 64
_PAGE = 4096
_PREFIX = len(MAGIC) + 8 + 32
_CHUNK = 16 * 1024 * 1024
_CHECKED = "checked"
_NAMES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    )
}


class DamagedFileError(Exception):
    """A file is not, or not any more, what was written; says why."""


class Stored(NamedTuple):
    """What a file holds: tensors whose memory is the mapped file, and facts as JSON knows them."""

    tensors: dict[str, torch.Tensor]
    facts: Any


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], facts: Any) -> None:
    """Write a file that appears as a whole, or not at all, whatever happens.

    Args:
        path: is replaced.
        tensors: contiguous, on the CPU.
        facts: anything that JSON knows.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    places: dict[str, tuple[str, list[int], int]] = {}
    end = 0
    for name, tensor in tensors.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        places[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start)
        end = start + tensor.nbytes
    header = _header(places, facts, end, "0" * 64)
    begin = -(-(_PREFIX + len(header)) // _PAGE) * _PAGE
    handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            digest = hashlib.sha256()
            file.seek(begin)
            for name, tensor in tensors.items():
                gap = memoryview(bytes(begin + places[name][2] - file.tell()))
                for piece in (gap, *_pieces(tensor)):
                    digest.update(piece)
                    file.write(piece)
            header = _header(places, facts, end, digest.hexdigest())
            file.seek(0)
            file.write(MAGIC + len(header).to_bytes(8, "little") + hashlib.sha256(header).digest() + header)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
            _note_checked(file.fileno(), digest.hexdigest())
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def open_tensors(path: Path) -> Stored:
    """Map a file that `write_tensors` has written.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        DamagedFileError: it is not one, or has been changed since.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        header, begin = _read_header(handle)
        size = os.fstat(handle).st_size
        if size != begin + header["size"]:
            raise DamagedFileError(f"it has {counted(size, 'byte')} instead of {begin + header['size']:,}")
        # Private and never written, so that the pages are the file's own, which every process shares.
        content = mmap.mmap(handle, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        if recall(_CHECKED, _identity(handle, header["sha256"])) is None:
            with memoryview(content) as view:
                digest = hashlib.sha256(view[begin:]).hexdigest()
            if digest != header["sha256"]:
                raise DamagedFileError("its content has changed")
            _note_checked(handle, digest)
        # Read ahead what a cold page cache does not hold, while the caller goes on.
        content.madvise(mmap.MADV_WILLNEED)
    finally:
        os.close(handle)
    tensors = {
        name: _tensor(content, dtype, shape, begin + start)
        for name, (dtype, shape, start) in header["tensors"].items()
    }
    return Stored(tensors, header["facts"])


def _header(places: Mapping[str, Any], facts: Any, size: int, digest: str) -> bytes:
    return json.dumps({"size": size, "sha256": digest, "tensors": places, "facts": facts}).encode()


def _pieces(tensor: torch.Tensor) -> list[memoryview]:
    if not tensor.is_contiguous():
        raise ValueError("only contiguous tensors can be written")
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    content = memoryview(numbers)
    return [content[i : i + _CHUNK] for i in range(0, len(content), _CHUNK)]


def _read_header(handle: int) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    prefix = os.pread(handle, _PREFIX, 0)
    length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 8], "little")
    if len(prefix) < _PREFIX or not prefix.startswith(MAGIC) or length > os.fstat(handle).st_size:
        raise DamagedFileError("it is no file of tensors")
    content = os.pread(handle, length, _PREFIX)
    if hashlib.sha256(content).digest() != prefix[-32:]:
        raise DamagedFileError("its header is damaged")
    header: dict[str, Any] = json.loads(content)
    return header, -(-(_PREFIX + length) // _PAGE) * _PAGE


def _tensor(content: mmap.mmap, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    count = 1
    for length in shape:
        count *= length
    if not count:
        return torch.empty(shape, dtype=_NAMES[dtype])
    return torch.frombuffer(content, dtype=_NAMES[dtype], count=count, offset=start).view(shape)


def _identity(handle: int, digest: str) -> str:
    stat = os.fstat(handle)
    return key_of(map(str, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, digest)))


def _note_checked(handle: int, digest: str) -> None:
    keep(_CHECKED, _identity(handle, digest), b"")
